"""Messages that a measurement of links skips."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridcomp.collectives.topology import Nodes
from hybridcomp.tools.measure import links
from hybridcomp.tools.measure.clock import LEAST, LEAST_LONG, LONG_S, least_calls
from hybridcomp.tools.measure.links import LONG_NBYTES, LONG_SHARE, PATIENCE, Key, _patience, timed
from hybridcomp.tools.measure.team import GroupShape, Team
from hybridcomp.tools.plan.machines.rows import Beside, Operation
from tests.tools.measure.test_clock import Told

ALL = GroupShape(4, 4, ((0, 1, 2, 3),))


@pytest.mark.parametrize(
    ("operation", "beside", "nbytes", "long"),
    [
        ("all_reduce", "alone", LONG_NBYTES, True),
        ("all_gather", "groups", LONG_NBYTES, True),
        ("reduce_scatter", "groups", LONG_NBYTES, True),
        ("all_reduce", "alone", 4 * LONG_NBYTES, False),
        ("all_reduce", "compute", LONG_NBYTES, False),
        ("all_to_all", "alone", LONG_NBYTES, False),
    ],
)
def test_long_messages_of_gradients_may_take_a_share_of_the_whole(
    operation: Operation, beside: Beside, nbytes: int, long: bool
) -> None:
    part: Any = SimpleNamespace(whole_s=40.0)
    expected = LONG_SHARE * 40.0 if long else PATIENCE * 0.2
    key = Key(operation, ALL, beside)
    assert _patience(nbytes, key, 0.2, part) == pytest.approx(expected)
    assert _patience(nbytes, key, 30.0, part) == 30.0 * PATIENCE, "a large allowance counts"


@pytest.mark.parametrize(
    ("seconds", "calls"), [(2 * LONG_S, 1 + LEAST_LONG), (LONG_S / 2, 2 + LEAST)]
)
def test_calls_that_take_long_are_few(seconds: float, calls: int) -> None:
    """Without time left, a case makes ``least_calls`` calls."""
    assert least_calls(seconds) == calls
    team = Team(torch.device("cpu"), Nodes([0], "the test"))
    key = Key("all_reduce", GroupShape(1, 1, ((0,),), (0,)), "alone")
    alone, in_turns = Told(seconds), Told(seconds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Team, "world_size", 1)
        found = timed(team, alone, lambda: None, key, 0.0, (lambda: None, 1.0))
        runs = {"one": lambda: None, "two": lambda: None}
        turns = links.in_turns(team, in_turns, [*runs], runs, 0.0)
    assert alone.calls == calls and found.seconds.value == seconds
    assert in_turns.calls == calls * len(runs) and turns["two"].value == seconds
