"""Read the values of a ds_config as DeepSpeed's own parser reads them, without DeepSpeed.

A table has the type of every key that hybridcomp reads. DeepSpeed parses sections with pydantic,
which accepts ``"true"``, ``1`` and ``2.0``, and reads other keys raw: there ``"false"`` is a
string, which counts as true. A test compares the table with DeepSpeed's parser, key by key. Where
DeepSpeed is installed, ``patches.ds.settings`` calls that parser instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from hybridcomp.config import BLOCK
from hybridcomp.config.error_messages import problem, show, translate
from hybridcomp.errors import ConfigError

#: a value that Hugging Face's Trainer or Accelerate fills in
AUTO: Final = "auto"
#: the release of DeepSpeed with which the tables of this module are compared
KNOWN = "0.19.8"
#: keys that DeepSpeed ``KNOWN`` refuses at the top level, and in ``zero_optimization``
REMOVED = (
    "nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue",
    "sparse_attention", "elasticity", "graph_harvesting", "curriculum_learning",
    "progressive_layer_drop",
)  # fmt: skip
REMOVED_OF_ZERO = ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")
ZERO = "zero_optimization"
#: key of the dtype in which gradients are summed, without and with sequence parallelism
SUMMED_IN, SUMMED_IN_SEQUENCE = (
    "communication_data_type", "seq_parallel_communication_data_type",
)  # fmt: skip
DTYPES = ("fp16", "bf16", "fp32")
#: largest size of a batch and largest number of ranks; DeepSpeed has no limit
MOST = 10**12


class _Section(BaseModel):
    """A section that DeepSpeed parses with pydantic; "auto" is replaced by the default."""

    model_config = ConfigDict(
        extra="allow", populate_by_name=True, use_enum_values=True, validate_default=True
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_auto(cls, found: Any) -> Any:
        if isinstance(found, Mapping):
            return {name: value for name, value in found.items() if value != AUTO}
        return found


class _Stage(IntEnum):
    off, states, gradients, weights = range(4)


def _stage3(name: str) -> AliasChoices:
    return AliasChoices(f"stage3_{name}", name)


_Values = Annotated[int, Field(ge=0)]
_Device = Literal["none", "cpu", "nvme"]


class _OffloadParam(_Section):
    device: _Device = "none"


class _OffloadOptimizer(_Section):
    device: _Device = "none"
    ratio: float = Field(1.0, ge=0.0, le=1.0)
    super_offload: bool = False


class _Zero(_Section):
    """``zero_optimization``, with its keys in the spelling without ``stage3_``."""

    stage: _Stage = _Stage.off
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = Field(500_000_000, gt=0)
    use_multi_rank_bucket_allreduce: bool = True
    allgather_bucket_size: _Values = 500_000_000
    offload_param: _OffloadParam | None = None
    offload_optimizer: _OffloadOptimizer | None = None
    cpu_offload: bool | None = None
    cpu_offload_param: bool | None = None
    prefetch_bucket_size: _Values = Field(
        50_000_000, validation_alias=_stage3("prefetch_bucket_size")
    )
    use_all_reduce_for_fetch_params: bool = Field(
        False, validation_alias=_stage3("use_all_reduce_for_fetch_params")
    )
    allgather_sequential: bool = Field(False, validation_alias=_stage3("allgather_sequential"))
    zero_hpz_partition_size: _Values = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    #: removed after 0.19.6
    mics_shard_size: int = -1

    @model_validator(mode="after")
    def _renamed(self) -> Self:
        """Rename old keys of offloading to the new ones, as DeepSpeed does."""
        if self.cpu_offload:
            self.offload_optimizer = _OffloadOptimizer(device="cpu")
        if self.cpu_offload_param:
            self.offload_param = _OffloadParam(device="cpu")
        return self


class _Precision(_Section):
    enabled: bool = False


class _Compile(_Section):
    deepcompile: bool = False
    passes: list[str] | None = None


class _TensorParallel(_Section):
    autotp_size: int = 0

    @field_validator("autotp_size", mode="before")
    @classmethod
    def _is_compared(cls, found: Any) -> Any:
        """Refuse a string: ``deepspeed.initialize`` compares the raw value with 0."""
        if isinstance(found, str):
            raise problem("", found, "expected a whole number, without quotes")
        return found

    @field_validator("autotp_size")
    @classmethod
    def _is_count(cls, found: int) -> int:
        """Refuse negative numbers, which DeepSpeed silently takes for 0."""
        if found < 0:
            raise problem("", found, "expected the number of ranks that share a layer, or 0")
        return found


#: model of every section that DeepSpeed parses with pydantic
SECTIONS: Mapping[str, type[_Section]] = {
    ZERO: _Zero,
    "bf16": _Precision,
    "fp16": _Precision,
    "compile": _Compile,
    "tensor_parallel": _TensorParallel,
    "hybrid_engine": _Precision,
}
#: sections that DeepSpeed reads raw, key by key
RAW_SECTIONS = ("expert_parallel", "optimizer", "data_types")
#: numbers that DeepSpeed uses unconverted: 2.0 counts as 2, "2" is an error
COUNTS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "sequence_parallel_size", "data_parallel_size",
)  # fmt: skip


def parsed(ds_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the values that DeepSpeed uses; its defaults are filled in.

    Keys that are not in the table stay as they are, "auto" is left out. Settings that were parsed
    before do not change. Raises ConfigError, naming the key, for what DeepSpeed's parser refuses.
    """
    found = {name: value for name, value in ds_json.items() if value != AUTO or name == BLOCK}
    for name, model in SECTIONS.items():
        found[name] = _section(name, model, _written(found, name))
    for name in RAW_SECTIONS:
        found[name] = _mapping(name, found.get(name, {}))
    for name in COUNTS:
        if name in found and (count := _count(name, found[name])) is not None:
            found[name] = count
    for name in (SUMMED_IN, SUMMED_IN_SEQUENCE):
        if found.get(name) is not None:
            found[name] = _dtype(name, found[name])
    kind = found["optimizer"].get("type", "")
    if not isinstance(kind, str):
        raise ConfigError("optimizer.type", show(kind), "expected the name of an optimizer")
    return found


