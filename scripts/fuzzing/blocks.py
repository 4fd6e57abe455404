"""Broken compression blocks, each with the key that its one-line error must name."""

from __future__ import annotations

from typing import Any

from hybridcomp.dimensions import DIMENSIONS, ROWS

NAN, INF = float("nan"), float("inf")

#: values that no dimension accepts, and the subkey that the error must name
ANYWHERE: tuple[tuple[Any, str], ...] = (
    (5, ""), (None, ""), ([], ""), (True, ""),
    ("blokint", ".codec"), ("", ".codec"), ("BLOCKINT", ".codec"),
    ({"codec": 7}, ".codec"), ({"codec": ["radix"]}, ".codec"), ({"codec": "zstd"}, ".codec"),
    ({"codec": "blockint", "bitz": 4}, ".bitz"), ({"codec": "blockint", "bits": 9}, ".bits"),
    ({"codec": "radix"}, ".error_bound"), ({"codec": "radix", "error_bound": NAN}, ".error_bound"),
)  # fmt: skip
#: invalid settings of codecs
SETTINGS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"codec": "blockint", "bits": 1}, "bits"), ({"codec": "blockint", "bits": 4.5}, "bits"),
    ({"codec": "blockint", "bits": "4"}, "bits"), ({"codec": "blockint", "bits": True}, "bits"),
    ({"codec": "blockint", "bits": -4}, "bits"), ({"codec": "blockint", "rate": 8}, "rate"),
    ({"codec": "blockint", "rotate": "yes"}, "rotate"),
    ({"codec": "blockint", "bits": 8, "rotate": True}, "rotate"),
    ({"codec": "blockint", "bits": 4, "levels": "normal"}, "levels"),
    ({"codec": "blockint", "bits": 8, "levels": "gaussian"}, "levels"),
    ({"codec": "blockint", "rounding": "stochastic"}, "rounding"),
    ({"codec": "zfp", "rate": 0}, "rate"), ({"codec": "zfp", "rate": 33}, "rate"),
    ({"codec": "zfp", "rate": NAN}, "rate"),
    ({"codec": "zfp", "rate": INF}, "rate"), ({"codec": "zfp", "rate": "8"}, "rate"),
    ({"codec": "zfp", "bits": 8}, "bits"), ({"codec": "fp8", "format": "e3m4"}, "format"),
    ({"codec": "fp8", "format": 8}, "format"), ({"codec": "bf16", "bits": 8}, "bits"),
    ({"codec": "mpc", "dim": 0}, "dim"), ({"codec": "mpc", "dim": 33}, "dim"),
    ({"codec": "mpc", "dim": 1.5}, "dim"), ({"codec": "expcode", "dim": 2}, "dim"),
    ({"codec": "none", "bits": 4}, "bits"), ({"codec": "none", "error_bound": 0.1}, "error_bound"),
    ({"codec": "radix", "error_bound": 0}, "error_bound"),
    ({"codec": "radix", "error_bound": -0.1}, "error_bound"),
    ({"codec": "radix", "error_bound": 1}, "error_bound"),
    ({"codec": "radix", "error_bound": INF}, "error_bound"),
    ({"codec": "radix", "error_bound": "small"}, "error_bound"),
    ({"codec": "radix", "error_bound": 1e-40}, "error_bound"),
    ({"codec": "auto"}, "error_bound"), ({"codec": "auto", "error_bound": None}, "error_bound"),
    ({"codec": "radix", "error_bound": 0.1, "segment": 100}, "segment"),
    ({"codec": "radix", "error_bound": 0.1, "segment": 0}, "segment"),
    ({"codec": "radix", "error_bound": 0.1, "segment": 8192}, "segment"),
    ({"codec": "radix", "error_bound": 0.1, "error_bound_mode": "l2"}, "error_bound_mode"),
    ({"codec": "blockint", "error_bound": 0.1, "error_bound_mode": "abs"}, "error_bound_mode"),
    ({"codec": "blockint", "error_bound": 1e-9}, "error_bound"),
    ({"codec": "mpc", "error_bound": 0.1}, "error_bound"),
)  # fmt: skip
#: whole blocks
WHOLE: tuple[tuple[Any, str], ...] = (
    (None, ""), ([], ""), ("recommended", ""), (3, ""), ({}, ""), ({"enabled": True}, ""),
    ({"preset": "x"}, ".preset"), ({"preset": 3}, ".preset"), ({"preset": "zhybird"}, ".preset"),
    ({"dpp": "bf16"}, ".dpp"), ({"DP": "bf16"}, ".DP"),
    ({"dp": "bf16", "min_bytes": -1}, ".min_bytes"),
    ({"dp": "bf16", "min_bytes": "64K"}, ".min_bytes"),
    ({"dp": "bf16", "min_bytes": 1.5}, ".min_bytes"),
    ({"dp": "bf16", "start_step": -1}, ".start_step"),
    ({"dp": "bf16", "start_step": None}, ".start_step"),
    ({"dp": "bf16", "enabled": "yes please"}, ".enabled"),
    ({"dp": "bf16", "hierarchy": 0}, ".hierarchy"),
    ({"dp": "bf16", "hierarchy": "2"}, ".hierarchy"),
    ({"dp": "bf16", "hierarchy": [8]}, ".hierarchy"),
    ({"dp": "bf16", "hierarchy": [8, 1]}, ".hierarchy"),
    ({"dp": "bf16", "hierarchy": [8, None]}, ".hierarchy"),
    ({"dp": "bf16", "hierarchy": {"nodes": 8}}, ".hierarchy"),
    ({"tp": "bf16", "hierarchy": [8, 4]}, ".hierarchy"),
    ({"tp": "bf16", "hierarchy": 2}, ".hierarchy"),
    ({"dp": "bf16", "on_unsupported": "ignore"}, ".on_unsupported"),
    ({"dp": "bf16", "ledger": 3}, ".ledger"),
    ({"dp": "bf16", "ledger": {"every": 0}}, ".ledger.every"),
    ({"dp": "bf16", "ledger": {"jsonl": ""}}, ".ledger.jsonl"),
    ({"dp": "bf16", "ledger": {"jsonl": 5}}, ".ledger.jsonl"),
    ({"dp": "bf16", "ledger": {"sample_every": -1}}, ".ledger.sample_every"),
    ({"dp": "bf16", "ledger": {"json": "x"}}, ".ledger.json"),
    ({"dp": {"codec": "bf16", "guard": 3}}, ".dp.guard"),
    ({"dp": {"codec": "bf16", "guard": {"error": 0}}}, ".dp.guard.error"),
    ({"dp": {"codec": "bf16", "guard": {"error": INF}}}, ".dp.guard.error"),
    ({"dp": {"codec": "bf16", "guard": {"errors": 1}}}, ".dp.guard.errors"),
    ({"dp": {"codec": "mpc", "guard": {"error": 1}}}, ".dp.guard"),
    ({"zero": {"codec": "bf16", "guard": {"residual": 3}}}, ".zero.guard.residual"),
    ({"dp": {"codec": "mpc", "error_feedback": True}}, ".dp.error_feedback"),
    ({"dp": {"codec": "none", "error_feedback": True}}, ".dp.error_feedback"),
    ({"dp": {"codec": "bf16", "error_feedback": "on it"}}, ".dp.error_feedback"),
    ({"dp": {"codec": "zfp", "rate": 3, "error_feedback": True}}, ".dp.error_feedback"),
    ({"zero": {"codec": "bf16", "error_feedback": True}}, ".zero.error_feedback"),
    ({"dp": {"codec": "powersgd", "rank": 0}}, ".dp.rank"),
    ({"dp": {"codec": "powersgd", "error_feedback": False}}, ".dp.error_feedback"),
    ({"tp": {"codec": "powersgd", "rank": 4}}, ".tp"),
    ({"zero": {"codec": "powersgd"}}, ".zero.codec"),
    ({"zero": {"codec": "none", "delta": True}}, ".zero.delta"),
    ({"zero": {"codec": "bf16", "delta": 1}}, ".zero.delta"),
    ({"zero": {"codec": "bf16", "resync_every": 5}}, ".zero.resync_every"),
    ({"zero": {"codec": "bf16", "delta": True, "resync_every": -1}}, ".zero.resync_every"),
    ({"dp": {"codec": "bf16", "when": "never"}}, ".dp.when"),
    ({"dp": {"codec": "none", "when": "auto"}}, ".dp.when"),
    ({"dp": {"codec": "bf16", "forward": {"codec": "mpc"}}}, ".dp.forward"),
    ({"dp": {"codec": "bf16", "ramp": {"steps": 10}}}, ".dp.ramp"),
    ({"dp": {"codec": "blockint", "bits": 4, "ramp": {"from": 4, "steps": 0}}}, ".dp.ramp.steps"),
)  # fmt: skip


def broken() -> list[tuple[Any, str]]:
    """Return all blocks, each with the dotted key that its error begins with."""
    found = [({name: value}, f".{name}{key}") for name in DIMENSIONS for value, key in ANYWHERE]
    found += [({"dp": settings}, f".dp.{key}") for settings, key in SETTINGS]
    for name, way in ((name, row.directions[-1]) for name, row in ROWS.items() if not row.one_way):
        found += [
            ({name: {"codec": "bf16", way: {"bits": 99}}}, f".{name}.{way}.bits"),
            ({name: {"codec": "bf16", "sideways": {}}}, f".{name}.sideways"),
        ]
    return [(block, f"compression{key}") for block, key in [*found, *WHOLE]]


def problem_of(block: Any, key: str) -> str:
    """Return "" if the error about ``block`` is a single line about ``key``, else the problem."""
    from hybridcomp.config import load_config
    from hybridcomp.errors import ConfigError

    try:
        load_config({"compression": block})
    except ConfigError as error:
        text = str(error)
        if "\n" in text:
            return f"more than one line: {text!r}"
        return "" if text.startswith(f"{key}:") or text.startswith(f"{key}.") else text
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
