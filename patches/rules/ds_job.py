"""Facts of a DeepSpeed job that the rules read: its ds_config, and facts of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hybridcomp.patches.rules.ds_settings import (
    AUTO,
    SUMMED_IN,
    SUMMED_IN_SEQUENCE,
    ZERO,
    parsed,
)


@dataclass(frozen=True)
class DeepSpeedJob:
    """A ds_config, read as DeepSpeed reads it, and facts of the model; None is an unknown fact."""

    ds_json: Mapping[str, Any]
    pipeline: bool | None = None
    moe: bool | None = None
    world_size: int | None = None
    #: tensor-parallel layers that a seam covers: GPT-NeoX's, megatron-core's, AutoTP's once split
    tensor: bool | None = None
    #: sequence-parallel groups or attention layers
    sequence: bool | None = None
    #: number of model replicas; None if the layout of the ranks is not known
    replicas: int | None = None
    #: layers of hybridcomp.nn.tp2d
    mesh: bool | None = None
    #: tables of hybridcomp.nn.CachedEmbedding
    tables: bool | None = None
    #: embeddings of torch with sparse gradients
    sparse: bool | None = None
    #: stages of hybridcomp.nn.slices
    slices: bool | None = None

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Return the settings as DeepSpeed reads them. Raises ConfigError for what it refuses."""
        return parsed(self.ds_json)

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value at a dotted path; ``default`` for null and "auto" (filled in later)."""
        value: Any = self.settings
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None or value == AUTO else value

    def zero(self, name: str, default: Any = None) -> Any:
        """Return a key of zero_optimization, named without ``stage3_``."""
        return self.get(f"{ZERO}.{name}", default)

    @property
    def stage(self) -> int:
        """Return the ZeRO stage."""
        return int(self.zero("stage"))

    @property
    def bf16(self) -> bool:
        """Return whether parameters are bf16."""
        return bool(self.get("bf16.enabled"))

    @property
    def fp16(self) -> bool:
        """Return whether parameters are fp16."""
        return bool(self.get("fp16.enabled"))

    @property
    def dtype(self) -> str | None:
        """Return the parameters' dtype, "bf16", "fp16" or "fp32"; None if "auto" leaves it open."""
        if self.bf16 or self.fp16:
            return "bf16" if self.bf16 else "fp16"
        written = (self.ds_json.get(name) for name in ("bf16", "bfloat16", "fp16"))
        later = any(isinstance(one, Mapping) and one.get("enabled") == AUTO for one in written)
        return None if later else "fp32"

    @property
    def summed_dtype(self) -> str | None:
        """Return the dtype in which gradients are summed natively; None: the parameters' dtype."""
        autocast = {"bfloat16": "bf16", "float16": "fp16"}.get(self.get("torch_autocast.dtype"))
        if self.sequence_parallel > 1:
            found: str | None = self.get(SUMMED_IN_SEQUENCE, "fp32")
            return "fp32" if self.buckets else found
        if self.stage and self.get("torch_autocast.enabled") and autocast:
            # the dtype to which autocast casts layers, which hold nearly all parameters
            return autocast
        written: str | None = self.get(SUMMED_IN)
        return written

    @property
    def cpu_offload(self) -> bool:
        """Return whether the optimizer's state is offloaded."""
        return bool(self.zero("offload_optimizer.device", "none") != "none")

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
        """Return the optimizer's type, in lower case."""
        return str(self.get("optimizer.type", "")).lower()

    @property
    def is_one_bit(self) -> bool:
        """Return whether a 1-bit optimizer exchanges the gradients."""
        return self.optimizer in ("onebitadam", "zerooneadam", "onebitlamb")

    @property
    def is_cut(self) -> bool:
        """Return whether ds_config or model split layers, sequences or experts over ranks."""
        return (
            max(self.tensor_parallel, self.sequence_parallel) > 1
            or bool(self.get("expert_parallel.enabled", False))
            or self.moe is True
        )

    @property
    def tensor_parallel(self) -> int:
        """Return the size of AutoTP's groups."""
        return max(1, int(self.get("tensor_parallel.autotp_size")))

    @property
    def sequence_parallel(self) -> int:
        """Return the size of sequence-parallel groups, if the ds_config has it."""
        return int(self.get("sequence_parallel_size", 1))
