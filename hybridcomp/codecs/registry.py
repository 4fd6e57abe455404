"""Registry of all codecs that a block may name: ours and those of other packages.

Our codecs are found by importing the modules of this folder; this module only names the default
codecs of error bounds. A package adds a codec by an entry point of the group ``hybridcomp.codecs``,
under the codec's name:

    [project.entry-points."hybridcomp.codecs"]
    mine = "my_package:Mine"

Entry points are looked up when a block names a codec that is not ours, or when all names are
needed. If an entry point cannot be used, the registry keeps the reason: a block that names this
codec raises it as an error, and other codecs are not affected.
"""

from __future__ import annotations

import inspect
import keyword
import pkgutil
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property, lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, get_origin

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.blockint import BlockInt
from hybridcomp.codecs.expcode import ExpCode
from hybridcomp.codecs.radix import Radix
from hybridcomp.errors import CodecError

#: group of the entry points of other packages' codecs
GROUP = "hybridcomp.codecs"
#: the lossless codec with the fewest bits, used if no bound can be kept
LOSSLESS: Codec = ExpCode()
#: default codec of an error bound, relative or absolute: it needs the fewest bits
ANY_BOUND = Radix
#: codec of fixed size for messages that are too small for an exchange of sizes
SMALL = BlockInt
#: the name of the cheapest codec that keeps a bound
AUTO = "auto"
#: advice to a user whose codec cannot keep the error bound
KEEPS_EVERY_BOUND = f'use "{AUTO}" or "{ANY_BOUND.name}", which keep every bound'
#: values of the key ``codec`` that name no codec class; codecs may not have these names
RESERVED = frozenset({"none", AUTO, "bounded"})
#: allowed types of a setting
TYPES = (bool, int, float)


class Registry(Mapping[str, type[Codec]]):
    """Codecs by name. ``refused`` lists unusable ones, each with a sentence that says why."""

    def __init__(self) -> None:
        self._outside: dict[str, type[Codec]] | None = None
        self._origins: dict[str, str] = {}
        self._refused: dict[str, str] = {}

    def __getitem__(self, name: str) -> type[Codec]:
        return self.built_in[name] if name in self.built_in else self.outside[name]

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or name in self.outside

    def __iter__(self) -> Iterator[str]:
        return iter((*self.built_in, *self.outside))

    def __len__(self) -> int:
        return len(self.built_in) + len(self.outside)

    @cached_property
    def built_in(self) -> Mapping[str, type[Codec]]:
        """Return our codecs; the first call imports the modules of this folder."""
        return {codec.name: codec for codec in _built_in()}

    @property
    def outside(self) -> Mapping[str, type[Codec]]:
        """Return the codecs of other packages; the first call imports those packages."""
        if self._outside is None:
            # a package that reads the registry during its own import sees only our codecs
            self._outside = {}
            for name, found in _by_name().items():
                self._take(name, found)
        return self._outside

    @property
    def refused(self) -> Mapping[str, str]:
        """Return why codecs with an entry point cannot be used, by name."""
        assert self.outside is not None
        return self._refused

    def origin(self, name: str) -> str | None:
        """Return the package and version that a codec comes from; None for ours."""
        return self._origins.get(name) if name in self.outside else None

    def refuse(self, name: str, reason: str) -> None:
        """Remove a codec of another package; ``reason``: why, as the end of a sentence."""
        assert self._outside is not None
        del self._outside[name]
        self._refused[name] = f"{self._origins[name]} cannot be used: {reason}"

    def _take(self, name: str, found: list[EntryPoint]) -> None:
        words = [_describe(point) for point in found]
        if name in self.built_in or name in RESERVED:
            owner = "hybridcomp has a codec" if name in self.built_in else "the block has a meaning"
            reason = f"{owner} of that name; rename the entry point, or uninstall its package"
            self._refused[name] = f"{words[0]} cannot be used: {reason}"
        elif len(found) > 1:
            both = " and ".join(words)
            self._refused[name] = f"{both} have the same name; uninstall one of them"
        else:
            try:
                codec = _loaded(found[0])
            except Exception as error:  # other people's code: whatever it raises
                said = " ".join(f"{type(error).__name__}: {error}".split())
                self._refused[name] = f"{words[0]} cannot be loaded ({said}); mend or uninstall it"
            else:
                assert self._outside is not None
                self._outside[name] = codec
                self._origins[name] = words[0]


