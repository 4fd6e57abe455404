"""Model the levels of ``hierarchy``, each of which may have its own codec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from hybridcomp.codecs.base import Codec
from hybridcomp.config.codec_settings import CodecSettings
from hybridcomp.config.error_messages import expecting, parsed, problem
from hybridcomp.dimensions import ROWS, TWO_LEVELS, Dimension, Direction, listed

#: dimensions whose sums a level may encode
SUMMED = tuple(name for name in TWO_LEVELS if ROWS[name].summed)
#: number of units of the next lower level in one unit; "auto": the launcher's value
Size = Literal["auto"] | Annotated[int, Field(ge=2)]
#: ``hierarchy`` without codecs
Widths = Literal["auto", "none"] | int | list[int | Literal["auto"]]


class HierarchyLevel(CodecSettings):
    """One level of ``hierarchy`` inside the largest units: its size, and the codec of its sums."""

    size: Annotated[Size, expecting('expected a number of 2 or more, or "auto"')] = Field(
        description="Units of the level below in a unit of this one: ranks of a node, nodes of a "
        'switch or site. "auto": as the launcher tells.'
    )

    @model_validator(mode="after")
    def _can_act(self) -> HierarchyLevel:
        given = self.given()
        for key in ("error_bound", "error_bound_mode", "segment"):
            if key in given:
                todo = "the sums of a level are encoded with a codec of fixed bits, such as"
                raise problem(key, given[key], f'{todo} "codec": "blockint", "bits": 8; remove it')
        self.built()
        return self

    def built(self) -> Codec | None:
        """Build the codec of the sums on this level; None: they are native."""
        return super().built() if self.given() else None


#: sizes or levels, the innermost first
Units = Annotated[list[Size | HierarchyLevel], Field(min_length=2)]
#: ``hierarchy`` as written in a block
Written = Literal["auto", "none"] | int | list[Size | HierarchyLevel]


def read_hierarchy(written: Any) -> Any:
    """Parse ``hierarchy`` as written in a block; errors name the wrong key inside it."""
    if isinstance(written, list):
        if len(written) < 2 or not all(
            isinstance(each, (Mapping, HierarchyLevel)) or each == "auto" or _counts(each, 2)
            for each in written
        ):
            todo = "expected two or more numbers of 2 or more, such as [8, 4]: ranks of a node,"
            raise problem("", written, f'{todo} nodes of a site; "auto" where the launcher tells')
        return [
            parsed(HierarchyLevel, each, str(number), below=True)
            if isinstance(each, Mapping)
            else each
            for number, each in enumerate(written)
        ]
    if not _counts(written, 1) and written not in ("auto", "none"):
        todo = 'expected "auto", "none" or the number of consecutive ranks that share a node'
        raise problem("", written, todo)
    return written


def _counts(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def widths_of(hierarchy: Written) -> Widths:
    """Return ``hierarchy`` without the codecs of levels."""
    if not isinstance(hierarchy, list):
        return hierarchy
    return [each.size if isinstance(each, HierarchyLevel) else each for each in hierarchy]


def codecs_of(hierarchy: Written) -> tuple[Codec | None, ...]:
    levels = hierarchy if isinstance(hierarchy, list) else []
    return tuple(each.built() if isinstance(each, HierarchyLevel) else None for each in levels)


def check_hierarchy(
    hierarchy: Written, codecs: Mapping[tuple[Dimension, Direction], Codec | None]
) -> None:
    """Refuse levels that no compressed dimension uses, and codecs that ``_check_levels`` refuses.

    ``codecs``: codecs of the dimensions, by direction.
    """
    compressed = [codec for (name, _), codec in codecs.items() if codec and name in TWO_LEVELS]
    if not compressed:
        why = f"only {listed(TWO_LEVELS)} have two levels, and neither is compressed"
        raise problem("hierarchy", hierarchy, f"{why}; remove it")
    _check_levels(hierarchy, codecs_of(hierarchy), codecs)
    if all(codec.low_rank for codec in compressed):
        why = f"{compressed[0].name} sums its factors natively over all ranks, in one level"
        raise problem("hierarchy", hierarchy, f"{why}; remove it")


def _check_levels(
    hierarchy: Written,
    levels: tuple[Codec | None, ...],
    codecs: Mapping[tuple[Dimension, Direction], Codec | None],
) -> None:
    """Refuse codecs of ``levels`` that have no sums to encode or would break an error bound."""
    own = [codec for codec in levels if codec is not None]
    summed = [codec for (name, _), codec in codecs.items() if codec and name in SUMMED]
    specs, names = ", ".join(codec.spec for codec in own), listed(SUMMED)
    widths = widths_of(hierarchy)
    if own and not summed:
        why = (
            f"only sums of {names} are encoded on a level ({specs}), and {names} is not compressed"
        )
        raise problem("hierarchy", widths, f"{why}; write numbers alone")
    if any(codec.bounded for codec in summed) and not all(codec.lossless for codec in own):
        why = f"what a level leaves out ({specs}) is not in the error_bound of {names}"
        todo = f"leave that level native or lossless, or give {names} a codec of fixed bits"
        raise problem("hierarchy", widths, f"{why}; {todo}")
