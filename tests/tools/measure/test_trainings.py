"""Number of rounds of a measurement's small trainings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridcomp.collectives.topology import Nodes
from hybridcomp.tools.measure import trainings
from hybridcomp.tools.measure.team import Team
from hybridcomp.tools.measure.trainings import LEAST, LEAST_LONG, LONG_S, PATIENCE_S, WARM


@pytest.mark.parametrize(
    ("step_s", "rounds"),
    [(LONG_S / 2, WARM + LEAST), (2 * LONG_S, WARM + LEAST_LONG), (2 * PATIENCE_S, 0)],
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
    part: Any = SimpleNamespace(each=each, whole_s=LONG_S)
    alone: Any = SimpleNamespace(time=lambda clock: 0.0)
    assert trainings._rounds(team, None, part, jobs, alone) == bool(rounds)  # type: ignore[arg-type]
    if rounds:
        assert steps == [rounds, rounds] and left == [*range(rounds - 1, 0, -1), 1]
    else:
        assert steps == [1, 0], "it stops as soon as the first round takes too long"
