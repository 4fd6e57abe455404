"""A run resumed from a checkpoint sums the same bits as an uninterrupted one."""

from __future__ import annotations

import math

import pytest

from tests.digests.resumed import by_call, go_on, write
from tests.ranks import run_ranks

#: digests of the two steps after the checkpoint, on every rank
NEXT_STEPS = ["2ab2d24ac96d6882", "1e937b02f75c4571"]
NORMS = (6.159328430629894, 6.9792404199588685)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder that two ranks saved after three steps; their next two are ``NEXT_STEPS``."""
    found = str(tmp_path_factory.mktemp("checkpoint"))
    assert run_ranks(2, write, found) == [NEXT_STEPS, NEXT_STEPS]
    return found


def test_the_run_goes_on_as_it_did(folder: str) -> None:
    for (sums, norm), known in zip(run_ranks(2, go_on, folder), NORMS, strict=True):
        assert sums == NEXT_STEPS
        assert norm == pytest.approx(known)


def test_another_loss_scale(folder: str) -> None:
    for (sums, norm), known in zip(run_ranks(2, go_on, folder, 2.0), NORMS, strict=True):
        assert sums == ["1b95417832147195", "5ad0726394699fc9"]
        assert norm == pytest.approx(known / 2)


def test_another_number_of_ranks_keeps_the_sum(folder: str) -> None:
    found = run_ranks(4, go_on, folder)
    for sums, _ in found:
        assert sums == ["51e46c6d5a33fb21", "7c37111f8cc83eb7"]
    # each value of the sum is held by one rank
    assert math.hypot(*(norm for _, norm in found)) == pytest.approx(9.403739034309103)


def test_a_job_that_loads_by_call(folder: str) -> None:
    for (step, norm), known in zip(run_ranks(2, by_call, folder), NORMS, strict=True):
        assert step == 3
        assert norm == pytest.approx(known)
