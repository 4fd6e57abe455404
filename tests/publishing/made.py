"""A job of plain tensors that publishes: each rank holds a shard of every parameter."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.errors import ConfigError, PublishError
from hybridcomp.publishing import EngineWeights, Held, Publisher, WeightRange, WeightReceiver
from hybridcomp.publishing.destinations import PARTS, Destination, Folder
from hybridcomp.publishing.streams import Stream
from tests.ranks import RunRanks, run_ranks
from tests.selection import VARIABLE

NIGHTLY = os.environ.get(VARIABLE) == "1"
#: shapes: an odd number of values, a scalar, a matrix larger than a bucket
SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (37, 19), "layers.0.bias": (5,), "layers.0.weight": (64, 48), "scale": (),
}  # fmt: skip


@dataclass
class Weights:
    """Whole parameters, the same on every rank, of which each rank publishes ranges."""

    dtype: torch.dtype = torch.bfloat16
    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: dict(SHAPES))
    values: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        for name, shape in self.shapes.items():
            self.values[name] = torch.randn(shape, generator=generator).to(self.dtype)

    def step(self, number: int, share: float = 0.1) -> None:
        """Change about ``share`` of the values by a unit in the last place, up or down."""
        generator = torch.Generator().manual_seed(1000 + number)
        for value in self.values.values():
            bits = value.view(torch.int16)
            moved = torch.rand(bits.shape, generator=generator) < share
            sign = torch.randint(0, 2, bits.shape, generator=generator, dtype=torch.int16) * 2 - 1
            bits.add_(moved.to(torch.int16) * sign)

    def held(self, sharded: bool = True, count: int | None = None) -> EngineWeights:
        """Return this rank's values: a range of each parameter, or all of them as replicas.

        ``count``: ranks of the job, from 0; None: all.
        """
        rank, count = dist.get_rank(), dist.get_world_size() if count is None else count
        found = []
        for name, value in self.values.items():
            flat = value.view(-1)
            low, high = (flat.numel() * (rank + n) // count for n in (0, 1))
            low, high = (low, high) if sharded else (0, flat.numel())
            found.append(Held(WeightRange(name, low, high - low), partial(_same, flat[low:high])))
        return EngineWeights(
            {name: tuple(value.shape) for name, value in self.values.items()},
            dict.fromkeys(self.values, self.dtype),
            found,
            tuple(range(count)),
            {"head.weight": "embed.weight"},
        )

    def publisher(self, to: Destination, sharded: bool = True, **given: Any) -> Publisher:
        """Return a publisher with buckets smaller than the largest parameter."""
        return Publisher(self.held(sharded), to, bucket=1000, **given)


def _same(values: Tensor) -> Tensor:
    return values


def publish_chain(
    folder: Path,
    versions: int,
    anchor_every: int = 100,
    shapes: dict[str, tuple[int, ...]] = SHAPES,
) -> None:
    """Publish so many versions to a folder."""
    weights = Weights(shapes=dict(shapes))
    publisher = weights.publisher(Folder(folder), anchor_every=anchor_every)
    for number in range(versions):
        weights.step(number)
        publisher.publish()


def streamed() -> list[bytes]:
    """Return the bytes of four versions on a stream; all but the second are full."""
    weights, stream, found = Weights(), io.BytesIO(), list[bytes]()
    publisher = weights.publisher(Stream(stream, tuple(range(dist.get_world_size()))))
    for number in range(4):
        weights.step(number)
        if number != 1:
            publisher.ask_full()
        begin = stream.tell()
        publisher.publish()
        found.append(stream.getvalue()[begin:])
    return found


def received(source: Any) -> WeightReceiver:
    """Return a receiver that holds the newest version of a folder, or the first of a stream."""
    receiver = WeightReceiver(source)
    receiver.update()
    return receiver


def drain(receiver: WeightReceiver) -> WeightReceiver:
    """Apply all versions that are left in a stream."""
    while receiver.update() is not None:
        pass
    return receiver


def error_of(call: Callable[[], object]) -> str:
    """Return the error of ``call``, which must have one line; "" if there is none."""
    try:
        call()
    except (ConfigError, PublishError) as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


def manifest_of(folder: Path, version: int) -> Path:
    return folder / f"v{version:010d}.json"


def part_of(folder: Path, version: int, rank: int = 0) -> Path:
    (found,) = (folder / PARTS).glob(f"v{version:010d}.*.r{rank:05d}.part")
    return found


def flip(path: Path, place: int | None = None) -> None:
    """Flip a bit of a file, by default in its middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 4
    path.write_bytes(data)


def launch(on_ranks: RunRanks, world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run on persistent ranks; nightly, when a thousand versions take minutes, on new ones."""
    if NIGHTLY:
        return run_ranks(world_size, function, *args, timeout=3500.0)
    return on_ranks(world_size, function, *args)


def same(receiver: WeightReceiver, values: dict[str, Tensor]) -> bool:
    """Return whether the mirror has the names, shapes and bits of ``values``."""
    found = dict(receiver.tensors())
    return found.keys() == values.keys() and all(
        found[n].shape == v.shape
        and torch.equal(found[n].cpu().view(torch.int16), v.cpu().view(torch.int16))
        for n, v in values.items()
    )


def changed_rightly(
    receiver: WeightReceiver, before: dict[str, Tensor], after: dict[str, Tensor]
) -> bool:
    """Return whether ``changed_values`` are exactly the differences of two versions."""
    for name, new in after.items():
        where, values = receiver.changed_values(name)
        bits, old = new.reshape(-1).view(torch.int16), before[name].reshape(-1).view(torch.int16)
        if not torch.equal(where, (bits != old).nonzero().reshape(-1)):
            return False
        if not torch.equal(values.view(torch.int16), bits[where]):
            return False
    return True


def copy_of(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy all values."""
    return {name: value.clone() for name, value in values.items()}


@contextmanager
def full_disk(is_full: bool, rank: int) -> Iterator[None]:
    """Return a folder whose disk is full for one rank, if ``is_full``, once its part is written."""
    finish = Folder.finish

    def fails(self: Folder, problem: str | None) -> str:
        finish(self, problem)
        raise OSError(28, "No space left on device")

    is_here = is_full and dist.get_rank() == rank
    with mock.patch.object(Folder, "finish", fails if is_here else finish):
        yield
