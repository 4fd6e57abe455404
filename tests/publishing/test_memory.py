"""Peak memory of a sender: a copy of its shard and two buckets, for any model."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import torch

from hybridcomp.publishing import Publisher
from hybridcomp.publishing.destinations import Folder
from tests.publishing.made import Weights
from tests.ranks import run_ranks

NUMEL, BUCKET = 16_000_000, 1 << 20
#: glibc's number of this setting in <malloc.h>
M_MMAP_THRESHOLD = -3
#: allowance beside the copy and the buckets: files, indices, allocators
SLACK = 8 << 20


def peak() -> int:
    """Return this process's peak memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def grown(folder: Path) -> tuple[int, int]:
    """Return what a full version adds to the peak, and what four deltas add to that."""
    weights = Weights(shapes={"one": (NUMEL // 2,), "two": (NUMEL // 2000, 1000)})
    for number in range(2):
        weights.step(number)  # its temporaries exceed those of a version
    small = Publisher(Weights().held(sharded=False), Folder(folder / "small"))
    for _ in range(2):  # imports for a full version and a delta
        small.publish()
    # glibc keeps up to 64 MiB of freed memory and would reuse it for the copy, unseen by the peak;
    # with a fixed threshold large buffers return to the system once freed
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    assert libc.mallopt(M_MMAP_THRESHOLD, 1 << 17)
    # raise memory in use to the peak, so that further use shows
    before = peak()
    filler = torch.ones(max(0, before - _now()), dtype=torch.uint8)
    publisher = Publisher(weights.held(sharded=False), Folder(folder / "large"), bucket=BUCKET)
    publisher.publish()
    first = peak() - before
    for _ in range(4):
        for value in weights.values.values():
            value.view(torch.int16).add_(1)
        publisher.publish()
    assert filler.numel() >= 0
    return first, peak() - before


def _now() -> int:
    """Return the bytes in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_a_sender_keeps_a_copy_of_its_shard_and_two_buckets(tmp_path: Path) -> None:
    """Two replicas: each rank publishes half."""
    copy = NUMEL  # two bytes for half of the values
    for first, later in run_ranks(2, grown, tmp_path):
        assert copy * 0.8 < first, "the peak is that of versions"
        assert later < copy + 2 * (2 * BUCKET) + SLACK
