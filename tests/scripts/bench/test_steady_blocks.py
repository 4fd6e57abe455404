"""Blocks that last as long as the slowest was seen to, and are computed as always."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from bench.context_bench import steady
from hybridcomp.nn.context import blocks


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group(
        "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def computed(length: int) -> tuple[Tensor, Tensor]:
    values = torch.linspace(-1, 1, length * 4).view(1, 1, length, 4)
    return blocks.forward(values, values, values, blocks.Mask(causal=True), 0.5)


class Clock:
    """Stands in for ``time``: only blocks and sleeps take time, so figures are exact."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.mark.usefixtures("one_rank")
def test_a_block_lasts_as_long_as_it_was_seen_to(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, function = Clock(), blocks.forward
    taken = iter([2.0, 1.0, 4.0, 5.0])

    def timed(*args: Any) -> Any:
        clock.now += next(taken)
        return function(*args)

    plain = computed(8)
    monkeypatch.setattr(steady, "time", clock)
    monkeypatch.setattr(blocks, "forward", timed)
    with steady.SteadyBlocks() as own:
        own.learn()
        computed(8)  # 2 s: from now on a block is given 3 s, which is ``MARGIN`` times as long
        own.settle()
        begin = clock.now
        again = computed(8)  # 1 s
        assert (clock.slept, clock.now - begin) == ([2.0], 3.0)
        assert own.late_share() == 0.0
        computed(8)  # 4 s
        assert (clock.slept, clock.now - begin) == ([2.0, 0.0], 7.0)
        assert own.late_share() == 0.5
        computed(16)  # 5 s, and was never timed: it neither sleeps nor counts
        assert (clock.slept, own.late) == ([2.0, 0.0], [1, 2])
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert blocks.forward is timed


def test_the_slowest_rank_counts_but_not_every_outlier() -> None:
    assert steady.quantile([3.0, *[1.0] * 99]) == 1.0
    assert steady.quantile([2.0]) == 2.0
    found = steady.longest([{("a",): 1.0}, {("a",): 2.0, ("b",): 1.0}])
    assert found == {("a",): 2 * steady.MARGIN, ("b",): steady.MARGIN}
