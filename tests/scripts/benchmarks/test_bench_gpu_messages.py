"""Rows of bench_gpu.py that go through channels, on a fake GPU; device time."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks.gpu_bench import measure, messages, ours
from tests.selection import by_day
from tests.stand_ins.gpu.common import QUIET
from tests.stand_ins.gpu.machine import DEVICE
from tests.stand_ins.gpu.pretended import pretended


@QUIET
@pytest.mark.parametrize("name", by_day(["blockint 8", "blockint 4, rotate"], ["blockint 8"]))
@pytest.mark.parametrize("dtype", by_day([torch.float32, torch.bfloat16], [torch.float32]), ids=str)
def test_messages_wait_for_nothing(name: str, dtype: torch.dtype) -> None:
    """Host time of a message is then the time to submit it."""
    with torch.no_grad(), pretended(messages.RANKS, messages.ME) as gpu:
        values = torch.zeros(1 << 16, dtype=dtype, device=DEVICE)
        with messages.group_without_wire():
            kinds = messages.Messages(ours.codecs()[name], values).kinds()
            for run in kinds.values():
                run()
                run()
        assert len(kinds) == 6 and not gpu.waits


def test_groups_without_a_wire_leave_nothing_behind() -> None:
    """A run creates 120 groups, each of which would prefix every line of an error."""
    before = sys.excepthook
    for _ in range(2):
        with messages.group_without_wire():
            assert torch.distributed.get_world_size() == messages.RANKS
    assert sys.excepthook is before and not torch.distributed.is_initialized()


def test_the_device_is_busy_until_the_host_has_queued_what_is_timed() -> None:
    """A collective takes a host longer than a flush takes a GPU; some peers wait for the GPU."""
    assert [measure.flushes(host * 1e-6, 90e-6) for host in (5, 50, 130, 10**6)] == [1, 1, 3, 16]
