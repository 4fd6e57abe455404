"""Error bounds in the block: which codec keeps one, and what is wrong where none can."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hybridcomp.codecs import CODECS, PowerSgd
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.bounded import LADDERS, SMALL_NUMEL, Bounded, make_bounded
from hybridcomp.codecs.budget import ROUNDING, best_bound
from hybridcomp.config.error_messages import NOTHING, problem
from hybridcomp.errors import CodecError
from hybridcomp.policy import Dimension

#: keys of a promise -> arguments of ``Bounded``
PROMISE = {"error_bound": "error_bound", "error_bound_mode": "mode", "segment": "segment"}
#: dimensions that sum, so that a value may be quantized twice; the others only move
SUMMED: tuple[Dimension, ...] = ("dp", "tp")
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_USE = 'use "auto" or "radix", which keep every bound'


def check_unbounded(name: str, settings: Mapping[str, Any], at: Callable[[str], str]) -> None:
    """Refuse keys of a promise beside a codec that keeps none. ``at``: the place of a key."""
    if name not in CODECS:
        return
    if name == PowerSgd.name and "error_bound" in settings:
        todo = f"{name} bounds no error: what it leaves out comes with the next step; remove it, or"
        raise problem(at("error_bound"), settings["error_bound"], f"{todo} {_USE}")
    if "error_bound" in settings:
        todo = f"never used: {name} is lossless; remove it, or name another codec"
        raise problem(at("error_bound"), settings["error_bound"], todo)
    for key in PROMISE:
        if key in settings:
            raise problem(at(key), settings[key], "acts only with error_bound; write that, too")


def build_bounded(name: str, settings: Mapping[str, Any], at: Callable[[str], str]) -> Bounded:
    """The codec ``name`` with a bound; raises as ``build_codec`` does."""
    if "error_bound" not in settings:
        field = at("codec").removesuffix("codec") + "error_bound"
        raise problem(field, NOTHING, f"{name} needs error_bound; write it, such as 0.01")
    own = {key: value for key, value in settings.items() if key not in PROMISE}
    takes = inspect.signature(CODECS[name]).parameters if name in LADDERS else {}
    for key, value in own.items():
        if key not in takes:
            listed = ", ".join([*takes, *PROMISE])
            raise problem(at(key), value, f"{name} takes {listed}; remove {key}")
    if own.get("rotate"):
        todo = "spreads errors over 64 values and keeps no bound; remove it, or error_bound"
        raise problem(at("rotate"), True, todo)
    promise = {PROMISE[key]: value for key, value in settings.items() if key in PROMISE}
    try:
        return make_bounded(name, own, promise)
    except CodecError as error:
        named = [key for key in [*settings][::-1] if key in str(error)] or ["error_bound"]
        said = str(error).partition(", found ")[0]
        raise problem(at(named[0]), settings[named[0]], f"{said}; correct it") from None


def check_kept(dimension: Dimension, codec: Codec | None, field: str) -> None:
    """Refuse a fixed-size codec that cannot keep its bound even in fp32 messages."""
    if not isinstance(codec, Bounded) or not codec.ladder:
        return
    count = 2 if dimension in SUMMED else 1
    least = best_bound(codec.ladder, count)
    if least <= codec.error_bound:
        return
    over = "the two quantizations of a sum" if count == 2 else "one quantization"
    what = codec.fixed.spec if codec.fixed else f"{codec.family} at its finest"
    finest = LADDERS[codec.family]
    more = ""
    if codec.fixed and best_bound(finest, count) <= codec.error_bound:
        fit = next(c for c in finest if best_bound((c,), count) <= codec.error_bound)
        more = f"leave its setting out to get {fit.spec}, or "
    todo = f"{what} guarantees {least:.3g} over {over}; {more}{_USE}"
    raise problem(field, codec.error_bound, todo)


def figures(dimension: Dimension, codec: Bounded) -> str:
    """What is used for messages of each dtype, for the line at start-up."""
    kinds: dict[str, list[str]] = {}
    for dtype in ROUNDING:
        small = codec.for_message(0, dtype, 2)
        found = codec.for_message(1 << 30, dtype, 2)
        used = [_used(dimension, found, dtype)]
        if small != found:
            used.append(f"under {SMALL_NUMEL} values {_used(dimension, small, dtype)}")
        kinds.setdefault(", ".join(used), []).append(NAMES[dtype])
    listed = "; ".join(f"{' '.join(names)} {used}" for used, names in kinds.items())
    unit = " of the largest" if codec.mode == "rel" else ""
    return f"error within {codec.error_bound:g}{unit} in {codec.segment} values: {listed}"


def _used(dimension: Dimension, codec: Codec, dtype: torch.dtype) -> str:
    if dimension not in SUMMED:
        (only,) = codec.hops(1, 1, result=dtype)
        return _short(only)
    hops = codec.hops(2, 2, result=dtype, exact=1)
    (once,) = codec.hops(1, 2, exact=1)
    if once == hops[0]:
        return _short(once)
    twice = " and ".join(_short(hop) for hop in dict.fromkeys(hops))
    return f"{_short(once)} (in two hops {twice})"


def _short(codec: Codec) -> str:
    if codec.lossless:
        return f"{codec.name} (lossless)"
    bound = getattr(codec, "error_bound", None)
    return codec.spec if bound is None else f"{codec.name} {bound:.3g}"
