"""The pool over gloo on a CPU, which tests the ranks' setup before it reaches a GPU."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from tests.nccl.pool import NcclPool


@pytest.mark.nightly
def test_a_pool_runs_says_who_failed_and_starts_anew() -> None:
    with NcclPool(2, per_node=2, device="cpu") as pool:
        assert pool.run(_where, timeout=240) == [(0, 2, "gloo", "0"), (1, 2, "gloo", "0")]
        with pytest.raises(AssertionError, match=r"rank 1 of 2:\n(.*\n)*ZeroDivisionError"):
            pool.run(_fails, timeout=240)
        assert pool.run(_where, timeout=240)[1][0] == 1  # on new ranks


def _where() -> tuple[int, int, str, str]:
    return dist.get_rank(), dist.get_world_size(), dist.get_backend(), os.environ["CROSS_RANK"]


def _fails() -> None:
    _ = 1 // (1 - dist.get_rank())
