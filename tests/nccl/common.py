"""The other tests' trainings over NCCL: their blocks, and each job run only once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from tests.nccl.pool import NcclPool
from tests.stand_ins.cuda import begin

#: steps of every training that is compared bit for bit
STEPS = 20
#: HYBRIDCOMP_NCCL_DEVICE runs these tests without a GPU: "cpu" over gloo, "stand-in" on fake
#: devices and NCCL (``tests/stand_ins/cuda``)
ASKED = os.environ.get(begin.ASKED, "cuda")
DEVICE = "cuda" if ASKED == begin.STAND_IN else ASKED
#: marks of every module here that trains
MARKS = [
    pytest.mark.timeout(600),  # a fixture's ranks count toward its first test
    *([pytest.mark.gpu] if ASKED == "cuda" else []),
    pytest.mark.skipif(
        ASKED == "cuda" and not dist.is_nccl_available(), reason="this torch has no NCCL"
    ),
]

EIGHT_BITS: dict[str, Any] = {"codec": "blockint", "bits": 8}
FEEDBACK: dict[str, Any] = {"codec": "blockint", "bits": 4, "error_feedback": True}


def block(dimensions: str, codec: Any) -> dict[str, Any]:
    """Return a block with ``codec`` on each of the ``dimensions``, for messages of any size."""
    return {**dict.fromkeys(dimensions.split(), codec), "min_bytes": 0}


class Trainings:
    """Trains jobs on persistent ranks, replaced after a failure; caches each job's result.

    ``run`` is a trainer's function that takes a sequence of jobs.
    """

    def __init__(self, run: Callable[..., Any], world_size: int, *, per_node: int = 1) -> None:
        self._run = run
        self._pool = NcclPool(world_size, per_node=per_node, device=DEVICE)
        self._timeout = 60.0 + 30 * world_size
        self._known: dict[str, list[Any] | BaseException] = {}

    def __call__(self, job: Any) -> list[Any]:
        """Return every rank's result. Raises AssertionError with the failing ranks' output."""
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

    def both(self, job: Any, found: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """Return the results of ``job``, and of ``job`` with the block ``found``."""
        return self(job), self(replace(job, block=found))

    def close(self) -> None:
        """End the ranks."""
        self._pool.close()


def trainings(run: Callable[..., Any], world_size: int, **more: Any) -> Any:
    """Return a module's fixture of ``Trainings``."""

    @pytest.fixture(scope="module")
    def made() -> Iterator[Trainings]:
        found = Trainings(run, world_size, **more)
        yield found
        found.close()

    return made


def assert_follows(base: Sequence[Any], found: Sequence[Any]) -> None:
    """Check that a lossy training is another one, whose loss is within 5 % of ``base``'s."""
    assert found[-1].losses != base[-1].losses
    assert tail(found) == pytest.approx(tail(base), rel=0.05)


def tail(ranks: Sequence[Any]) -> float:
    """Return the mean loss over the last five steps and the ranks with losses."""
    seen = [one.losses[-5:] for one in ranks if one.losses]
    return sum(map(sum, seen)) / sum(map(len, seen))
