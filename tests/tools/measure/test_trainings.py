"""Number of rounds of a measurement's small trainings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridcomp.collectives.topology import Nodes
from hybridcomp.tools.measure import trainings
from hybridcomp.tools.measure.team import Team
from hybridcomp.tools.measure.trainings import LEAST, LEAST_LONG, LONG_S, WARM


@pytest.mark.parametrize(
    ("step_s", "rounds"), [(LONG_S / 2, WARM + LEAST), (2 * LONG_S, WARM + LEAST_LONG)]
)
def test_steps_that_take_long_are_few(
    monkeypatch: pytest.MonkeyPatch, step_s: float, rounds: int
) -> None:
    """Without time left; before each round it prints how many are left."""
    now, steps, left = [0.0], [0, 0], []

    def step(number: int) -> None:
        now[0] += step_s
        steps[number] += 1

    def each(count: int) -> float:
        left.append(count)
        return 0.0

    monkeypatch.setattr(trainings, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(Team, "world_size", 1)
    jobs: Any = [SimpleNamespace(step=lambda number=number: step(number)) for number in range(2)]
    team = Team(torch.device("cpu"), Nodes([0], "the test"))
    part: Any = SimpleNamespace(each=each)
    trainings._rounds(team, None, part, jobs, SimpleNamespace(time=lambda clock: 0.0))  # type: ignore[arg-type]
    assert steps == [rounds, rounds]
    assert left == [*range(rounds - 1, 0, -1), 1]
