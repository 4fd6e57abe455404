"""Named blocks. A key written beside ``preset`` overrides the preset's.

``naive-zfp``, ``naive-mpc``, ``mzhybrid`` and ``zhybrid`` are the schemes of arXiv 2409.02423; its
messages are fp32, so its rates 8 and 16 are a quarter and a half. ``recommended`` is ours, from
a rate-distortion study of training tensors: a transform gains nothing on them, so plain integers,
and 4 bits only where error feedback gives back what is left out. None names ``offload``, which
takes time of the host, too, or ``tp2d``, whose layers a script chooses. ``none`` compresses
nothing, for a baseline that is counted as well.
``planned`` takes the block of a plan (``planned.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridcomp.config.error_messages import near_key, problem
from hybridcomp.config.planned import PLANNED, Planned
from hybridcomp.policy import BETWEEN_RANKS, DIRECTIONS, OWN_LAYERS, Dimension

#: the preset that compresses nothing: everything is native, and counted
NATIVE = "none"
Settings = dict[str, Any]
#: what presets are made for
_NAMED = tuple(name for name in BETWEEN_RANKS if name not in OWN_LAYERS)
_MODEL: tuple[Dimension, ...] = (
    "zero",
    "tp",
    "pp",
)  # what the paper calls model parallel, and ZeRO


def _zfp(rate: float) -> Settings:
    return {"codec": "zfp", "rate": rate}


def _blockint(bits: int) -> Settings:
    return {"codec": "blockint", "bits": bits}


PRESETS: Mapping[str, Mapping[Dimension, Settings]] = {
    "naive-zfp": {name: _zfp(8) for name in _NAMED},
    "naive-mpc": {name: {"codec": "mpc"} for name in _NAMED},
    "mzhybrid": {"dp": _zfp(8), **{name: {"codec": "mpc"} for name in _MODEL}},
    "zhybrid": {"dp": _zfp(8), **{name: _zfp(16) for name in _MODEL}},
    "recommended": {
        "dp": {**_blockint(4), "error_feedback": True},
        **{name: _blockint(8) for name in _NAMED if name != "dp"},
    },
    NATIVE: {},
}
#: those that measure each dimension and leave it native where that is faster, unless the block has
#: another ``when``: whoever takes one has not asked whether the link is slow enough
MEASURING = frozenset({"recommended"})
#: those whose messages are meant to be fp32
PAPER = frozenset({"naive-zfp", "naive-mpc", "mzhybrid", "zhybrid"})


#: what ``preset`` may be
NAMES = (*PRESETS, PLANNED)


def merged(written: Mapping[str, Any], planned: Planned | None = None) -> dict[str, Any]:
    """A block with its preset's keys in it, those of ``planned`` where the preset is that.

    Raises the error that pydantic turns into a ValidationError, at ``preset``.
    """
    found = dict(written)
    preset = written.get("preset")
    if preset is None:
        return found
    for name, settings in _settings(preset, planned).items():
        found[name] = overridden(settings, written[name]) if name in written else settings
    return found


def _settings(preset: object, planned: Planned | None) -> dict[str, Any]:
    if planned is not None:
        whole = merged(planned.block)
        return {name: value for name, value in whole.items() if name != "preset"}
    if not isinstance(preset, str) or preset not in PRESETS:
        near = near_key(NAMES, preset) if isinstance(preset, str) else None
        hint = f"did you mean {near!r}? " if near else ""
        raise problem("preset", preset, f"{hint}expected one of {', '.join(NAMES)}")
    return {str(name): settings for name, settings in PRESETS[preset].items()}


def overridden(preset: Any, written: Any) -> Any:
    """A preset's key with what the user wrote for it; a bound alone names codec auto."""
    if not isinstance(written, Mapping) or not isinstance(preset, Mapping):
        return written
    if "codec" in written or "error_bound" in written:
        return written
    ways = [written.get(way) for way in DIRECTIONS]
    if all(isinstance(way, str) or (isinstance(way, Mapping) and "codec" in way) for way in ways):
        return written
    return {**preset, **written}
