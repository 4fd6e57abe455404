"""Model a codec and its settings: the keys that directions and dimensions have in common.

The fields are the settings that codecs declare (``codecs.setting``): a codec's settings are defined
in the codec's module, and the settings of another package's codec become keys of the block too.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.registry import AUTO, CODECS, families, ladder_of, make_codec
from hybridcomp.codecs.setting import Setting
from hybridcomp.config import other_names
from hybridcomp.config.bounds import build_bounded, check_unbounded
from hybridcomp.config.error_messages import NOTHING, problem
from hybridcomp.config.presets import ISLAND_PRESETS
from hybridcomp.config.presets import NAMES as PRESET_NAMES
from hybridcomp.dimensions import DIRECTIONS, KINDS
from hybridcomp.errors import CodecError

NONE = "none"
_KEYS = (
    "codec error_bound error_bound_mode segment guard ramp when error_feedback accumulate delta "
    "resync_every secondary frozen scatter_gather sums states every islands decay outer fragments "
    "delay mix staleness outlier preset"
)
_ATTRIBUTES = (
    "EXAMPLE acts agreed apart built codec_of feeds_back fragment_at given jobs keeps_copy "
    "keeps_frozen late limits more most_under_way remark residual_bits rungs_of settings steps "
    "under ways"
)
#: keys of a dimension, which codecs may not use as setting names
DIMENSION_KEYS = frozenset(_KEYS.split()).union(DIRECTIONS, KINDS)
#: attribute names of the models, which codecs may not use as setting names
ATTRIBUTES = frozenset(_ATTRIBUTES.split()).union(dir(BaseModel))


def _refuse_taken_keys() -> None:
    """Refuse other packages' codecs that have a setting named like a key of the block."""
    for name, codec in tuple(CODECS.outside.items()):
        taken = [s.name for s in codec.settings if s.name in DIMENSION_KEYS | ATTRIBUTES]
        if taken:
            CODECS.refuse(name, f"its setting {taken[0]!r} has a name that the block uses itself")


_refuse_taken_keys()


#: dimension whose own codecs a model may name besides the codecs that all dimensions accept; None:
#: only the latter; "any": all codecs
Under = Literal["dp", "zero", "sync", "any"] | None


def _home(codec: type[Codec]) -> Under:
    """Return the only dimension that accepts ``codec``; None if all dimensions accept it."""
    if codec.gradients_only:
        return "dp"
    if codec.sparse:
        return "sync"
    return "zero" if codec.references else None


@lru_cache(maxsize=4)
def codec_names(under: Under = None) -> tuple[str, ...]:
    """Return every allowed value of the key ``codec`` under a dimension."""
    known = {n for n, codec in CODECS.items() if under == "any" or _home(codec) in (None, under)}
    return (NONE, *sorted(known.union(families())))


def settings_of(
    *, gradients_only: bool = False, sparse: bool = False
) -> dict[str, tuple[Setting, ...]]:
    """Return the settings of a kind of codecs, by key.

    ``gradients_only``: the codecs for dp only; ``sparse``: those for sync only; neither: all other
    codecs. First come the settings of codecs that a ramp may change, as those decide the bits.
    """
    kinds = (gradients_only, sparse)
    codecs = [kind for kind in CODECS.values() if (kind.gradients_only, kind.sparse) == kinds]
    codecs.sort(key=lambda codec: all(s.ramp_step is None for s in codec.settings))
    by_name: dict[str, tuple[Setting, ...]] = {}
    for setting in (setting for codec in codecs for setting in codec.settings):
        by_name[setting.name] = (*by_name.get(setting.name, ()), setting)
    return by_name


def with_settings(
    base: type[BaseModel], settings: Mapping[str, Sequence[Setting]]
) -> type[BaseModel]:
    """Return ``base`` with an optional field for each of ``settings``."""
    fields: dict[str, Any] = {}
    for key, declared in settings.items():
        annotation: Any = None
        for setting in declared:
            annotation = setting.type if annotation is None else annotation | setting.type
        text = " ".join(setting.help for setting in declared)
        fields[key] = (annotation | None, Field(None, description=text))
    return create_model(f"{base.__name__}Settings", __base__=base, **fields)


