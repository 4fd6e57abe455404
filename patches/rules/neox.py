"""Rules for GPT-NeoX's traffic of each dimension: a table over the keys of its YAML files.

They add to those of DeepSpeed (``ds``), whose engine does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridcomp.errors import ConfigError
from hybridcomp.patches.rules.ds_job import DeepSpeedJob
from hybridcomp.patches.rules.engine import Rule

#: key with settings that GPT-NeoX passes on to DeepSpeed unread
EXTRA = "deepspeed_extra_args"
#: switches that replace GPT-NeoX's layers by those of Transformer Engine
TRANSFORMER_ENGINE = (
    "te_columnparallel",
    "te_rowparallel",
    "te_layernorm_mlp",
    "te_mha",
    "te_fp8_mha",
)


#: keys of a model's shape and layout, which identify a file of GPT-NeoX
OWN_KEYS = frozenset({"pipe_parallel_size", "model_parallel_size", "num_layers", "hidden_size"})


def has_keys(whole: Mapping[str, Any]) -> bool:
    """Return whether a configuration has keys of GPT-NeoX that DeepSpeed does not have."""
    return not OWN_KEYS.isdisjoint(whole)


def settings_of(args: Any) -> Mapping[str, Any] | None:
    """Return the settings of a GPT-NeoX job from ``args`` of ``deepspeed.initialize``, or None."""
    if type(args).__module__.startswith("megatron.neox_arguments"):
        settings: Mapping[str, Any] = vars(args)
        return settings
    return None


def ds_settings(whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings that GPT-NeoX passes to DeepSpeed, as far as rules read them."""
    extra = dict(whole.get(EXTRA) or {})
    if whole.get("precision") == "bfloat16":
        extra.setdefault("bf16", {"enabled": True})  # as NeoXArgs.calculate_derived adds it
    return {**whole, **extra}


def facts(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a GPT-NeoX model for ``ds_check.check``, from its configuration."""
    return {
        "pipeline": _count(whole, "pipe_parallel_size", 0) >= 1,
        "moe": _count(whole, "moe_num_experts", 1) > 1,
        "tensor": _count(whole, "model_parallel_size", 1) > 1,
    }


def _count(whole: Mapping[str, Any], key: str, default: int) -> int:
    """Return an integer of a configuration. Raises ConfigError if it is none."""
    found = whole.get(key, default)
    if isinstance(found, bool) or not isinstance(found, int):
        raise ConfigError(key, found, "expected a whole number")
    return found


def _tensor_parallel(job: DeepSpeedJob) -> bool:
    return _count(job.ds_json, "model_parallel_size", 1) > 1


RULES: tuple[Rule[DeepSpeedJob], ...] = (
    Rule(
        "bypass", ("tp",), "layers of Transformer Engine (te_mha, te_columnparallel, ...)",
        "they communicate inside Transformer Engine, where no seam reaches",
        "set the te_ switches to false",
        lambda job: _tensor_parallel(job)
        and any(job.get(name, False) for name in TRANSFORMER_ENGINE),
    ),
    Rule(
        "note", ("tp",), '"partition_activations": true',
        "checkpointed activations are gathered over the tensor-parallel ranks as they are, since "
        "recomputation must see what the forward pass saw", "",
        lambda job: _tensor_parallel(job)
        and bool(job.get("checkpoint_activations", False))
        and bool(job.get("partition_activations", False)),
    ),
)  # fmt: skip
