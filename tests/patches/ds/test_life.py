"""Destroyed and dropped engines leave no state of hybridcomp behind."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hybridcomp.channels import Channels, channels_of
from hybridcomp.session import process
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


def said_of_the_other_block(blocks: list[Any]) -> list[str]:
    """Return what the log says of each process's block beside that of the engine's file."""
    with patch.object(process, "say_once") as say_once:
        for block in blocks:
            process.configure(block)
            make_engine(Job(stage=1, block=BLOCK)).destroy()
        process.configure(None)
    return [call.args[0] for call in say_once.call_args_list]


def test_a_block_beside_the_engine_s_own_does_nothing_and_says_so() -> None:
    (said, _) = run_ranks(2, said_of_the_other_block, [None, BLOCK, {"dp": "bf16"}])
    assert said == [
        "DeepSpeed's configuration has a block of its own: that of hybridcomp.install does "
        "nothing here"
    ]


def test_destroyed_engines_are_gone(tmp_path: Path) -> None:
    """At stage 3 DeepSpeed keeps its engine, with or without a block; residuals are freed."""
    for found in run_ranks(2, sweep, (1, 2, 3), tmp_path, timeout=600.0):
        for stage in (1, 2):
            assert found[stage] == ([True] * RUNS, 0, [0.0] * RUNS), stage
        assert found[3][2] == [0.0] * RUNS
    ledgers = [path.read_text().splitlines() for path in sorted(tmp_path.iterdir())]
    assert len(ledgers) == 3 * RUNS
    assert all('"summary": true' in lines[-1] for lines in ledgers)  # written when destroyed
