"""Track accesses to blocks of GPU memory, and detect missing synchronization.

Every stream counts its operations and has a vector clock: for each other stream, the count that it
is ordered behind. A block records its last writer and its readers. When freed, it returns to the
stream that allocated it, whose next allocation may reuse it at once, as in torch's caching
allocator; that stream then has to be ordered behind all other uses.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

#: untyped in torch
StorageWeakRef: Any = reductions.StorageWeakRef
#: address distance between two blocks
STEP = 1 << 40
#: the host as a stream, which is ordered behind a stream after waiting for it
HOST = -1

Clock = dict[int, int]


class Race(AssertionError):
    """Two streams access a block without synchronization."""


@dataclass(eq=False)
class Stream:
    """A stream, or the host."""

    number: int
    name: str
    clock: Clock = field(default_factory=dict)

    def behind(self, clock: Clock) -> None:
        """Wait for everything in ``clock``."""
        for number, count in clock.items():
            self.clock[number] = max(self.clock.get(number, 0), count)

    def step(self) -> None:
        """Count an operation."""
        self.clock[self.number] = self.clock.get(self.number, 0) + 1

    def sees(self, number: int, count: int) -> bool:
        return self.clock.get(number, 0) >= count


@dataclass(eq=False)
class Block:
    """A storage: its allocating stream, its last accesses, and record_stream's streams."""

    address: int
    owner: Stream
    alive: Any  # torch's reference to the storage
    what: str
    written: tuple[int, int] | None = None
    read: Clock = field(default_factory=dict)
    recorded: list[Stream] = field(default_factory=list)

    def touch(self, by: Stream, writes: bool) -> None:
        """Raise Race unless ``by`` is ordered behind the conflicting accesses."""
        before = list(self.read.items()) if writes else []
        if self.written is not None:
            before.append(self.written)
        for number, count in before:
            if not by.sees(number, count):
                does = "writes" if writes else "reads"
                raise Race(f"{by.name} {does} {self.what} without having waited for {number}")
        if writes:
            self.written, self.read = (by.number, by.clock[by.number]), {}
        else:
            self.read[by.number] = by.clock[by.number]

    def check_freed(self, host: Stream) -> None:
        """Raise Race if another stream still uses memory that its owner may reuse.

        Accesses the host waited for are finished, and recorded streams are waited for.
        """
        if self.owner is host:
            return  # torch keeps pinned memory until copies finish
        used = dict(self.read)
        if self.written is not None:
            used[self.written[0]] = max(self.written[1], used.get(self.written[0], 0))
        for number, count in used.items():
            if not any(s.sees(number, count) for s in (self.owner, host, *self.recorded)):
                raise Race(
                    f"{self.what} was freed to {self.owner.name} while {number} still uses it"
                )


class Memory:
    """All blocks of a GPU, and pinned blocks of its host."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._addresses = itertools.count(STEP, STEP)
        self.pinned: set[int] = set()

    def block(self, tensor: Tensor, owner: Stream, what: str) -> Block:
        """Return the block of ``tensor``; a new one counts as allocated by ``owner``."""
        storage = tensor.untyped_storage()
        found = self._blocks.get(storage._cdata)
        if found is None or found.alive.expired():
            shape = "x".join(map(str, tensor.shape))
            name = f"{what} ({tensor.dtype} {shape})"
            found = Block(next(self._addresses), owner, StorageWeakRef(storage), name)
            self._blocks[storage._cdata] = found
        return found

    def address(self, tensor: Tensor) -> int:
        """Return a fake ``data_ptr``."""
        block = self._blocks[tensor.untyped_storage()._cdata]
        return block.address + int(tensor.storage_offset()) * tensor.itemsize

    def at(self, word: int) -> Block | None:
        """Return the block that a kernel argument points into; None for numbers."""
        base = word - word % STEP
        for block in self._blocks.values():
            if block.address == base:
                return block
        return None

    def record(self, tensor: Tensor, stream: Stream) -> None:
        """Delay the block's reuse until ``stream`` is done with it (``record_stream``)."""
        self._blocks[tensor.untyped_storage()._cdata].recorded.append(stream)

    def sweep(self, host: Stream) -> None:
        """Reclaim freed blocks. Raises Race."""
        for key, block in list(self._blocks.items()):
            if block.alive.expired():
                del self._blocks[key]
                self.pinned.discard(key)
                block.check_freed(host)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors among an operation's arguments or results."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
