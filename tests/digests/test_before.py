"""Checkpoints that version 0.1 wrote (``checkpoint_0_1``) are taken over, bit for bit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.digests.before import by_call, go_on
from tests.ranks import run_ranks

FOLDER = str(Path(__file__).with_name("checkpoint_0_1"))
#: what version 0.1 reduced in the two steps behind the checkpoint, on every rank
NEXT_STEPS = ["2ab2d24ac96d6882", "1e937b02f75c4571"]
NORMS = (6.159328430629894, 6.9792404199588685)


def test_the_run_goes_on_as_it_did() -> None:
    for (sums, norm), known in zip(run_ranks(2, go_on, FOLDER), NORMS, strict=True):
        assert sums == NEXT_STEPS
        assert norm == pytest.approx(known)


def test_another_loss_scale() -> None:
    for (sums, norm), known in zip(run_ranks(2, go_on, FOLDER, 2.0), NORMS, strict=True):
        assert sums == ["1b95417832147195", "5ad0726394699fc9"]
        assert norm == pytest.approx(known / 2)


def test_another_number_of_ranks_keeps_the_sum() -> None:
    found = run_ranks(4, go_on, FOLDER)
    for sums, _ in found:
        assert sums == ["51e46c6d5a33fb21", "7c37111f8cc83eb7"]
    # each value of the sum is held by one rank
    assert math.hypot(*(norm for _, norm in found)) == pytest.approx(9.403739034309103)


def test_a_job_that_loads_by_call() -> None:
    for (step, norm), known in zip(run_ranks(2, by_call, FOLDER), NORMS, strict=True):
        assert step == 3
        assert norm == pytest.approx(known)
