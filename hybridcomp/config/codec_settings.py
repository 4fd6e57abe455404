"""Which codec, with which settings: the part that directions and dimensions share."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hybridcomp.codecs import CODECS, PowerSgd, make_codec
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.bounded import AUTO, FAMILIES, LADDERS
from hybridcomp.config.bounds import build_bounded, check_unbounded
from hybridcomp.config.error_messages import NOTHING, problem
from hybridcomp.errors import CodecError

NONE = "none"
#: zfp loses so much below this rate that error feedback runs away: over random and adversarial
#: blocks of four the norm of the error reached 4x the norm of the values at rate 4, 1.9x at 5.5,
#: 0.8x at 6 (below 1x the residual stays bounded)
ZFP_FEEDBACK_RATE = 6.0


#: codecs of gradients only: they need matrices that come back every step
GRADIENTS = (PowerSgd.name,)


def codec_names(*, gradients: bool = False) -> list[str]:
    """Every name that ``codec`` may have in this version; ``gradients``: under dp."""
    hidden = () if gradients else GRADIENTS
    return [NONE, *sorted({*CODECS, *FAMILIES}.difference(hidden))]


class Strict(BaseModel):
    """What all parts of the block share: no unknown keys, no conversions, no changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _codec_schema(schema: dict[str, Any]) -> None:
    schema.clear()
    schema.update({"type": "string", "enum": codec_names(), "description": _CODEC})


_CODEC = (
    "How messages are encoded. none: native. bf16, fp16, fp8: casts. blockint: integers of `bits` "
    "bits with a scale for every 32 values, fixed size. zfp: 1-D fixed rate, bit-exact with the "
    "zfp library. radix: fewest bits for an `error_bound`, variable size. mpc, expcode: lossless, "
    "variable size; expcode saves more. auto (default with an `error_bound`): the cheapest of them "
    "that keeps it."
)


GRADIENT_CODEC = (
    f"{_CODEC} powersgd: matrices as products of two thin ones of `rank` columns; its error has no "
    "bound, and what it leaves out comes with the next step."
)


def gradient_codec_schema(schema: dict[str, Any]) -> None:
    """The JSON schema of ``codec`` under dp."""
    schema.clear()
    names = codec_names(gradients=True)
    schema.update({"type": "string", "enum": names, "description": GRADIENT_CODEC})


class CodecSettings(Strict):
    """A codec and its settings; written as an object, or as the bare name of the codec."""

    #: codec settings that only this dimension has
    more: ClassVar[tuple[str, ...]] = ()

    codec: str | None = Field(None, description=_CODEC, json_schema_extra=_codec_schema)
    bits: int | None = Field(
        None,
        description="blockint: bits of one value, 2 to 8 (default). More: smaller error, larger "
        "messages.",
    )
    rotate: bool | None = Field(
        None,
        description="blockint, at 4 bits and fewer: rotate every 64 values (Walsh-Hadamard) before "
        "they are encoded, so that outliers, such as large channels of activations, spread over "
        "their neighbours. Half the speed; default false.",
    )
    levels: Literal["uniform", "gaussian"] | None = Field(
        None,
        description="blockint at 4 bits: gaussian puts the 16 levels where Gaussian values gather, "
        "for errors a sixth smaller; zeros beside other values become small numbers. Default "
        "uniform.",
    )
    rate: float | None = Field(
        None,
        description="zfp: bits of one value, 2.5 to 32, default 16. Higher: smaller error, larger "
        "messages.",
    )
    format: Literal["e4m3", "e5m2"] | None = Field(
        None,
        description="fp8: e4m3 (default; more mantissa) or e5m2 (more range within a block).",
    )
    dim: int | None = Field(
        None,
        description="mpc: stride of the differences in 32-bit words, 1 (default) to 32: the number "
        "of fields where records are interleaved.",
    )
    error_bound: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Largest error of an element of the collective's result, over all its "
        "quantizations. Relative (below 1): to the largest magnitude of the segment that it lies "
        "in, of a sum to the sum of the ranks' largest. Larger: fewer bits, about 3.3 a factor of "
        "ten. Without a codec: auto.",
    )
    error_bound_mode: Literal["rel", "abs"] | None = Field(
        None,
        description="rel (default), or abs: `error_bound` is a number in units of the values.",
    )
    segment: int | None = Field(
        None,
        description="With `error_bound`: consecutive values that share a largest magnitude, 64 to "
        "4096 (default) in steps of 16. Fewer: small values beside large ones keep more digits; "
        "more bits.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"codec": data}
        if not isinstance(data, (Mapping, CodecSettings)):
            todo = 'expected a codec name, or an object such as {"codec": "blockint", "bits": 8}'
            raise problem("", data, f'{todo}; write "none" for native')
        return data

    def given(self) -> dict[str, Any]:
        """Codec and codec settings as written, without those left out."""
        names = [*CodecSettings.model_fields, *self.more]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def build_codec(
    given: Mapping[str, Any],
    prefix: str,
    own: set[str] | None = None,
    *,
    gradients: bool = False,
) -> Codec | None:
    """The codec of the settings ``given``, None for "none".

    Raises the error that pydantic turns into a ValidationError, at the key concerned: below
    ``prefix`` for keys in ``own`` (an override), else at the dimension's own key.
    """

    def at(key: str) -> str:
        return f"{prefix}.{key}" if own and key in own else key

    name = given.get("codec", AUTO if "error_bound" in given else None)
    names = codec_names(gradients=gradients)
    if name is None:
        raise problem("codec", NOTHING, f"expected one of {', '.join(names)}; name one")
    settings = {key: value for key, value in given.items() if key != "codec"}
    if name not in names:
        raise problem(at("codec"), name, _unknown_codec(name, names))
    if name in FAMILIES and (name not in LADDERS or "error_bound" in settings):
        return build_bounded(name, settings, at)
    check_unbounded(name, settings, at)
    accepted = {} if name == NONE else dict(inspect.signature(CODECS[name]).parameters)
    for key, value in settings.items():
        if key not in accepted:
            takes = f"takes {' and '.join(accepted)}" if accepted else "has no settings"
            raise problem(at(key), value, f"{name} {takes}; remove {key} or name another codec")
    for key, parameter in accepted.items():
        if parameter.default is inspect.Parameter.empty and key not in settings:
            field = f"{prefix}.{key}" if own and "codec" in own else key
            raise problem(field, NOTHING, f"{name} needs {key}; write it")
    if name == NONE:
        return None
    try:
        return make_codec(name, **settings)
    except CodecError as error:
        named = [key for key in settings if key in str(error)] or list(settings) or ["codec"]
        named.sort(key=str(error).find)  # what is wrong comes first
        said = str(error).partition(", found ")[0]  # what was found stands in front already
        raise problem(at(named[0]), given[named[0]], f"{said}; correct it") from None


def _unknown_codec(name: str, names: Sequence[str]) -> str:
    listed = ", ".join(names)
    if name in GRADIENTS:
        return f"{name} reduces the gradients of matrices; only dp can have it: use one of {listed}"
    near = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"no such codec; {hint}expected one of {listed}"
