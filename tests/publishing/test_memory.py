"""Peak memory of a sender: a copy of its shard, and two buckets, whatever the model has."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import torch

from hybridcomp.publishing import Publisher
from hybridcomp.publishing.destinations import Folder
from tests.publishing.made import Weights
from tests.ranks import run_ranks

NUMEL, BUCKET = 24_000_000, 1 << 21
#: glibc's number of this setting in <malloc.h>
M_MMAP_THRESHOLD = -3
#: bytes that versions may take beside the copy and the buckets: files, indices, allocators
SLACK = 8 << 20


def peak() -> int:
    """The most bytes that this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def grown(folder: Path) -> tuple[int, int]:
    """What a full version adds to the peak, and what four deltas add to that."""
    weights = Weights(shapes={"one": (NUMEL // 2,), "two": (NUMEL // 2000, 1000)})
    for number in range(2):
        weights.step(number)  # its own temporaries are larger than those of a version
    small = Publisher(Weights().held(sharded=False), Folder(folder / "small"))
    for _ in range(2):  # imports what a full version and a delta need
        small.publish()
    # glibc keeps up to 64 MiB of what was freed and would make the copy from it, unseen by the
    # peak; with a threshold that stays, large buffers go back to the system once they are freed
    libc = ctypes.CDLL(None)
    libc.malloc_trim(0)
    assert libc.mallopt(M_MMAP_THRESHOLD, 1 << 17)
    # memory in use is raised to the peak, so that what comes on top of it is seen
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
    """Bytes in memory at the moment."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_a_sender_keeps_a_copy_of_its_shard_and_two_buckets(tmp_path: Path) -> None:
    """Two ranks with replicas: each publishes half."""
    copy = NUMEL  # two bytes for half of the values
    for first, later in run_ranks(2, grown, tmp_path):
        assert copy * 0.8 < first, "the peak is that of versions"
        assert later < copy + 2 * (2 * BUCKET) + SLACK
