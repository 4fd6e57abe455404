"""A chain of versions in a folder: exact through restarts, failures and odd receivers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hybridcomp.publishing import WeightReceiver
from hybridcomp.publishing.destinations import Folder
from tests.publishing import numpy_reader
from tests.publishing.made import (
    NIGHTLY,
    Weights,
    changed_rightly,
    copy_of,
    error_of,
    launch,
    received,
    same,
)
from tests.publishing.numpy_reader import Reader
from tests.ranks import RunRanks

VERSIONS = 1000 if NIGHTLY else 12


def chain(folder: Path, versions: int, sharded: bool, dtype: torch.dtype) -> tuple[int, int]:
    """Publish ``versions`` with a restart in the middle; rank 0 receives and compares all.

    Returns the full versions, and the last version.
    """
    weights = Weights(dtype)
    publisher = weights.publisher(Folder(folder), sharded, anchor_every=100)
    receiver = WeightReceiver(folder)
    full = 0
    for number in range(versions):
        if number == versions // 2:
            publisher.close()
            publisher = weights.publisher(Folder(folder), sharded, anchor_every=100)
        before = copy_of(weights.values)
        weights.step(number, share=(0.0, 0.01, 0.3, 0.9)[number % 4])
        summary = publisher.publish(step=number)
        full += summary.full
        if dist.get_rank() == 0:
            applied = receiver.update()
            assert applied is not None and applied.version == summary.version == number + 1
            assert same(receiver, weights.values)
            # a later full version sends all values, and the receiver determines the changes
            assert applied.changed == summary.changed or (summary.full and number)
            if number:
                assert changed_rightly(receiver, before, weights.values)
            assert receiver.update() is None
    return full, publisher.version


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicas"])
def test_every_version_is_exact(
    on_ranks: RunRanks, tmp_path: Path, world_size: int, sharded: bool
) -> None:
    dtype = torch.bfloat16 if sharded else torch.float16
    for full, last in launch(on_ranks, world_size, chain, tmp_path, VERSIONS, sharded, dtype):
        assert last == VERSIONS
        assert full == (VERSIONS + 99) // 100  # none after the restart


def lost_steps(folder: Path) -> tuple[bool, bool, bool]:
    """End a job after its checkpoint: the next version is a full one of the same chain."""
    weights = Weights()
    publisher = weights.publisher(Folder(folder))
    publisher.publish()
    checkpoint = copy_of(weights.values)
    weights.step(1)
    publisher.publish()
    receiver = received(folder)
    base = publisher.base
    for name, value in checkpoint.items():
        weights.values[name].copy_(value)
    again = weights.publisher(Folder(folder))
    weights.step(7)
    summary = again.publish()
    dist.barrier()
    receiver.update()
    right = same(receiver, weights.values) and receiver.version == 3
    weights.step(8)
    delta = again.publish()
    receiver.update()
    dist.barrier()
    return summary.full and again.base == base, right, not delta.full and receiver.version == 4


def test_after_lost_steps_the_next_version_is_full(on_ranks: RunRanks, tmp_path: Path) -> None:
    assert on_ranks(2, lost_steps, tmp_path) == [(True, True, True)] * 2


def one_rank_has_fp32() -> str:
    """Use weights that are not 16-bit on rank 1 alone."""
    weights = Weights(torch.float32 if dist.get_rank() else torch.bfloat16)
    return error_of(lambda: weights.publisher(Folder(Path("unused"))))


def test_what_one_rank_cannot_publish_is_told_on_all(on_ranks: RunRanks) -> None:
    told = on_ranks(2, one_rank_has_fp32)
    assert told[0] == told[1] and "float32, and 16-bit weights are published" in told[0]


def followed_by_numpy(folder: Path) -> bool:
    """Publish versions of both dtypes, full and delta, with zeros, tiny values and a scalar."""
    for dtype in (torch.bfloat16, torch.float16):
        shapes = {"embed.weight": (64, 64), "bias": (5,), "zeros": (40, 40), "scale": ()}
        weights, to = Weights(dtype, shapes=shapes), folder / str(dtype)
        weights.values["zeros"].zero_()[3, 4] = 1
        weights.values["embed.weight"][7, :9] *= 1e-6
        publisher, reader = weights.publisher(Folder(to), anchor_every=3), Reader(to)
        for number, share in enumerate((0.0, 0.9, 0.3, 0.5, 0.02), 1):
            weights.step(number, share)
            publisher.publish()
            reader.apply(number)
            for name, value in weights.values.items():
                bits = value.view(torch.int16).reshape(-1).numpy().view("uint16")
                assert (reader.values[name] == bits).all(), (dtype, number, name)
    return True


def test_a_reader_of_numpy_follows_a_chain(on_ranks: RunRanks, tmp_path: Path) -> None:
    """Verifies docs/published_format.md."""
    assert on_ranks(2, followed_by_numpy, tmp_path) == [True] * 2
    assert len(Path(numpy_reader.__file__).read_text().splitlines()) <= 150
