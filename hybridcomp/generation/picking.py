"""Pick tokens from logits, independently of the layout of the job and the batch."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hybridcomp.config.error_messages import NOTHING
from hybridcomp.errors import ConfigError
from hybridcomp.generation.past import PackedPass


@dataclass(frozen=True)
class Picked:
    """The last stage's decision about one sequence after a pass.

    Attributes:
        answer: tokens added to the answer, at least one.
        tokens: tokens of the next pass: the answer's last token, or a tree after it.
        parents, kept: of the sequence's next ``SequencePart``.
    """

    answer: tuple[int, ...]
    tokens: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    kept: tuple[int, ...] | None = None


class Picker(Protocol):
    """Picks tokens for each part of a pass; all tensor ranks of the last stage pick the same.

    ``logits``: logits (n, V) of the requested tokens (``PackedPass.wanted``), in order of parts.
    """

    def __call__(self, passed: PackedPass, logits: Tensor) -> list[Picked]: ...


@runtime_checkable
class StageReader(Protocol):
    """A picker that also reads the keys and values of its stage."""

    def begin(self, runner: Any) -> None:
        """Set the ``StageRunner`` of the last stage, before its first pass."""


@dataclass(frozen=True)
class Sampling:
    """Settings and method of picking a token.

    Attributes:
        temperature: 0 takes the most likely token.
        top_k: number of most likely tokens to choose from; 0: all.
        top_p: choose from the fewest tokens with this total probability.
        seed: seed of the random numbers; a token's number depends on seed, sequence and position.
        vocabulary: limit on token ids; None: no limit.
        stop: an answer ends after any of these tokens or sequences of tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    vocabulary: int | None = None
    stop: tuple[tuple[int, ...], ...] = field(default=())

    def __post_init__(self) -> None:
        wrong = {
            "temperature": (not 0 <= self.temperature < float("inf"), "a number of at least 0"),
            "top_k": (self.top_k < 0, "a number of at least 0; 0 takes all tokens"),
            "top_p": (not 0 < self.top_p <= 1, "a number above 0 and at most 1"),
        }
        for name, (is_wrong, todo) in wrong.items():
            if is_wrong:
                raise ConfigError(f"generate: {name}", getattr(self, name), f"expected {todo}")
        if () in self.stop:
            raise ConfigError("generate: stop", NOTHING, "expected a token, or several, to stop at")

    def __call__(self, passed: PackedPass, logits: Tensor) -> list[Picked]:
        counts = [part.wants for part in passed.parts]
        rows = zip(passed.parts, torch.split(logits, counts), strict=True)
        tokens = [self.pick(row[-1], part.sequence, part.place) for part, row in rows]
        return [Picked((token,), (token,)) for token in tokens]

    def pick(self, logits: Tensor, sequence: int, place: int) -> int:
        """Pick token ``place`` of the answer of a sequence from its logits (V,)."""
        logits = logits[: self.vocabulary].double().cpu()
        if self.temperature == 0:
            return int(logits.argmax())
        # sum in order of ids, not of probabilities: rounding may order these otherwise elsewhere
        shares = self._kept((logits / self.temperature).softmax(0)).cumsum(0)
        drawn = self._random(sequence, place) * shares[-1]
        return int(torch.searchsorted(shares, drawn, right=True).clamp(max=len(shares) - 1))

    def _kept(self, shares: Tensor) -> Tensor:
        """Return the probabilities, zero for excluded tokens."""
        if not 0 < self.top_k < len(shares) and self.top_p == 1:
            return shares
        ordered, ids = shares.sort(descending=True, stable=True)
        if 0 < self.top_k < len(ordered):
            ordered, ids = ordered[: self.top_k], ids[: self.top_k]
        before = (ordered / ordered.sum()).cumsum(0).roll(1)
        before[0] = 0.0
        within = before < self.top_p
        return torch.zeros_like(shares).index_copy(0, ids[within], ordered[within])

    def _random(self, sequence: int, place: int) -> float:
        """Return a number in [0, 1) for one token."""
        key = struct.pack("<qqq", self.seed, sequence, place)
        digest = hashlib.blake2b(key, digest_size=8).digest()
        return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53

    def stops(self, answer: Sequence[int], known: int) -> int | None:
        """Return the length of ``answer`` up to and with its first stop; None without a stop.

        ``known``: number of leading tokens that were already checked.
        """
        for end in range(known + 1, len(answer) + 1):
            if any(tuple(answer[max(0, end - len(run)) : end]) == run for run in self.stop):
                return end
        return None
