"""Gathers over several hops: the order of posts, and a failing hop."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import Work

from hybridcomp.collectives import Group, Handle, Meter
from hybridcomp.collectives.wire import chained_gather, transport


class Posted(Work):
    """A gather that completes, or fails, in ``wait``."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def wait(self, timeout: object = None) -> bool:
        if self.fails:
            raise RuntimeError("Connection closed by peer")
        return True


def group(rank: int) -> Group:
    """Rank ``rank`` of six: three of each of two nodes."""
    process: Any = object()
    hops = Group(process, rank % 3, 3), Group(process, rank // 3, 2)
    return Group(process, rank, 6, hops=hops)


def test_a_hop_is_posted_when_the_one_before_has_arrived() -> None:
    out, values = torch.zeros(24), torch.ones(4)
    with mock.patch.object(transport, "all_gather", return_value=Posted(False)) as posted:
        work = chained_gather.all_gather(out, values, group(4), Meter())
        (first,) = [call.args for call in posted.call_args_list]
        assert first[0].storage_offset() == 12 and first[0].numel() == 12, "its node's block"
        assert first[1] is values and first[2].size == 3
        assert work.wait() and work.wait()
        _, (whole, held, hop, _) = (call.args for call in posted.call_args_list)
        assert whole.numel() == 24 and hop.size == 2
        assert held.storage_offset() == 12 and held.numel() == 12, "what the first has brought"
    with mock.patch.object(transport, "all_gather") as plain:
        single = Group(group(0).process_group, 0, 3)
        assert chained_gather.all_gather(out, values, single, Meter()) is plain.return_value


@pytest.mark.parametrize("failing", [0, 1])
def test_a_hop_that_fails_is_raised_again_and_again(failing: int) -> None:
    """A rank is lost between two hops: no handle reports completion."""
    works = [Posted(index == failing) for index in range(2)]
    with mock.patch.object(transport, "all_gather", side_effect=works) as posted:

        def steps() -> Any:
            yield chained_gather.all_gather(torch.zeros(24), torch.ones(4), group(0), Meter())
            raise AssertionError("never decoded")

        handle = Handle(steps(), Meter(), True)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Connection closed"):
                handle.wait()
        assert posted.call_count == failing + 1 and not handle.is_completed()
