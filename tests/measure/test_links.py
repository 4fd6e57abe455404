"""Which messages a measurement of links leaves out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hybridcomp.measure.links import LONG_NBYTES, LONG_SHARE, PATIENCE, Key, _patience
from hybridcomp.measure.team import GroupShape
from hybridcomp.plan.machines.rows import Beside, Operation

ALL = GroupShape(4, 4, ((0, 1, 2, 3),))


@pytest.mark.parametrize(
    ("operation", "beside", "nbytes", "long"),
    [
        ("all_reduce", "alone", LONG_NBYTES, True),
        ("all_gather", "groups", LONG_NBYTES, True),
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
    assert _patience(nbytes, Key(operation, ALL, beside), 0.2, part) == pytest.approx(expected)


def test_a_large_allowance_counts_where_it_is_more() -> None:
    part: Any = SimpleNamespace(whole_s=10.0)
    assert _patience(LONG_NBYTES, Key("all_reduce", ALL, "alone"), 3.0, part) == 3.0 * PATIENCE
