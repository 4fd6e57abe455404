"""Rules for GPT-NeoX's traffic of each dimension: a table over the keys of its YAML files.

DeepSpeed's rules (``ds``) apply as well, since GPT-NeoX trains with DeepSpeed's engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridcomp.config.error_messages import NOTHING, show
from hybridcomp.errors import ConfigError
from hybridcomp.patches.rules.engine import Rule

#: key with settings that GPT-NeoX passes on to DeepSpeed unread
EXTRA = "deepspeed_extra_args"
#: keys of NeoXArgsDeepspeedConfig, which GPT-NeoX passes on
PASSED = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "optimizer", "scheduler", "fp32_allreduce", "prescale_gradients", "gradient_predivide_factor",
    "sparse_gradients", "fp16", "bf16", "amp", "gradient_clipping", "zero_optimization",
    "curriculum_learning", "curriculum_seqlen", "steps_per_print", "wall_clock_breakdown",
    "dump_state", "flops_profiler", "communication_data_type", "autotuning",
    "activation_checkpointing", "sparse_attention", "data_efficiency", "tensorboard", "wandb",
    "csv_monitor", "elasticity", "comms_logger", "compression_training", "checkpoint", "data_types",
)  # fmt: skip
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

#: sizes of a model, which GPT-NeoX takes as they are
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")


def has_keys(whole: Mapping[str, Any]) -> bool:
    """Return whether a configuration has keys of GPT-NeoX that DeepSpeed does not have."""
    return not OWN_KEYS.isdisjoint(whole)


def settings_of(args: Any) -> Mapping[str, Any] | None:
    """Return the settings of a GPT-NeoX job from ``args`` of ``deepspeed.initialize``, or None."""
    if type(args).__module__.startswith("megatron.neox_arguments"):
        settings: Mapping[str, Any] = vars(args)
        return settings
    return None


def ds_settings(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that GPT-NeoX passes to DeepSpeed, derived as NeoXArgs derives them.

    Raises ConfigError for settings that GPT-NeoX itself refuses, and for sizes of no model.
    """
    for key in SIZES:
        _count(whole, key, 1, least=1)
    extra = whole.get(EXTRA) or {}
    if not isinstance(extra, Mapping):
        raise ConfigError(EXTRA, show(extra), "expected an object")
    own = {name: whole[name] for name in PASSED if whole.get(name) is not None}
    zero = own.get("zero_optimization", {"stage": 0})
    if not isinstance(zero, Mapping) or zero.get("stage") not in (0, 1, 2, 3):
        found = zero.get("stage", NOTHING) if isinstance(zero, Mapping) else zero
        key = "zero_optimization.stage" if isinstance(zero, Mapping) else "zero_optimization"
        raise ConfigError(key, show(found), "GPT-NeoX expects an object with a stage, 0, 1, 2 or 3")
    return {**own, **_precision(whole, own), **extra}


def _precision(whole: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section that enables the precision, derived from ``precision`` or a section."""
    precision = whole.get("precision")
    for section, name in (("fp16", "fp16"), ("bf16", "bfloat16")):
        found = own.get(section) or {}
        if not isinstance(found, Mapping):
            raise ConfigError(section, show(found), "expected an object")
        if found.get("enabled"):  # any non-empty string counts as true, as in GPT-NeoX
            if precision not in (None, name):
                todo = f'GPT-NeoX refuses it beside "{section}": {{"enabled": ...}}; leave one out'
                raise ConfigError("precision", show(precision), todo)
            precision = name
    if precision == "fp16":
        return {"fp16": {**(own.get("fp16") or {"type": "fp16"}), "enabled": True}}
    if precision == "bfloat16" and not own.get("bf16"):
        return {"bf16": {"enabled": True}}
    return {}


def stages(whole: Mapping[str, Any]) -> int:
    """Return the pipeline stages of a configuration; 1 without a pipeline."""
    return max(1, _count(whole, "pipe_parallel_size", 0))


def tensor_ranks(whole: Mapping[str, Any]) -> int:
    """Return the tensor-parallel size of a configuration."""
    return max(1, _count(whole, "model_parallel_size", 1))


def facts(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a GPT-NeoX model for ``ds_check.check``, from its configuration."""
    return {
        "pipeline": _count(whole, "pipe_parallel_size", 0) >= 1,
        "moe": _count(whole, "moe_num_experts", 1) > 1,
        "tensor": tensor_ranks(whole) > 1,
    }


def _count(whole: Mapping[str, Any], key: str, default: int, least: int = 0) -> int:
    """Return an integer of a configuration. Raises ConfigError for another type, or one too small.

    GPT-NeoX compares types, so it refuses a number with a dot or in quotes.
    """
    found = whole.get(key)
    if found is None:
        return default
    if isinstance(found, bool) or not isinstance(found, int):
        raise ConfigError(key, show(found), "expected a whole number")
    if found < least:
        raise ConfigError(key, found, f"expected a whole number of {least} or more")
    return found


def _switch(whole: Mapping[str, Any], key: str) -> bool:
    """Return a boolean of a configuration. Raises ConfigError for another type."""
    found = whole.get(key)
    if found is not None and not isinstance(found, bool):
        raise ConfigError(key, show(found), "expected true or false, which GPT-NeoX insists on")
    return bool(found)


RULES: tuple[Rule[Mapping[str, Any]], ...] = (
    Rule(
        "bypass", ("tp",), "layers of Transformer Engine (te_mha, te_columnparallel, ...)",
        "they communicate inside Transformer Engine, where no seam reaches",
        "set the te_ switches to false",
        lambda whole: tensor_ranks(whole) > 1
        and any(_switch(whole, name) for name in TRANSFORMER_ENGINE), is_part=True,
    ),
    Rule(
        "note", ("tp",), '"partition_activations": true',
        "checkpointed activations are gathered as they are", "",
        lambda whole: tensor_ranks(whole) > 1
        and _switch(whole, "checkpoint_activations")
        and _switch(whole, "partition_activations"),
    ),
    Rule(
        "refuse", ("sync",), "a job of GPT-NeoX", "it gives DeepSpeed groups of its own",
        "leave sync out", lambda whole: True,
    ),
)  # fmt: skip
