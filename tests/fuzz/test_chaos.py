"""Ranks that are killed, stopped and restarted; disks that are full: a few fixed cases.

Under torchrun's agent; ``scripts/chaos.py`` has a hundred, also under the launchers themselves.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

from fuzzing import jobs, strikes
from tests.selection import by_day

#: the job's own limits say what hung; this one only ends what they do not
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * strikes.START_S)]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServerContext]:
    yield jobs.server()


@pytest.mark.parametrize(
    "kind",
    by_day(["kill", "restart", "block", "full checkpoint", "full ledger"], ["kill", "block"]),
)
def test_a_struck_job_ends_as_it_must(kind: str, tmp_path: Path, server: ForkServerContext) -> None:
    strike = strikes.KINDS[kind][1](random.Random(3), tmp_path)
    strike.settings["ranks"] = 2
    strike.rank = min(strike.rank, 1)
    outcome = strikes.run(strike, tmp_path / "job", context=server)
    assert outcome.problems == [], outcome.text
