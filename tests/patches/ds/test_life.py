"""Destroyed and dropped engines leave no state of hybridcomp behind."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridcomp.channels import Channels, channels_of
from hybridcomp.patches.ds.step_ends import LATE, at_the_end, make_step
from tests.ranks import run_ranks
from tests.training.trainer import Job, make_engine, train_step

BLOCK: dict[str, Any] = {
    "dp": {"codec": "blockint", "bits": 4, "error_feedback": True},
    "min_bytes": 0,
    "ledger": {"every": 1},
}
RUNS = 2


def sweep(stages: tuple[int, ...], folder: Path) -> dict[int, tuple[list[bool], int, list[float]]]:
    """Return by stage whether engines are freed, remaining channels, residuals when destroyed."""
    found = {}
    for stage in stages:
        gone, norms = [], []
        for number in range(RUNS):
            ledger = {"every": 1, "jsonl": str(folder / f"{stage}_{number}.jsonl")}
            job = Job(stage=stage, block={**BLOCK, "ledger": ledger})
            engine = make_engine(job)
            train_step(engine, job, 0)
            channels = channels_of(engine)
            assert channels is not None and channels.residuals.norm() > 0
            engine.destroy()
            norms.append(channels.residuals.norm())
            known = weakref.ref(engine)
            del engine, channels
            gc.collect()
            gone.append(known() is None)
        gc.collect()  # engines held by DeepSpeed's hooks, which the first collection freed
        left = sum(issubclass(type(thing), Channels) for thing in gc.get_objects())
        found[stage] = (gone, left, norms)
    return found


def test_destroyed_engines_are_gone(tmp_path: Path) -> None:
    """At stage 3 DeepSpeed keeps its engine, with or without a block; residuals are freed."""
    for found in run_ranks(2, sweep, (1, 2, 3), tmp_path, timeout=600.0):
        for stage in (1, 2):
            assert found[stage] == ([True] * RUNS, 0, [0.0] * RUNS), stage
        assert found[3][2] == [0.0] * RUNS
    ledgers = [path.read_text().splitlines() for path in sorted(tmp_path.iterdir())]
    assert len(ledgers) == 3 * RUNS
    assert all('"summary": true' in lines[-1] for lines in ledgers)  # written when destroyed


def test_a_step_raises_the_error_that_came_first() -> None:
    """It may have closed the connections, which the step then says."""

    def fails() -> None:
        raise ValueError("cause")

    def step(engine: Any) -> None:
        at_the_end(engine, fails)
        raise RuntimeError("closed")

    engine = SimpleNamespace()
    with pytest.raises(ValueError, match="cause"):
        make_step(step)(engine)
    assert LATE not in vars(engine)
