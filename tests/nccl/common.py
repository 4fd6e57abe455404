"""Trainings of the other tests over NCCL: which blocks, and each job only once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from tests.nccl.pool import NcclPool
from tests.stand_ins.cuda import begin

#: of every training that is compared bit for bit
STEPS = 20
#: HYBRIDCOMP_NCCL_DEVICE runs these tests where there is no GPU: "cpu" over gloo, "stand-in" on
#: devices and over an NCCL that stand in for those (``tests/stand_ins/cuda``)
ASKED = os.environ.get(begin.ASKED, "cuda")
DEVICE = "cuda" if ASKED == begin.STAND_IN else ASKED
#: of every module here that trains
MARKS = [
    pytest.mark.timeout(600),  # a fixture's ranks count for the test that comes first
    *([pytest.mark.gpu] if ASKED == "cuda" else []),
    pytest.mark.skipif(
        ASKED == "cuda" and not dist.is_nccl_available(), reason="this torch has no NCCL"
    ),
]

EIGHT_BITS: dict[str, Any] = {"codec": "blockint", "bits": 8}
FEEDBACK: dict[str, Any] = {"codec": "blockint", "bits": 4, "error_feedback": True}


def block(dimensions: str, codec: Any) -> dict[str, Any]:
    """A block with ``codec`` on each of the ``dimensions``, for messages of any size."""
    return {**dict.fromkeys(dimensions.split(), codec), "min_bytes": 0}


class Trainings:
    """Trains jobs on ranks that stay until one fails; a job that was trained is not trained again.

    ``run`` is the function of a trainer that takes a sequence of jobs.
    """

    def __init__(self, run: Callable[..., Any], world_size: int, *, per_node: int = 1) -> None:
        self._run = run
        self._pool = NcclPool(world_size, per_node=per_node, device=DEVICE)
        self._timeout = 60.0 + 30 * world_size
        self._known: dict[str, list[Any] | BaseException] = {}

    def __call__(self, job: Any) -> list[Any]:
        """What every rank saw. Raises AssertionError with the words of those that failed."""
        key = repr(job)
        if key not in self._known:
            try:
                ranks = self._pool.run(self._run, [job], timeout=self._timeout)
                self._known[key] = [found for (found,) in ranks]
            except (AssertionError, TimeoutError) as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, BaseException):
            raise found
        assert not (errors := [one for one in found if isinstance(one, str)]), errors
        return found

    def close(self) -> None:
        """End the ranks."""
        self._pool.close()


def with_block(job: Any, found: dict[str, Any] | None) -> Any:
    """``job`` with another block."""
    return replace(job, block=found)


def tail(ranks: Sequence[Any]) -> float:
    """Mean over ranks and the last five steps, of those that saw losses."""
    seen = [one.losses[-5:] for one in ranks if one.losses]
    return sum(map(sum, seen)) / sum(map(len, seen))