def _built_in() -> list[type[Codec]]:
    """Return every codec that a module of this folder defines and that settings alone can make.

    The order is that of the schema: lossy codecs of fixed size, lossy ones of variable size,
    lossless codecs, and codecs for gradients only.
    """
    codecs: list[type[Codec]] = []
    for module in sorted(info.name for info in pkgutil.iter_modules([str(Path(__file__).parent)])):
        name = f"{__package__}.{module}"
        codecs += (
            value
            for value in vars(import_module(name)).values()
            if isinstance(value, type) and issubclass(value, Codec) and value.__module__ == name
            if not inspect.isabstract(value) and not value.bounded
        )
    return sorted(
        codecs, key=lambda codec: (codec.gradients_only, codec.lossless, not codec.fixed_size)
    )


def _by_name() -> dict[str, list[EntryPoint]]:
    """Group the entry points by name, each once even if a distribution is found twice."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for point in sorted(entry_points(group=GROUP), key=_describe):
        found.setdefault(point.name, {}).setdefault(_describe(point), point)
    return {name: list(points.values()) for name, points in found.items()}


def _describe(point: EntryPoint) -> str:
    distribution = getattr(point, "dist", None)
    owner = f" of {distribution.name} {distribution.version}" if distribution else ""
    return f"the codec {point.name!r} ({point.value}{owner})"


def _loaded(point: EntryPoint) -> type[Codec]:
    """Load the class of an entry point; raise CodecError if it is no usable codec."""
    codec: Any = point.load()
    if not (isinstance(codec, type) and issubclass(codec, Codec)):
        raise CodecError("expected a subclass of hybridcomp.codecs.Codec")
    if inspect.isabstract(codec):
        raise CodecError(f"lacks {', '.join(sorted(codec.__abstractmethods__))}")
    if getattr(codec, "name", None) != point.name:
        raise CodecError(f"its class says name = {getattr(codec, 'name', None)!r}")
    taken = list(inspect.signature(codec).parameters.values())
    declared = [setting.name for setting in codec.settings]
    if [parameter.name for parameter in taken] != declared:
        raise CodecError(f"its settings are {declared}, its constructor takes other ones")
    for setting, parameter in zip(codec.settings, taken, strict=True):
        if parameter.default is inspect.Parameter.empty:
            raise CodecError(f"its setting {setting.name!r} has no default")
        known = setting.type in TYPES or get_origin(setting.type) is Literal
        if not known or keyword.iskeyword(setting.name) or setting.name.startswith("_"):
            raise CodecError(f"its setting {setting.name!r} needs another name or type")
    codec()
    return codec


#: every codec that a block may name
CODECS = Registry()


def make_codec(name: str, **settings: object) -> Codec:
    """Build the codec ``name`` with ``settings`` as keyword arguments.

    Raises:
        CodecError: the name or a setting is unknown, or the value of a setting is out of range.
    """
    if name not in CODECS:
        reason = CODECS.refused.get(name)
        listed = ", ".join(sorted(CODECS))
        raise CodecError(reason or f"unknown codec {name!r}; expected one of {listed}")
    codec: Any = CODECS[name]
    try:
        found: Codec = codec(**settings)
    except TypeError as error:
        raise CodecError(
            f"codec {name!r} does not take the settings {settings}: {error}"
        ) from error
    return found


@lru_cache(maxsize=64)
def ladder_of(family: str) -> tuple[Codec, ...]:
    """Return the codecs of a fixed-size ``family``, cheapest first; none if it keeps no bound."""
    return CODECS[family].ladder() if family in CODECS else ()


def families() -> tuple[str, ...]:
    """Return every codec name that may be combined with an error bound."""
    return (AUTO, ANY_BOUND.name, *(name for name in CODECS if ladder_of(name)))


def without_misfits(settings: Mapping[str, Any], written: Collection[str]) -> dict[str, Any]:
    """Drop settings whose required companion settings are missing, except those in ``written``."""
    codec = CODECS.get(settings.get("codec", ""))
    declared = () if codec is None else codec.settings
    misfits = {one.name for one in declared if not one.fits(settings)}.difference(written)
    return {name: value for name, value in settings.items() if name not in misfits}
