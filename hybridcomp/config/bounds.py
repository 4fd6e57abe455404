"""Check error bounds in the block, and build the codec that keeps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.bounded import Bounded, make_bounded
from hybridcomp.codecs.registry import CODECS, KEEPS_EVERY_BOUND, ladder_of
from hybridcomp.config.error_messages import NOTHING, problem
from hybridcomp.dimensions import ROWS, Dimension
from hybridcomp.errors import CodecError

#: keys of an error bound in the block -> arguments of ``Bounded``
PROMISE = {"error_bound": "error_bound", "error_bound_mode": "mode", "segment": "segment"}


def check_unbounded(name: str, settings: Mapping[str, Any], at: Callable[[str], str]) -> None:
    """Refuse keys of an error bound for a codec that keeps none. ``at``: returns a key's path."""
    if name not in CODECS:
        return
    if "error_bound" in settings:
        raise problem(at("error_bound"), settings["error_bound"], _no_bound(CODECS[name]))
    for key in PROMISE:
        if key in settings:
            raise problem(at(key), settings[key], "acts only with error_bound; write that, too")


def _no_bound(codec: type[Codec]) -> str:
    """Return why ``codec`` does not accept an error bound, and what to do."""
    if codec.gradients_only:
        why = "bounds no error: what it leaves out comes with the next step"
        return f"{codec.name} {why}; remove it, or {KEEPS_EVERY_BOUND}"
    if codec.lossless is True:
        return f"never used: {codec.name} is lossless; remove it, or name another codec"
    return f"{codec.name} says of none of its settings that it keeps one; {KEEPS_EVERY_BOUND}"


def _not_taken(name: str, key: str, takes: Sequence[str], implied: bool) -> str:
    """Return why codec ``name`` takes no setting ``key`` with an error bound, and what to do."""
    if not implied:
        return f"{name} takes {', '.join(takes)}; remove {key}"
    others = [
        codec for codec in CODECS
        if ladder_of(codec) and key in [setting.name for setting in CODECS[codec].settings]
    ]  # fmt: skip
    instead = "".join(f' or add "codec": "{codec}"' for codec in others)
    return f"an error_bound without a codec means {name}, which sets {key}; remove {key}{instead}"


def build_bounded(
    name: str, settings: Mapping[str, Any], at: Callable[[str], str], *, implied: bool = False
) -> Bounded:
    """Build the codec ``name`` with an error bound; raises as ``build_codec`` does.

    ``implied``: the user wrote only the bound and no codec.
    """
    if "error_bound" not in settings:
        field = at("codec").removesuffix("codec") + "error_bound"
        raise problem(field, NOTHING, f"{name} needs error_bound; write it, such as 0.01")
    own = {key: value for key, value in settings.items() if key not in PROMISE}
    declared = CODECS[name].settings if ladder_of(name) else ()
    takes = {setting.name: setting for setting in declared}
    for key, value in own.items():
        if key not in takes:
            raise problem(at(key), value, _not_taken(name, key, [*takes, *PROMISE], implied))
    for key, value in own.items():
        if value and takes[key].no_bound:
            raise problem(at(key), value, f"{takes[key].no_bound}; remove it, or error_bound")
    promise = {PROMISE[key]: value for key, value in settings.items() if key in PROMISE}
    try:
        return make_bounded(name, own, promise)
    except CodecError as error:
        named = [key for key in [*settings][::-1] if key in str(error)] or ["error_bound"]
        said = str(error).partition(", found ")[0]
        raise problem(at(named[0]), settings[named[0]], said) from None


def check_kept(dimension: Dimension, codec: Codec | None, field: str) -> None:
    """Refuse a fixed-size codec that cannot keep its bound even in fp32 messages."""
    unkept = None if codec is None else codec.unreachable_bound(summed=ROWS[dimension].summed)
    if unkept is not None:
        raise problem(field, unkept.error_bound, unkept.todo)
