"""Keys and values of a stage's layers, by sequence, and a layer's view of them in a pass.

The tokens of a pass are packed, (1, N, ...), without padding: token-wise layers compute real tokens
only, and attention runs sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError


@dataclass(frozen=True)
class SequencePart:
    """New tokens of one sequence in a pass; they follow the tokens in the stages' KV cache.

    To verify several candidates in one pass, a part holds a tree: ``tokens`` are the nodes,
    ``parents`` gives each node's predecessor, and ``wants`` is the number of nodes. ``kept`` in the
    sequence's next part lists the accepted nodes; all stages drop the other nodes before that pass.

    Attributes:
        sequence: number of the sequence.
        tokens: ids of the new tokens, at least one.
        place: number of tokens in the sequence's answer so far.
        wants: the last stage returns logits for this many last tokens of the part.
        parents: for each token the index in this part of the token before it, always a smaller
            index; -1: it follows the cached tokens. A token attends to the cached tokens, its
            ancestors and itself, at position (cached tokens) + (number of ancestors). None: each
            token follows the previous one.
        kept: indices of the tokens of the sequence's previous part that stay cached, a path of that
            part's tree from the root; () drops all of them, None keeps all.
    """

    sequence: int
    tokens: tuple[int, ...]
    place: int = 0
    wants: int = 1
    parents: tuple[int, ...] | None = None
    kept: tuple[int, ...] | None = None


@dataclass(frozen=True)
class PackedPass:
    """One pass through all stages: parts of different sequences, and sequences that have ended."""

    parts: tuple[SequencePart, ...]
    ended: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return sum(len(part.tokens) for part in self.parts)

    @property
    def wanted(self) -> list[int]:
        """Return the indices, in the packed pass, of the tokens whose logits are needed."""
        stops = accumulate(len(part.tokens) for part in self.parts)
        ends = zip(stops, self.parts, strict=True)
        return [at for stop, part in ends for at in range(stop - part.wants, stop)]

    def as_json(self) -> dict[str, Any]:
        """Return a form for ``from_json`` that leaves out default values, to keep headers short."""
        parts = [list(asdict(part).values()) for part in self.parts]
        plain = list(asdict(SequencePart(0, ())).values())
        for part in parts:
            while part[-1] == plain[len(part) - 1]:
                part.pop()
        return {"parts": parts, "ended": self.ended}

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> PackedPass:
        lists = [[tuple(v) if isinstance(v, list) else v for v in row] for row in said["parts"]]
        return cls(tuple(SequencePart(*cast(Any, row)) for row in lists), tuple(said["ended"]))


class KeyStore:
    """Keys and values of every layer of a stage, for each sequence, on the layers' device.

    Attributes:
        room: maximum number of tokens of a sequence.
        lengths: number of cached tokens of each sequence.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.lengths: dict[int, int] = {}
        self._before: dict[int, int] = {}  # tokens held before the last pass
        self._held: dict[int, dict[Hashable, tuple[Tensor, Tensor]]] = {}

    def begin(self, passed: PackedPass) -> None:
        """Drop ended sequences and rejected tokens before a pass.

        Raises ConfigError if a sequence would exceed ``room``.
        """
        for sequence in passed.ended:
            self.drop(sequence)
        for part in passed.parts:
            if part.kept is not None:
                self.keep(part.sequence, part.kept)
            start = self.lengths.setdefault(part.sequence, 0)
            if start + len(part.tokens) > self.room:
                asked = Shown(f"sequence {part.sequence} of {start + len(part.tokens)} tokens")
                raise ConfigError("generate.room", asked, f"room is {self.room}; make it larger")
            self._held.setdefault(part.sequence, {})

    def end(self, passed: PackedPass) -> None:
        """Add the tokens of a pass to ``lengths``, after all layers have computed it."""
        for part in passed.parts:
            self._before[part.sequence] = self.lengths[part.sequence]
            self.lengths[part.sequence] += len(part.tokens)

    def keep(self, sequence: int, path: Sequence[int]) -> None:
        """Keep the tokens ``path`` of a sequence's last pass, in this order; drop its others."""
        start = self._before[sequence]
        self.lengths[sequence] = stop = start + len(path)
        if list(path) == list(range(len(path))):
            return  # they already lie at the beginning
        for held in self._held[sequence].values():
            for values in held:
                values[:, start:stop] = values[:, [start + at for at in path]]

    def drop(self, sequence: int) -> None:
        for table in (self.lengths, self._before, self._held):
            table.pop(sequence, None)

    def close(self) -> None:
        for sequence in list(self.lengths):
            self.drop(sequence)

    def put(self, layer: Hashable, part: SequencePart, key: Tensor, value: Tensor) -> list[Tensor]:
        """Append keys and values, (H, n, D) each; return those of all tokens of the sequence."""
        start, layers = self.lengths[part.sequence], self._held[part.sequence]
        stop = start + key.shape[1]
        held = layers.get(layer)
        if held is None or held[0].shape[1] < stop:
            size = min(self.room, max(2 * stop, 64))
            grown = (key.new_empty(key.shape[0], size, key.shape[2]),
                     value.new_empty(value.shape[0], size, value.shape[2]))  # fmt: skip
            for new, old in zip(grown, held or (), strict=False):
                new[:, :start] = old[:, :start]
            layers[layer] = held = grown
        for kept, new in zip(held, (key, value), strict=True):
            kept[:, start:stop] = new
        return [kept[:, :stop] for kept in held]

    @property
    def layers(self) -> list[Hashable]:
        """Return the layers that hold keys, in their order; none before the first pass."""
        return next((list(held) for held in self._held.values() if held), [])

    def of(self, sequence: int, layer: Hashable) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values of a sequence, (H, length, D) each, as views."""
        length = self.lengths[sequence]
        key, value = self._held[sequence][layer]
        return key[:, :length], value[:, :length]


class PackedPast:
    """Positions of a pass's tokens, and the attention of each to its visible tokens.

    It has ``positions``, ``room`` and ``attend`` like ``hybridcomp.nn.slices.KVCache``, so a layer
    that uses only these three can both train in slices and generate.
    """

    def __init__(self, store: KeyStore, passed: PackedPass, device: torch.device) -> None:
        self._store, self._parts = store, passed.parts
        self._edges = list(pairwise(accumulate((len(p.tokens) for p in passed.parts), initial=0)))
        starts = [store.lengths[part.sequence] for part in passed.parts]
        places = [s + d for s, p in zip(starts, passed.parts, strict=True) for d in _depths(p)]
        self._positions = torch.tensor(places, dtype=torch.int64, device=device)
        self._masks = [_mask(s, p, device) for s, p in zip(starts, passed.parts, strict=True)]

    @property
    def room(self) -> int:
        """Return the upper bound of all positions, exclusive."""
        return self._store.room

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Return the positions of the pass's tokens in their sequences, (N,) int64."""
        assert tokens == len(self._positions), "a layer sees all tokens of the pass"
        return self._positions

    def attend(
        self, layer: Hashable, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None
    ) -> Tensor:
        """Store keys and values, and return every token's attention output, (1, H, N, D).

        Args:
            layer: the attention layer, the key under which keys and values are stored.
            query: (1, H, N, D), with rotary positions already applied, as in ``key``.
            key, value: (1, K, N, D) with K heads, of which H is a multiple.
            scale: factor on the products; None: one over the root of D.
        """
        out = [
            self._one(layer, part, mask, [x[..., a:b, :] for x in (query, key, value)], scale)
            for part, mask, (a, b) in zip(self._parts, self._masks, self._edges, strict=True)
        ]
        return torch.cat(out, dim=2)

    def _one(
        self, layer: Hashable, part: SequencePart, mask: Tensor | None, new: Sequence[Tensor],
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        query, key, value = new
        held = self._store.put(layer, part, key[0], value[0])
        causal = mask is None and query.shape[2] > 1  # the first tokens of a sequence
        return F.scaled_dot_product_attention(
            query, held[0][None], held[1][None], attn_mask=mask, is_causal=causal, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip

    def __getattr__(self, name: str) -> NoReturn:
        if name not in ("start", "extend"):
            raise AttributeError(name)
        todo = "a pass holds several sequences; use past.positions and past.attend in the layer"
        raise ConfigError("generate", Shown(f"a layer that asks for past.{name}"), todo)


def _depths(part: SequencePart) -> Iterator[int]:
    """Yield each token's position relative to the first new position of the sequence."""
    depths: list[int] = []
    for index in range(len(part.tokens)):
        parent = index - 1 if part.parents is None else part.parents[index]
        depths.append(0 if parent < 0 else depths[parent] + 1)
        yield depths[-1]


def _mask(start: int, part: SequencePart, device: torch.device) -> Tensor | None:
    """Return the new tokens' mask, (n, start + n) bool; None: plain causal, or one token."""
    count = len(part.tokens)
    if part.parents is None and (count == 1 or start == 0):
        return None
    own = torch.eye(count, dtype=torch.bool, device="cpu")
    if part.parents is None:
        own = own.new_ones(count, count).tril()
    for index, parent in enumerate(part.parents or ()):
        if parent >= 0:
            own[index] |= own[parent]
    return torch.cat([own.new_ones(count, start), own], dim=1).to(device)