def removed(ds_json: Mapping[str, Any]) -> list[str]:
    """Return the keys, dotted, that DeepSpeed ``KNOWN`` refuses because it has removed them."""
    zero = ds_json.get(ZERO)
    inner = zero if isinstance(zero, Mapping) else {}
    return [name for name in REMOVED if name in ds_json] + [
        f"{ZERO}.{name}" for name in REMOVED_OF_ZERO if name in inner
    ]


def _written(found: Mapping[str, Any], name: str) -> Any:
    """Return section ``name`` as DeepSpeed parses it, with old keys replaced by new ones."""
    section = found.get(name, {})
    if name == ZERO and isinstance(section, bool):
        old = {"allgather_bucket_size": found.get("allgather_size", 5e8)} if section else {}
        return {"stage": int(section), **old}
    if name == "bf16" and found.get(name) is None:
        return found.get("bfloat16", {})
    return section


def _section(name: str, model: type[_Section], section: Any) -> dict[str, Any]:
    try:
        return model.model_validate(dict(_mapping(name, section))).model_dump()
    except ValidationError as error:
        raise translate(error, model, name) from None


def _mapping(name: str, found: Any) -> Mapping[str, Any]:
    if found is None and name == "expert_parallel":
        return {}
    if not isinstance(found, Mapping):
        raise ConfigError(name, show(found), "expected an object")
    return found


def _dtype(name: str, found: Any) -> str:
    """Return a dtype that DeepSpeed reads by its lower-case name."""
    if not isinstance(found, str) or found.lower() not in DTYPES:
        raise ConfigError(name, show(found), f"DeepSpeed expects one of {', '.join(DTYPES)}")
    return found.lower()


def _count(name: str, found: Any) -> int | None:
    """Return a number of 1 or more as an integer; None for null, which DeepSpeed takes as unset."""
    if found is None and name != "sequence_parallel_size":
        return None
    whole = isinstance(found, int) or (isinstance(found, float) and found.is_integer())
    if whole and 1 <= found <= MOST:
        return int(found)
    raise ConfigError(name, show(found), "expected a whole number of 1 or more, without quotes")
