"""Pairwise messages over gloo: results, and receives posted first."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from hybridcomp.collectives import Group, Meter
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.transport import Works
from tests.ranks import RunRanks

#: bytes from each of three ranks to each; some are zero, and a rank may send nothing
SPLITS = [[5, 0, 700_000], [17, 3, 0], [0, 0, 0]]


def _parts(sender: int, receiver: int) -> Tensor:
    numel = SPLITS[sender][receiver]
    return (torch.arange(numel) * (3 * sender + receiver + 1) % 251).to(torch.uint8)


def _uneven(_: None) -> bool:
    """Run three exchanges at once, waited for in another order."""
    me, ranks = dist.get_rank(), range(3)
    values = torch.cat([_parts(me, rank) for rank in ranks])
    expected = torch.cat([_parts(rank, me) for rank in ranks])
    takes = [SPLITS[rank][me] for rank in ranks]
    group = Group.of(None)
    outs = [torch.full_like(expected, 255) for _ in ranks]
    works = [
        transport.all_to_all(out, values.add(n), takes, SPLITS[me], group, Meter())
        for n, out in enumerate(outs)
    ]
    for work in reversed(works):
        assert isinstance(work, Works) and work.wait()
    return all(out.equal(expected.add(n)) for n, out in enumerate(outs))


def test_parts_of_any_length_arrive_in_order(on_ranks: RunRanks) -> None:
    assert on_ranks(3, _uneven, None) == [True] * 3


def _gathered(_: None) -> list[int]:
    """Gather in a group without rank 0, so that group ranks differ from job ranks."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return []
    out = torch.zeros(4, dtype=torch.int64)
    mine = torch.tensor([10 * dist.get_rank(), 7])
    transport.all_gather(out, mine, Group.of(group), Meter()).wait()
    dist.destroy_process_group(group)
    return out.tolist()


def _in_node(_: None) -> tuple[bool, list[int]]:
    """Gather natively where the job has one node, and where rank 2 has its own."""
    me, out = dist.get_rank(), torch.zeros(6, dtype=torch.int64)
    mine = out[2 * me : 2 * me + 2].copy_(torch.tensor([10 * me, 7]))  # a view of its place
    far = Group.of(None, frozenset({2}) if me < 2 else frozenset({0, 1}))
    none = transport.gather_in_node(out, mine, far) is None
    work = transport.gather_in_node(out, mine, Group.of(None))
    assert isinstance(work, Works) and work.wait()
    return none, out.tolist()


def test_gathers_in_a_node_go_between_pairs(on_ranks: RunRanks) -> None:
    assert on_ranks(3, _in_node, None) == [(True, [0, 7, 10, 7, 20, 7])] * 3


def test_a_group_gathers_by_its_own_ranks(on_ranks: RunRanks) -> None:
    assert on_ranks(3, _gathered, None) == [[], [10, 7, 20, 7], [10, 7, 20, 7]]


def _posted(_: None) -> list[str]:
    posted: list[str] = []

    def noting(name: str) -> Any:
        native = getattr(dist, name)

        def call(*args: Any, **named: Any) -> Any:
            posted.append(name)
            return native(*args, **named)

        return mock.patch.object(dist, name, call)

    out, values = torch.zeros(300, dtype=torch.uint8), torch.ones(300, dtype=torch.uint8)
    group = Group.of(None)
    with noting("irecv"), noting("isend"):
        transport.all_to_all(out, values, [100] * 3, [100] * 3, group, Meter()).wait()
    assert out.equal(values)
    return posted


def test_every_receive_is_posted_before_a_send(on_ranks: RunRanks) -> None:
    assert on_ranks(3, _posted, None) == [["irecv", "irecv", "isend", "isend"]] * 3


class Late(Work):
    """A message that does not come."""

    def wait(self, timeout: object = None) -> bool:
        raise RuntimeError("timed out")


def test_works_that_failed_fail_at_every_wait() -> None:
    works = Works([Late()], None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="timed out"):
            works.wait()
