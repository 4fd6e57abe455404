"""Blocks that last as long as the slowest was seen to, and are computed as always."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

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
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def computed(length: int) -> tuple[Tensor, Tensor]:
    values = torch.linspace(-1, 1, length * 4).view(1, 1, length, 4)
    return blocks.forward(values, values, values, blocks.Mask(causal=True), 0.5)


@pytest.mark.usefixtures("one_rank")
def test_a_block_lasts_as_long_as_it_was_seen_to(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, function = computed(8), blocks.forward
    slept: list[float] = []
    with steady.SteadyBlocks() as own:
        own.learn()
        computed(8)
        (seen,) = (times[0] for times in own._seen.values())
        own.settle()
        monkeypatch.setattr(steady.time, "sleep", slept.append)
        start = time.monotonic()
        again = computed(8)
        took = time.monotonic() - start
        computed(16)  # was never timed
        assert own.late_share() in (0.0, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert own.late[1] == 1 and len(slept) == 1
    assert slept[0] <= steady.MARGIN * seen and slept[0] + took >= steady.MARGIN * seen
    assert blocks.forward is function


def test_the_slowest_rank_counts_but_not_every_outlier() -> None:
    assert steady.quantile([3.0, *[1.0] * 99]) == 1.0
    assert steady.quantile([2.0]) == 2.0
    found = steady.longest([{("a",): 1.0}, {("a",): 2.0, ("b",): 1.0}])
    assert found == {("a",): 2 * steady.MARGIN, ("b",): steady.MARGIN}
