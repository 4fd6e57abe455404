"""Read the file of ``accelerate config``: the DeepSpeed settings that Accelerate makes of it.

Accelerate passes on the file that ``deepspeed_config_file`` names, or writes its own settings,
which cannot hold a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridcomp.config.error_messages import NOTHING, Shown, show
from hybridcomp.config.sources import SOURCE, read_source
from hybridcomp.errors import ConfigError
from hybridcomp.patches.rules.ds_settings import AUTO, ZERO

#: keys of an Accelerate file; DeepSpeed lacks the first three, of which every such file has one
OWN_KEYS = frozenset({"distributed_type", "compute_environment", "deepspeed_config"})
SECTION, FILE = "deepspeed_config", "deepspeed_config_file"
#: keys of the section that Accelerate refuses together with ``deepspeed_config_file``
NOT_BESIDE_A_FILE = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)  # fmt: skip
PRECISIONS = ("no", "fp16", "bf16", "fp8")


def has_keys(whole: Mapping[str, Any]) -> bool:
    """Return whether a configuration is one of Accelerate."""
    return not OWN_KEYS.isdisjoint(whole)


def ds_settings(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that Accelerate passes to DeepSpeed, with its own derivations.

    Like Accelerate, it resolves ``deepspeed_config_file`` from the working directory. Raises
    ConfigError for settings that Accelerate refuses, and for a job without DeepSpeed.
    """
    kind = whole.get("distributed_type", NOTHING)
    if kind != "DEEPSPEED":
        raise ConfigError(
            "distributed_type", show(kind),
            "a job of Accelerate without DEEPSPEED has no settings of DeepSpeed; give a file with "
            "the block alone, the one that HYBRIDCOMP_CONFIG names",
        )  # fmt: skip
    section = whole.get(SECTION) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(SECTION, show(section), "expected an object")
    precision = _precision(whole)
    named = section.get(FILE)
    if named is None or named == "none":
        return _with_precision(_written(section), precision or "no")
    beside = next((name for name in NOT_BESIDE_A_FILE if name in section), None)
    key = f"{SECTION}.{beside}" if beside else "mixed_precision" if precision else None
    if key is not None:
        found = section[beside] if beside else precision
        raise ConfigError(
            key, show(found), f"Accelerate refuses it beside {FILE}; write it into that file"
        )
    try:
        settings = dict(read_source(str(named)))
    except ConfigError as error:
        if error.key != SOURCE:
            raise
        raise ConfigError(f"{SECTION}.{FILE}", error.found, error.todo) from None
    if ZERO not in settings:
        raise ConfigError(f"{named}: {ZERO}", NOTHING, "Accelerate expects it in this file")
    settings.setdefault("gradient_accumulation_steps", 1)
    zero = settings[ZERO]
    if isinstance(zero, Mapping) and zero.get("stage") == AUTO:
        settings[ZERO] = {**zero, "stage": 2}
    return _with_precision(settings, "no")


def _precision(whole: Mapping[str, Any]) -> str | None:
    """Return ``mixed_precision``, or the value of its old form; None if neither is written."""
    found = whole.get("mixed_precision", "fp16" if whole.get("fp16") else None)
    if found is False:  # YAML reads an unquoted `no` as false
        found = "no"
    if found is None:
        return None
    if found not in PRECISIONS:
        todo = f"expected one of {', '.join(PRECISIONS)}"
        raise ConfigError("mixed_precision", show(found), todo)
    return str(found)


def _written(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that Accelerate writes from the keys of its own file."""
    steps = str(section.get("gradient_accumulation_steps", AUTO))
    return {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": int(steps) if steps.isdigit() else steps,
        ZERO: {
            "stage": _stage(section.get("zero_stage", 2)),
            **{
                name: {"device": str(section.get(f"{name}_device", "none")).lower()}
                for name in ("offload_optimizer", "offload_param")
            },
        },
    }


def _stage(found: Any) -> int:
    try:
        return int(str(found))
    except ValueError:
        todo = "Accelerate expects 0, 1, 2 or 3"
        raise ConfigError(f"{SECTION}.zero_stage", show(found), todo) from None


def _with_precision(settings: dict[str, Any], precision: str) -> dict[str, Any]:
    """Enable fp16 or bf16 by ``precision`` where their sections are missing or say "auto"."""
    on = {"fp16": precision == "fp16", "bf16": precision in ("bf16", "fp8")}
    for name, enabled in on.items():
        written = settings.get(name, {"enabled": enabled})
        if isinstance(written, Mapping) and written.get("enabled") == AUTO:
            written = {**written, "enabled": enabled}
        settings[name] = written
    return settings


def refuse_block(whole: Mapping[str, Any], block: str) -> None:
    """Raise ConfigError for a block in Accelerate's own file: Accelerate does not pass it on."""
    section = whole.get(SECTION)
    inside = isinstance(section, Mapping) and block in section
    if block in whole or inside:
        raise ConfigError(
            f"{SECTION}.{block}" if inside else block, Shown("a block in a file of Accelerate"),
            f"Accelerate hands no block on to DeepSpeed; put it into the JSON file that {FILE} "
            "names, or into a file of its own that HYBRIDCOMP_CONFIG names",
        )  # fmt: skip
