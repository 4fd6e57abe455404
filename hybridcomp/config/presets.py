"""Presets: named blocks. A key that the user writes beside ``preset`` overrides the preset's.

``naive-zfp``, ``naive-mpc``, ``mzhybrid`` and ``zhybrid`` are the schemes of arXiv 2409.02423; its
messages are fp32, so its rates 8 and 16 keep a quarter and a half of the bits. ``recommended``
follows from a rate-distortion study of training tensors: a transform gains nothing on them, so it
uses plain integers, with 4 bits only for gradients, whose errors an optimizer averages over steps.
The rows of ``hybridcomp.dimensions`` have its settings. No preset names ``offload``, which also
costs host time, or ``tp2d``, whose layers a script chooses. ``none`` compresses nothing but counts
the traffic, for a baseline. ``planned`` takes the block of a plan (``planned.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from hybridcomp.codecs.registry import AUTO, without_misfits
from hybridcomp.config import other_names
from hybridcomp.config.error_messages import near_key, problem
from hybridcomp.config.planned import PLANNED, Planned
from hybridcomp.dimensions import DIRECTIONS, IN_PRESETS, ROWS, Dimension

#: the preset that compresses nothing: all messages are native but counted
NATIVE = "none"
Settings = dict[str, Any]
#: dimensions that the paper calls "model parallel", and ZeRO
_MODEL: tuple[Dimension, ...] = ("zero", "tp", "pp")


def _zfp(rate: float) -> Settings:
    return {"codec": "zfp", "rate": rate}


PRESETS: Mapping[str, Mapping[Dimension, Settings]] = {
    "naive-zfp": {name: _zfp(8) for name in IN_PRESETS},
    "naive-mpc": {name: {"codec": "mpc"} for name in IN_PRESETS},
    "mzhybrid": {"dp": _zfp(8), **{name: {"codec": "mpc"} for name in _MODEL}},
    "zhybrid": {"dp": _zfp(8), **{name: _zfp(16) for name in _MODEL}},
    "recommended": {name: dict(ROWS[name].recommended or {}) for name in IN_PRESETS},
    NATIVE: {},
}
#: presets that measure each dimension and leave it native if native messages are faster, unless the
#: block sets ``when``: a user of such a preset may not know whether the link is slow enough
MEASURING = frozenset({"recommended"})
#: presets made for fp32 messages
PAPER = frozenset({"naive-zfp", "naive-mpc", "mzhybrid", "zhybrid"})
#: presets of ``sync``: defaults that the other keys of ``sync`` override
ISLAND_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "local-sgd": {"outer": {"lr": 1.0, "momentum": 0.0, "nesterov": False}},
    "diloco": {"outer": {"lr": 0.7, "momentum": 0.9, "nesterov": True}},
    "streaming": {
        "codec": "blockint", "bits": 4, "error_feedback": True, "fragments": 4, "delay": 5,
        "mix": 0.5, "outer": {"lr": 0.4, "momentum": 0.9, "nesterov": True},
    },
    "sparseloco": {
        "codec": "topk", "bits": 2, "density": 1 / 64, "error_feedback": True, "decay": 0.95,
        "outer": {"lr": 1.0, "momentum": 0.0, "nesterov": False},
    },
    "wsp": {"staleness": 1, "outer": {"lr": 1.0, "momentum": 0.0, "nesterov": False}},
}  # fmt: skip

#: values of the key ``preset``
NAMES = (*PRESETS, PLANNED)


def merged(written: Mapping[str, Any], planned: Planned | None = None) -> dict[str, Any]:
    """Return a block with its preset's keys merged in; preset "planned" has those of ``planned``.

    Raises the error that pydantic turns into a ValidationError, at ``preset``.
    """
    block = dict(written)
    preset = written.get("preset")
    if preset is None:
        return block
    for name, settings in _settings(preset, planned).items():
        block[name] = overridden(settings, written[name]) if name in written else settings
    return block


def _settings(preset: object, planned: Planned | None) -> dict[str, Any]:
    if planned is not None:
        whole = merged(planned.block)
        return {name: value for name, value in whole.items() if name != "preset"}
    name = known_preset(preset, NAMES, other_names.of_preset)
    return {str(key): settings for key, settings in PRESETS[name].items()}


def known_preset(
    name: object, names: Collection[str], ours: Callable[[str], str | None] = lambda word: None
) -> str:
    """Return ``name`` if it is in ``names``. ``ours``: maps another tool's word to our name."""
    if isinstance(name, str) and name in names:
        return name
    near = (ours(name) or near_key(names, name)) if isinstance(name, str) else None
    hint = f"did you mean {near!r}? " if near else ""
    raise problem("preset", name, f"{hint}expected one of {', '.join(names)}")


def overridden(preset: Any, written: Any) -> Any:
    """Merge the user's settings into a preset's key; a bound without codec selects codec auto.

    Settings of the preset that conflict with the user's are dropped, such as levels that need
    4 bits if the user wrote ``"bits": 5``, and those that every direction of the user replaces.
    """
    if not isinstance(written, Mapping) or not isinstance(preset, Mapping):
        return written
    if "codec" in written or "error_bound" in written:
        return written
    if written.get("secondary", "native") != "native":
        return written  # implies its codec
    ways: dict[str, Any] = {way: _with_codec(written[way]) for way in DIRECTIONS if way in written}
    used = {key: value for key, value in preset.items()
            if not all(_names(ways.get(way), key) for way in DIRECTIONS)}  # fmt: skip
    return without_misfits({**used, **written, **ways}, written)


def _with_codec(way: Any) -> Any:
    """Write out the codec of a direction that names a bound, which replaces the preset's codec."""
    bound = isinstance(way, Mapping) and way.get("error_bound") is not None
    return {**way, "codec": AUTO} if bound and way.get("codec") is None else way


def _names(way: Any, key: str) -> bool:
    """Return whether a direction names its codec or ``key``."""
    names = {"codec": way} if isinstance(way, str) else way if isinstance(way, Mapping) else {}
    return names.get("codec") is not None or names.get(key) is not None
