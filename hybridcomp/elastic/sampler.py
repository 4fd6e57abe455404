"""Sample each element of an epoch once, even if the number of ranks changes between steps.

The order of an epoch depends only on seed and epoch. Each step takes the next ``samples`` elements,
and rank r trains on the r-th part of them. So a job with another number of ranks needs only the
position to continue: the number of samples that the whole job has used.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Sampler

from hybridcomp.config.error_messages import Shown
from hybridcomp.elastic import batches
from hybridcomp.errors import CheckpointError, ConfigError

KEY = "ElasticSampler"
#: number of first indices of an epoch whose checksum is saved
CHECKED = 256


class ElasticSampler(Sampler[int]):
    """Sampler of torch's DataLoader for jobs whose number of ranks changes between steps.

    ``DataLoader(data, batch_size=micro, sampler=sampler)`` yields this rank's samples from the
    position to the end of the epoch. The script calls ``stepped`` after every optimizer step. If
    the script saves ``state_dict``, a job of any number of ranks continues with the unseen samples.
    """

    def __init__(
        self,
        length: int,
        samples: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        tail: Literal["drop", "keep"] = "drop",
        rank: int | None = None,
        ranks: int | None = None,
    ) -> None:
        """Begin at the first sample of epoch 0.

        Args:
            length: samples of the data set.
            samples: samples of an optimizer step of the whole job, at most ``length``.
            seed: seed of the order; the same on all ranks.
            shuffle: whether each epoch has another random order; False: the data set's order.
            tail: what happens to the samples after an epoch's last whole step. "drop" leaves them
                out (with ``shuffle``, other samples in each epoch); "keep" puts them into the next
                epoch's first step, so that no sample is left out.
            rank, ranks: data-parallel rank of this process, and number of data-parallel ranks;
                None: rank and world size. With pipeline or tensor parallelism take the engine's,
                such as ``engine.grid.get_data_parallel_id()``.

        Raises ConfigError for invalid numbers. If ``ranks`` does not divide ``samples``, the error
        names the nearest values that work.
        """
        for name, value in (("length", length), ("samples", samples)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{KEY}.{name}", value, "expected a number of samples")
        if samples > length:
            todo = f"expected at most the {length} samples of the data set"
            raise ConfigError(f"{KEY}.samples", samples, todo)
        if tail not in ("drop", "keep"):
            raise ConfigError(f"{KEY}.tail", tail, 'expected "drop" or "keep"')
        joined = dist.is_available() and dist.is_initialized()
        self.ranks = ranks if ranks is not None else dist.get_world_size() if joined else 1
        self.rank = rank if rank is not None else dist.get_rank() if joined else 0
        if not 0 <= self.rank < self.ranks:
            raise ConfigError(f"{KEY}.rank", self.rank, f"expected 0 to {self.ranks - 1}")
        self.share = batches.share(samples, self.ranks, f"{KEY}.samples")
        self.length, self.samples, self.seed = length, samples, seed
        self.shuffle, self.tail = shuffle, tail
        self.epoch = self.seen = self.steps = self.trained = 0
        self._drawn = self._counted = 0  # samples drawn by this rank since the last iterator began

    def micro_batches(self, most: int) -> tuple[int, int]:
        """Return the largest micro-batch up to ``most``, and how many of them make up a step."""
        return batches.micro_batches(self.samples, self.ranks, most)

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples from the position to the end of the epoch."""
        if self._drawn >= self.share and not self._counted:
            raise ConfigError(KEY, Shown("no call of stepped()"), _CALL)
        self._drawn = self._counted = 0
        return self._indices(self.epoch, self.seen)

    def __len__(self) -> int:
        """Return how many samples this rank gets from an iterator that begins now."""
        left = self.length - self.seen
        steps = left // self.samples if self.tail == "drop" else -(-left // self.samples)
        return steps * self.share

    def stepped(self) -> None:
        """Advance the position by an optimizer step; every rank calls it.

        Raises ConfigError if this rank has not drawn its samples of this step yet.
        """
        self._counted += self.share
        if self._counted > self._drawn:
            found = Shown(f"{self._counted // self.share} calls of stepped()")
            todo = f"expected one for each step of {self.share} samples of a rank, of which "
            raise ConfigError(KEY, found, f"{todo}{self._drawn} were drawn by this iterator")
        self.seen += self.samples
        self.steps += 1
        self.trained += self.samples
        self._turn()

    def _turn(self) -> None:
        """Begin the next epoch if no step is left in this epoch."""
        if self.tail == "keep" and self.seen >= self.length:
            self.epoch, self.seen = self.epoch + 1, self.seen - self.length
        elif self.tail == "drop" and self.seen + self.samples > self.length:
            self.epoch, self.seen = self.epoch + 1, 0

    def _indices(self, epoch: int, seen: int) -> Iterator[int]:
        order = self._order(epoch)
        first = self.rank * self.share
        while seen < self.length:
            batch = order[seen : seen + self.samples]
            if lacking := self.samples - len(batch):
                if self.tail == "drop":
                    return
                batch = torch.cat([batch, self._order(epoch + 1)[:lacking]])
            seen += self.samples
            for index in batch[first : first + self.share].tolist():
                self._drawn += 1
                yield index

    def _order(self, epoch: int) -> Tensor:
        """Return the order of an epoch, int64, equal on all ranks."""
        if not self.shuffle:
            return torch.arange(self.length, device="cpu")
        digest = hashlib.sha256(f"{self.seed} {epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        return torch.randperm(self.length, generator=generator, device="cpu")

    def _checksum(self, epoch: int) -> int:
        return zlib.crc32(str(self._order(epoch)[:CHECKED].tolist()).encode())

    def state_dict(self) -> dict[str, Any]:
        """Return the position, equal on all ranks, and the settings that determine the order.

        Raises ConfigError if samples of a step were drawn but ``stepped`` was never called.
        """
        if self._drawn > self.share and not self._counted:
            raise ConfigError(KEY, Shown("no call of stepped()"), _CALL)
        return {
            **{name: getattr(self, name) for name in _POSITION}, "samples": self.samples,
            **{name: getattr(self, name) for name in _ORDER}, "order": self._checksum(self.epoch),
        }  # fmt: skip

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise the error that ``load_state_dict`` would raise for ``state``; change nothing.

        ConfigError: the state belongs to another data set or order. CheckpointError: it is damaged.
        """
        for name in (*_POSITION, "samples", "length", "order"):
            value = state.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise CheckpointError(f"{KEY}: {name!r} of the saved state is {value!r}")
        for name in _ORDER:
            if state.get(name) != getattr(self, name):
                todo = (
                    f"the checkpoint's is {state.get(name)!r}; samples would be lost or read twice"
                )
                raise ConfigError(f"{KEY}.{name}", getattr(self, name), todo)
        if state["seen"] >= self.length:
            raise CheckpointError(f"{KEY}: 'seen' of the saved state is {state['seen']}")
        if state["order"] != self._checksum(state["epoch"]):
            todo = (
                "this version of torch shuffles otherwise; begin the next epoch, or go back to it"
            )
            raise ConfigError(f"{KEY}.order", Shown("another order of the epoch"), todo)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``'s state, saved with any number of ranks and batch size.

        Raises ConfigError and CheckpointError as ``check`` does, with nothing changed.
        """
        self.check(state)
        for name in _POSITION:
            setattr(self, name, int(state[name]))
        self._drawn = self._counted = 0
        self._turn()


#: position of the job: epoch, samples used of this epoch, steps, and samples used of all epochs
_POSITION = ("epoch", "seen", "steps", "trained")
#: values that determine the order, and so the meaning of a position
_ORDER = ("length", "seed", "shuffle", "tail")
_CALL = (
    "samples were drawn and no step was counted, so that they would be read twice: call "
    "sampler.stepped() after each optimizer step, on every rank"
)
