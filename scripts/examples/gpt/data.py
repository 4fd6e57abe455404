"""Choose a rank's tokens in a step from the seed and the number of consumed samples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpt.indexed import DatasetError, IndexedTokens

#: inputs and labels, int64, (micro-batch, sequence length); labels are inputs shifted by one
Batch = tuple[Tensor, Tensor]


class Samples:
    """Fixed-length samples of the concatenated documents, in a new random order every epoch.

    Sample i of an epoch is ``length + 1`` tokens from ``length * permutation[i]`` on, so that every
    token is predicted once per epoch. Raises DatasetError when there is not one whole sample.
    """

    def __init__(self, data: IndexedTokens, length: int, seed: int) -> None:
        self._tokens, self._length, self._seed = data.tokens, length, seed
        self.per_epoch = (len(data.tokens) - 1) // length
        if self.per_epoch < 1:
            raise DatasetError(
                f"{data.prefix}: expected at least {length + 1} tokens, one sample, found "
                f"{len(data.tokens)}; prepare more text or train on shorter sequences"
            )
        self.vocabulary = int(data.tokens.max()) + 1
        self._epoch = -1
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)

    def fingerprint(self) -> dict[str, Any]:
        """Return a fingerprint of text and sample order, which compared runs must share.

        It covers the text's length and 65536 evenly spaced tokens.
        """
        places = np.linspace(0, len(self._tokens) - 1, min(len(self._tokens), 65536)).astype(int)
        order = np.random.default_rng([self._seed, 0]).permutation(self.per_epoch)
        return {
            "tokens": len(self._tokens),
            "content": _digest(self._tokens[places].astype(np.int64)),
            "sample_length": self._length,
            "order": _digest(order.astype(np.int64)),
        }

    def batch(self, indices: range) -> Batch:
        """Return the samples with these numbers, counted across epochs."""
        rows = np.stack([self._row(index) for index in indices]).astype(np.int64)
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _row(self, index: int) -> NDArray[np.integer[object]]:  # type: ignore[type-var]
        epoch, position = divmod(index, self.per_epoch)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self.per_epoch)
            self._epoch = epoch
        start = self._length * int(self._order[position])
        return self._tokens[start : start + self._length + 1]


def _digest(values: NDArray[np.int64]) -> str:
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


def both_parts(
    prefix: Path, length: int, seed: int, valid: bool
) -> tuple[Samples, Samples | None, int]:
    """Return samples of PREFIX_train and, if ``valid``, of PREFIX_valid, and the vocabulary."""
    parts = [("train", seed), ("valid", 0)][: 1 + valid]
    found = [
        Samples(IndexedTokens(prefix.with_name(f"{prefix.name}_{part}")), length, drawn)
        for part, drawn in parts
    ]
    return found[0], found[1] if valid else None, max(each.vocabulary for each in found)


def keep_whole(tokens: Tensor) -> Tensor:
    """Keep all of each sequence."""
    return tokens


@dataclass(frozen=True)
class Share:
    """The samples of every global batch that a data-parallel rank takes."""

    rank: int
    world_size: int  # data-parallel ranks
    micro_batch: int  # samples of one rank in one micro-batch
    micro_batches: int  # micro-batches in one optimizer step
    cut: Callable[[Tensor], Tensor] = keep_whole  # selects the tokens of a sequence for this rank

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in one step."""
        return self.world_size * self.micro_batch * self.micro_batches

    def indices(self, consumed: int) -> Iterator[range]:
        """Return the samples of this rank's micro-batches after ``consumed`` samples in all."""
        for number in range(self.micro_batches):
            start = consumed + (number * self.world_size + self.rank) * self.micro_batch
            yield range(start, start + self.micro_batch)

    def stream(self, samples: Samples, consumed: int, device: torch.device) -> Iterator[Batch]:
        """Yield micro-batches of consecutive steps without end."""
        while True:
            yield from self.batches(samples, consumed, device)
            consumed += self.global_batch

    def batches(self, samples: Samples, consumed: int, device: torch.device) -> Iterator[Batch]:
        """Yield the micro-batches of one step."""
        for indices in self.indices(consumed):
            inputs, labels = samples.batch(indices)
            yield self.cut(inputs).to(device), self.cut(labels).to(device)
