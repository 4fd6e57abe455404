"""Choose a codec and its setting for each dimension and direction, within an error budget.

A choice holds the setting as the block writes it for one direction of one dimension, so that a
plan's choices and its block are the same thing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.registry import CODECS
from hybridcomp.config.codec_settings import build_codec
from hybridcomp.dimensions import KEYS, ROWS, TWO_LEVELS, Key
from hybridcomp.errors import HybridcompError
from hybridcomp.tools.plan.pays import bits as typical_bits

#: keys that belong to a dimension, not to its codec
OWN = ("error_feedback", "delta")
#: codec of sums between the nodes of one site, if ``Choice.inside`` is true
INSIDE: Mapping[str, Any] = {"codec": "blockint", "bits": 8}


@dataclass(frozen=True)
class Choice:
    """One direction of one dimension: native, or a codec's setting as the block writes it.

    setting: the items of the block's object, sorted, for example ``(("bits", 4), ("codec",
    "blockint"))``; empty: native. error_feedback, residual_bits (bits per value of a residual): for
    ``dp`` only. delta: for ``zero`` only. inside: for ``dp`` in three levels, whether the nodes of
    a site also encode the sums that they exchange (``INSIDE``).
    """

    setting: tuple[tuple[str, Any], ...] = ()
    error_feedback: bool = False
    delta: bool = False
    residual_bits: int = 32
    inside: bool = False

    @classmethod
    def of(cls, written: Mapping[str, Any] | str) -> Choice:
        """Read a choice from an object of the block or of ``to_json``, or from a codec's name."""
        items = {"codec": written} if isinstance(written, str) else dict(written)
        own: dict[str, Any] = {name: items.pop(name, False) for name in (*OWN, "inside")}
        if isinstance(own["error_feedback"], Mapping):
            own["residual_bits"] = own["error_feedback"].get("bits", 32)
            own["error_feedback"] = True
        if items.get("codec") == "none":
            items = {}
        found = CODECS.get(items.get("codec", ""))
        if found is not None and found.references:
            own["delta"] = True
        return cls(tuple(sorted(items.items())), **own)

    @property
    def native(self) -> bool:
        """Return whether messages are sent natively, without a codec."""
        return not self.setting

    @property
    def written(self) -> dict[str, Any]:
        """Return the block's object for this choice; ``{"codec": "none"}`` for native."""
        own: dict[str, Any] = {name: True for name in OWN if getattr(self, name)}
        if self.error_feedback and self.residual_bits != 32:
            own["error_feedback"] = {"bits": self.residual_bits}
        return {**dict(self.setting), **own} if self.setting else {"codec": "none"}

    def to_json(self) -> dict[str, Any]:
        """Return ``written`` and, where true, ``inside``, which no dimension of a block has."""
        return {**self.written, **({"inside": True} if self.inside else {})}

    @property
    def codec(self) -> Codec | None:
        """Return the codec, None for native. Raises the block's own errors for a wrong setting."""
        return _codec(self.setting)

    def bits(self, dtype: torch.dtype) -> float:
        """Return bits a value on the wire, scales included; typical ones where they vary."""
        return _bits(self, dtype)

    def __str__(self) -> str:
        """Format as ``native``, ``expcode`` or ``blockint(bits=4) feedback``."""
        if self.codec is None:
            return "native"
        words = [self.codec.spec, "feedback" * self.error_feedback, "delta" * self.delta]
        words.append(f"({INSIDE['bits']} bits inside of sites)" * self.inside)
        return " ".join(word for word in words if word)


NATIVE = Choice()
#: bits per value of a lossless codec on deltas of fp32 and bf16 (docs/deltas.md, late in a run)
DELTA_BITS: Mapping[str, tuple[float, float]] = {"mpc": (23.1, 7.6)}


@functools.lru_cache(maxsize=4096)
def _codec(setting: tuple[tuple[str, Any], ...]) -> Codec | None:
    return build_codec(dict(setting), "", under="any") if setting else None


@functools.lru_cache(maxsize=4096)
def _bits(choice: Choice, dtype: torch.dtype) -> float:
    codec = choice.codec
    if codec is None:
        return 8.0 * dtype.itemsize
    if choice.delta and codec.name in DELTA_BITS:
        return DELTA_BITS[codec.name][dtype != torch.float32]
    return typical_bits(codec, dtype)


@dataclass(frozen=True)
class Choices:
    """The choices of a job; directions that are not named are native.

    items: ``(dimension, direction), choice`` pairs, sorted, without native ones.
    """

    items: tuple[tuple[Key, Choice], ...] = ()
    _found: dict[Key, Choice] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        """Index the items by (dimension, direction)."""
        object.__setattr__(self, "_found", dict(self.items))

    @classmethod
    def of(cls, choices: Mapping[Key, Choice]) -> Choices:
        """Build from a table. Raises HybridcompError for a key that no block has."""
        for key in choices:
            if key not in KEYS:
                raise HybridcompError(f"choices: {key} is no dimension and direction of a block")
        kept = {key: choice for key, choice in choices.items() if not choice.native}
        return cls(tuple(sorted(kept.items())))

    @classmethod
    def of_block(cls, block: Mapping[str, Any]) -> Choices:
        """Read the choices of a ``"compression"`` block, preset included. Raises ConfigError."""
        from hybridcomp.config import CompressionConfig

        config = CompressionConfig.parse(dict(block))
        found: dict[Key, Choice] = {}
        for name, way in KEYS:
            dimension = getattr(config, name)
            if dimension is None or dimension.codec_of(way) is None:
                continue
            own = {key: getattr(dimension, key, False) for key in OWN}
            if own["error_feedback"]:
                own["error_feedback"] = {"bits": dimension.residual_bits}
            found[name, way] = Choice.of({**dimension.settings(way), **own})
        return cls.of(found)

    def __getitem__(self, key: Key) -> Choice:
        """Return the choice of a (dimension, direction), native where none was made."""
        return self._found.get(key, NATIVE)

    def __iter__(self) -> Iterator[tuple[Key, Choice]]:
        """Iterate over ``(key, choice)`` of everything that is not native."""
        return iter(self.items)

    def changed(self, key: Key, choice: Choice) -> Choices:
        """Return these choices with ``key`` set to ``choice``."""
        return Choices.of({**self._found, key: choice})

    def block(self, *, hierarchy: bool | tuple[int, int] = True) -> dict[str, Any]:
        """Return the ``"compression"`` block, by direction where those differ; else preset none.

        ``hierarchy``: as in a layout.
        """
        found: dict[str, Any] = {}
        for name in dict.fromkeys(name for (name, _), _ in self.items):
            ways = ROWS[name].together
            chosen = [self[name, way] for way in ways]
            if len(set(chosen)) == 1:
                found[name] = chosen[0].written
            else:
                found[name] = dict(zip(ways, (one.written for one in chosen), strict=True))
            apart = {way: self[name, way].written for way in ROWS[name].apart
                     if not self[name, way].native}  # fmt: skip
            if apart:  # without a preset, dimensions that are not named stay native
                found[name] = {**({} if set(chosen) == {NATIVE} else found[name]), **apart}
        if not found:
            return {"preset": "none"}
        if isinstance(hierarchy, tuple):
            deep = any(name in found for name in TWO_LEVELS)
            node, site = hierarchy
            own = {"size": site, **INSIDE} if self["dp", "forward"].inside else site
            return {**found, "hierarchy": [node, own]} if deep else found
        return found if hierarchy else {**found, "hierarchy": "none"}
