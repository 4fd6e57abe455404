"""Facts of a DeepSpeed job that the rules read: its ds_config, and facts of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridcomp.errors import ConfigError


@dataclass(frozen=True)
class DeepSpeedJob:
    """A ds_config, read with DeepSpeed's defaults, and facts of the model. None: not known."""

    ds_json: Mapping[str, Any]
    pipeline: bool | None = None
    moe: bool | None = None
    world_size: int | None = None
    #: tensor-parallel layers that a seam covers: split already, or of GPT-NeoX or megatron-core
    tensor: bool | None = None
    #: sequence-parallel groups or attention layers
    sequence: bool | None = None
    #: copies of the model; None where the layout of the ranks is not known
    replicas: int | None = None
    #: layers of hybridcomp.nn.tp2d
    mesh: bool | None = None
    #: stages of hybridcomp.nn.slices
    slices: bool | None = None

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at a dotted path; ``default`` for null and "auto" (filled in later)."""
        value: Any = self.ds_json
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None or value == "auto" else value

    def zero(self, name: str, default: Any = None) -> Any:
        """Return a key of zero_optimization, with or without ``stage3_``, as DeepSpeed reads it."""
        path = "zero_optimization."
        return self.get(path + name, self.get(path + name.removeprefix("stage3_"), default))

    @property
    def stage(self) -> int:
        """The ZeRO stage. Raises ConfigError when it is no integer."""
        whole = self.ds_json.get("zero_optimization")
        stage = whole if isinstance(whole, bool) else self.zero("stage", 0)
        if not isinstance(stage, int):
            raise ConfigError("zero_optimization.stage", stage, "expected 0, 1, 2 or 3")
        return int(stage)

    @property
    def bf16(self) -> bool:
        """Return whether parameters are bf16."""
        return bool(self.get("bf16.enabled", self.get("bfloat16.enabled", False)))

    @property
    def fp32(self) -> bool:
        """Return whether parameters are fp32, and not in a dtype that is filled in later."""
        parts = (self.ds_json.get(name) for name in ("bf16", "bfloat16", "fp16"))
        return not any(isinstance(part, Mapping) and part.get("enabled", False) for part in parts)

    @property
    def cpu_offload(self) -> bool:
        """Return whether the optimizer's state is offloaded."""
        device = self.zero("offload_optimizer.device", "none")
        return bool(device != "none" or self.zero("cpu_offload", False))

    @property
    def bf16_optimizer(self) -> bool:
        """Return whether BF16_Optimizer does ZeRO 1, which reduces as stage 0 does."""
        fp32 = ("fp32", "float32", "float", "torch.float32")
        accumulates = self.get("data_types.grad_accum_dtype") in fp32
        return self.stage == 1 and self.bf16 and accumulates and not self.cpu_offload

    @property
    def buckets(self) -> bool:
        """Return whether DeepSpeedZeroOptimizer (stage 1 and 2) reduces the gradients."""
        return self.stage in (1, 2) and not self.bf16_optimizer

    @property
    def compiled(self) -> bool:
        """Return whether DeepCompile takes over the collectives of ZeRO."""
        only_parallel = self.compile_pass("autosp") or self.compile_pass("autotp")
        return bool(self.get("compile.deepcompile", False)) and self.stage > 0 and not only_parallel

    def compile_pass(self, name: str) -> bool:
        """Return whether DeepCompile's pass ``name`` puts collectives into the graph."""
        return bool(self.get("compile.deepcompile", False)) and name in self.get(
            "compile.passes", ()
        )

    @property
    def optimizer(self) -> str:
        """Type of the optimizer, in lower case."""
        return str(self.get("optimizer.type", "")).lower()

    @property
    def tensor_parallel(self) -> int:
        """Size of AutoTP's groups."""
        size = self.get("tensor_parallel.autotp_size", 1)
        if not isinstance(size, int):
            raise ConfigError("tensor_parallel.autotp_size", size, "expected a whole number")
        return max(1, int(size))
