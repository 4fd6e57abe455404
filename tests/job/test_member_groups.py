"""Groups that only members create: names agree whatever other groups each rank is in."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from hybridcomp.job.member_groups import new_member_group
from tests.ranks import run_ranks


def summed(ranks: list[int]) -> float:
    group = new_member_group(ranks, timeout=timedelta(seconds=20))
    value = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(value, group=group)
    return value.item()


def uneven() -> list[float]:
    """Create groups with ranks that are in different numbers of others, and once more each."""
    first = dist.new_group([0, 1])  # ranks 2 and 3 are in one group less
    rows = [[0, 2], [0, 2]] if dist.get_rank() % 2 == 0 else [[3, 1], [1, 3]]
    found = [summed(row) for row in rows]
    if dist.get_rank() < 2:
        dist.destroy_process_group(first)  # torch's own names would repeat now
    found += [summed(row) for row in rows]
    after = dist.new_group([1, 2])  # the names that torch gives still agree, too
    if dist.get_rank() in (1, 2):
        dist.barrier(after)
    return found


def test_members_in_different_numbers_of_groups_meet() -> None:
    found = run_ranks(4, uneven)
    assert found == [[2.0] * 4, [4.0] * 4, [2.0] * 4, [4.0] * 4]