#: numbers in the block
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    """Base of all parts of the block: no unknown keys, no conversions, no changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def agreed(self) -> dict[str, Any]:
        """Return the settings, besides codecs, on which the ranks of a job have to agree."""
        return self.model_dump()


def _explained(codecs: Iterable[type[Codec]]) -> str:
    """Return one sentence per codec, or per run of adjacent codecs with the same description."""
    sentences = []
    for about, group in groupby(codecs, key=lambda codec: codec.about):
        alike = list(group)
        words = [about or "see its package", *(c.remark for c in alike if c.remark)]
        sentences.append(f"{', '.join(c.name for c in alike)}: {'; '.join(words)}.")
    return " ".join(sentences)


_CODEC = (
    "How messages are encoded. none: native. "
    f"{_explained(codec for codec in CODECS.values() if _home(codec) is None)} {AUTO} (default "
    "with an `error_bound`): the cheapest of them that keeps it."
)


def codec_field(under: Under = None, prefix: str = "") -> Any:
    """Return the field ``codec`` of a model whose messages belong to the dimension ``under``."""
    own = _explained(codec for codec in CODECS.values() if under and _home(codec) == under)
    text = f"{prefix}{_CODEC} {own}".rstrip()

    def change(schema: dict[str, Any]) -> None:
        schema.clear()
        names = list(codec_names(under))
        schema.update({"type": "string", "enum": names, "description": text})

    return Field(None, description=text, json_schema_extra=change)


class _Named(Strict):
    codec: str | None = codec_field()


if TYPE_CHECKING:
    _Declared = _Named
else:
    _Declared = with_settings(_Named, settings_of())


class CodecSettings(_Declared):
    """A codec and its settings; written as an object, or as the bare name of the codec."""

    #: dimension whose own codecs the model may name, see ``Under``
    under: ClassVar[Under] = None
    #: codec settings that only this dimension has
    more: ClassVar[tuple[str, ...]] = ()
    #: example value that an error suggests
    EXAMPLE: ClassVar[str] = '{"codec": "blockint", "bits": 8}'

    error_bound: Positive | None = Field(
        None,
        description="Largest error of an element of the collective's result, over all its "
        "quantizations. Relative (below 1): to the largest magnitude of the segment that it lies "
        "in, of a sum to the sum of the ranks' largest. Larger: fewer bits, about 3.3 a factor of "
        "ten. Without a codec: auto.",
    )
    error_bound_mode: Literal["rel", "abs"] | None = Field(
        None, description="rel (default), or abs: `error_bound` is a number in units of the values."
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
            todo = f"expected a codec name, or an object such as {cls.EXAMPLE}"
            raise problem("", data, f'{todo}; write "none" for native')
        return data

    def given(self) -> dict[str, Any]:
        """Return codec and codec settings as written, without keys that were not written."""
        names = [*CodecSettings.model_fields, *self.more]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def built(self) -> Codec | None:
        """Build the codec as written; None for native."""
        return build_codec(self.given(), "", under=self.under)


def build_codec(
    given: Mapping[str, Any], prefix: str, own: set[str] | None = None, *, under: Under = None
) -> Codec | None:
    """Build the codec of the settings ``given``; None for "none".

    Raises the error that pydantic turns into a ValidationError, at the wrong key: under ``prefix``
    for keys in ``own`` (an override of one direction), else directly under the dimension.
    """

    def at(key: str) -> str:
        return f"{prefix}.{key}" if own and key in own else key

    name = given.get("codec", AUTO if "error_bound" in given else None)
    names = codec_names(under)
    if name is None:
        raise problem("codec", NOTHING, _no_codec(given, names))
    settings = {key: value for key, value in given.items() if key != "codec"}
    if name not in names or name in CODECS.refused:
        raise problem(at("codec"), name, _unusable_codec(name, names, under))
    if name in families() and (not ladder_of(name) or "error_bound" in settings):
        return build_bounded(name, settings, at, implied="codec" not in given)
    check_unbounded(name, settings, at)
    accepted = [] if name == NONE else [setting.name for setting in CODECS[name].settings]
    for key, value in settings.items():
        if key not in accepted:
            takes = f"takes {' and '.join(accepted)}" if accepted else "has no settings"
            raise problem(at(key), value, f"{name} {takes}; remove {key} or name another codec")
    return None if name == NONE else _built(name, settings, at)


def _no_codec(given: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the error text for a missing codec, with codecs that take the written settings."""
    known = {n: {setting.name for setting in CODECS[n].settings} for n in names if n in CODECS}
    fits = [n for n, takes in known.items() if given and takes >= given.keys()]
    those = f" (for {', '.join(given)}: {' or '.join(fits)})" if fits else ""
    return f"expected one of {', '.join(names)}{those}; name one"


def _built(name: str, settings: Mapping[str, Any], at: Callable[[str], str]) -> Codec:
    """Build the codec; raise its constructor's error at the key that the error names."""
    try:
        return make_codec(name, **settings)
    except CodecError as error:
        named = [key for key in settings if key in str(error)] or list(settings) or ["codec"]
        named.sort(key=str(error).find)  # the error text names the wrong setting first
        # ``problem`` itself adds the rejected value
        said = str(error).partition(", found ")[0]
        raise problem(at(named[0]), settings.get(named[0], name), said) from None


def _unusable_codec(name: str, names: Sequence[str], under: Under) -> str:
    """Return why a codec cannot be used here, and what to do."""
    if name in CODECS.refused:
        return CODECS.refused[name]
    listed = ", ".join(names)
    if name in CODECS:
        home = _home(CODECS[name])
        does = {
            "dp": "reduces the gradients of matrices",
            "zero": "encodes what changed since the last gather of parameters",
            "sync": "leaves most values out",
        }
        return f"{name} {does[home or 'zero']}; only {home} can have it: use one of {listed}"
    if name in PRESET_NAMES:
        what = f'"preset": "{name}", beside the dimensions and not in one'
        return f"no such codec; {name} is a preset: write {what}"
    if under == "sync" and name in ISLAND_PRESETS:
        return f'no such codec; {name} is a preset of sync: write "preset": "{name}"'
    ours = other_names.of_codec(name)
    if ours is not None:
        codec = json.loads(f"{{{ours}}}").get("codec", AUTO)
        if codec in names:
            return f"no such codec; for {name} write {ours}"
        return f"no such codec; {name} is {codec} here, and {_unusable_codec(codec, names, under)}"
    near = difflib.get_close_matches(name.lower(), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"no such codec; {hint}expected one of {listed}"
