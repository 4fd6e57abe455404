"""Who touches a block of a GPU's memory, and whether they have waited for each other.

Every stream counts what it does, and knows of every other stream up to which count it is behind it
(a vector clock). A block remembers its last writer and its readers. Its memory goes back to the
stream that allocated it, whose next allocation may get it at once, as torch's caching allocator
does: by then that stream has to be behind all that others do with the block.
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
#: bytes between the addresses of two blocks
STEP = 1 << 40
#: what a host does, which is behind a stream once it has waited for it
HOST = -1

Clock = dict[int, int]


class Race(AssertionError):
    """Two streams touch one block and neither has waited for the other."""


@dataclass(eq=False)
class Stream:
    """A stream, or the host."""

    number: int
    name: str
    clock: Clock = field(default_factory=dict)

    def behind(self, clock: Clock) -> None:
        """Wait for all that ``clock`` knows of."""
        for number, count in clock.items():
            self.clock[number] = max(self.clock.get(number, 0), count)

    def step(self) -> None:
        """Do one more thing."""
        self.clock[self.number] = self.clock.get(self.number, 0) + 1

    def sees(self, number: int, count: int) -> bool:
        return self.clock.get(number, 0) >= count


@dataclass(eq=False)
class Block:
    """A storage: who allocated it, who touched it last, on which streams it was recorded."""

    address: int
    owner: Stream
    alive: Any  # torch's reference to the storage
    what: str
    written: tuple[int, int] | None = None
    read: Clock = field(default_factory=dict)
    recorded: list[Stream] = field(default_factory=list)

    def touch(self, by: Stream, writes: bool) -> None:
        """Raise Race unless ``by`` has waited for whom it has to."""
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
        """Raise Race where another stream still uses what its owner may get again.

        What the host has waited for is over, and a stream that it was recorded on is waited for.
        """
        if self.owner is host:
            return  # torch keeps pinned memory until copies are through
        used = dict(self.read)
        if self.written is not None:
            used[self.written[0]] = max(self.written[1], used.get(self.written[0], 0))
        for number, count in used.items():
            if not any(s.sees(number, count) for s in (self.owner, host, *self.recorded)):
                raise Race(
                    f"{self.what} was freed to {self.owner.name} while {number} still uses it"
                )


class Memory:
    """All blocks of a GPU, and pinned ones of its host."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._addresses = itertools.count(STEP, STEP)
        self.pinned: set[int] = set()

    def block(self, tensor: Tensor, owner: Stream, what: str) -> Block:
        """The block of ``tensor``, made now if it is new: then ``owner`` allocated it."""
        storage = tensor.untyped_storage()
        found = self._blocks.get(storage._cdata)
        if found is None or found.alive.expired():
            shape = "x".join(map(str, tensor.shape))
            name = f"{what} ({tensor.dtype} {shape})"
            found = Block(next(self._addresses), owner, StorageWeakRef(storage), name)
            self._blocks[storage._cdata] = found
        return found

    def address(self, tensor: Tensor) -> int:
        """What stands for ``data_ptr``."""
        block = self._blocks[tensor.untyped_storage()._cdata]
        return block.address + int(tensor.storage_offset()) * tensor.itemsize

    def at(self, word: int) -> Block | None:
        """The block that an argument of a kernel points into; None where it is a number."""
        base = word - word % STEP
        for block in self._blocks.values():
            if block.address == base:
                return block
        return None

    def record(self, tensor: Tensor, stream: Stream) -> None:
        """``record_stream``: the block is not given out before ``stream`` is through with it."""
        self._blocks[tensor.untyped_storage()._cdata].recorded.append(stream)

    def sweep(self, host: Stream) -> None:
        """Take back what was freed. Raises Race."""
        for key, block in list(self._blocks.items()):
            if block.alive.expired():
                del self._blocks[key]
                self.pinned.discard(key)
                block.check_freed(host)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of an operation's arguments or results."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
