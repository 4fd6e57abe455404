"""Process groups that their members create alone, without the other ranks of the job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

from hybridcomp.job.agreement import next_number, start
from hybridcomp.job.gates import PerJob

_shared: PerJob[dict[tuple[int, ...], dist.ProcessGroup]] = PerJob(dict)


def new_member_group(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """Create the process group of ``ranks``, global ranks; only they call this, in the same order.

    ``options``: of ``dist.new_group``. Its ``use_local_synchronization`` hashes into the name of
    the group in how many groups this rank is (since torch 2.15: how many it has created). Members
    that differ in this number create groups with different names, and each waits for the others
    until the time-out: ranks of the first pipeline stage in the group of embeddings are enough. The
    name here holds the ranks and how many times they were given to this function.
    """
    members = tuple(sorted(ranks))
    number = next_number("groups", members)
    with _named(f"hybridcomp/group/{start()}/{','.join(map(str, members))}/{number}"):
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), use_local_synchronization=True, **options
        )
    return group


def shared_member_group(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """Return one group of ``ranks`` for all callers; the first call makes it as above.

    For engines and publishers: a job may make any number of them, and a group has threads and
    sockets until the default group is destroyed.
    """
    made, members = _shared.here, tuple(sorted(ranks))
    if members not in made:
        made[members] = new_member_group(members, **options)
    return made[members]


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Have ``dist.new_group`` give the group that it creates this name."""
    c10d: Any = dist.distributed_c10d
    before = c10d._process_group_name
    c10d._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        c10d._process_group_name = before
