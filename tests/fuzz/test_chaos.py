"""Killed, stopped and restarted ranks, and full disks: a few fixed cases.

They run under torchrun's agent; ``scripts/chaos.py`` has a hundred, also with the launchers.
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

#: the job's own timeouts report hangs; this one ends everything else
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
