"""Names that Hugging Face's checkpoints give to the experts of a layer, by family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertNames:
    """A family's parameter names, without the prefix of a layer and without ``.weight``.

    Attributes:
        layer: the layer of experts itself.
        gate, up, down: the matrices of an expert.
        shared: the expert that all tokens pass; "" without one.
        shared_gate: gate of the shared expert; "" without one.
    """

    layer: str
    gate: str
    up: str
    down: str
    shared: str = ""
    shared_gate: str = ""

    @property
    def router(self) -> str:
        """Return the name of the router."""
        return f"{self.layer}.gate"

    def expert(self, number: int) -> str:
        """Return the prefix of an expert by its number in the whole layer."""
        return f"{self.layer}.experts.{number}"


MIXTRAL = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
#: Qwen2-MoE with a shared expert, Qwen3-MoE without
QWEN_MOE = ExpertNames(
    "mlp", "gate_proj", "up_proj", "down_proj", "mlp.shared_expert", "mlp.shared_expert_gate"
)
DEEPSEEK = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj", "mlp.shared_experts")
