"""Comparison of steps: which steps run encoded, and the decision from their times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
import torch.distributed as dist

from hybridcomp.autotune import recheck
from hybridcomp.autotune.recheck import CELLS, REHEARSED, Recheck, StepComparison, describe_finding
from hybridcomp.autotune.verdicts import Decision, Verdicts, are_decisions
from hybridcomp.dimensions import Dimension

CPU = torch.device("cpu")
NAMES: tuple[Dimension, ...] = ("dp", "zero", "tp")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run as the only rank."""
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    yield


def judged(
    names: tuple[Dimension, ...],
    saved: Mapping[str, float],
    late: Mapping[int, float],
    monkeypatch: pytest.MonkeyPatch,
    start: int = 0,
    pays: bool = False,
) -> tuple[dict[Dimension, StepComparison], Recheck]:
    """Compare steps: encoded ones save ``saved`` per dimension, and some are ``late``.

    ``pays``: whether all steps before are encoded. No step is timed before ``start``.
    """
    seconds = 0.0
    monkeypatch.setattr(recheck, "now", lambda: seconds)
    one = Recheck(names, 10)
    for step in range(10, 10 + REHEARSED + 2 * CELLS + 1):
        if step >= start:
            one.close(step, CPU)
        if step == one.stop:
            found = one.judge(dict.fromkeys(names, pays), CPU)
            if found is not None:
                return found, one
        seconds += 1.0 + late.get(step, 0.0)
        seconds -= sum(saved.get(name, 0.0) for name in names if one.coded(name, step))
    raise AssertionError("no end")


def test_every_combination_runs_in_a_round() -> None:
    one = Recheck(NAMES, 10)
    modes = [tuple(one.coded(name, step) for name in NAMES) for step in range(9, one.stop + 1)]
    assert modes[0] == modes[-1] == (None, None, None)
    assert modes[1:3] == [(False,) * 3, (True,) * 3]
    assert len(set(modes[3:-1])) == len(modes[3:-1]) == 8
    assert one.coded("pp", 12) is None and one.covers(10) and not one.covers(one.stop)


def test_each_dimension_is_judged_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    found, one = judged(NAMES, {"dp": 0.2, "zero": -0.2, "tp": 0.1}, {}, monkeypatch)
    assert {name: one.changes for name, one in found.items()} == {
        "dp": True, "zero": False, "tp": True,
    }  # fmt: skip
    assert one.rounds == 1
    assert found["dp"].native_s - found["dp"].coded_s == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("saved", "late", "changes", "rounds"),
    [
        (0.2, {}, True, 1),
        (0.01, {}, False, 1),
        (0.02, {}, False, 2),
        (0.2, {13: 60.0}, True, 2),  # an evaluation before an encoded step: its pair disagrees
        (-0.2, {12: 60.0}, False, 1),
        (0.2, {13: 60.0, 15: 60.0}, False, 1),  # half of the pairs: no change
    ],
)
def test_a_change_needs_pairs_that_agree(
    saved: float,
    late: Mapping[int, float],
    changes: bool,
    rounds: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, one = judged(("dp",), {"dp": saved}, late, monkeypatch)
    assert (found["dp"].changes, one.rounds) == (changes, rounds)


@pytest.mark.parametrize(
    ("saved", "late", "changes", "rounds"),
    [
        (-0.2, {}, True, 1),
        (-0.02, {}, True, 1),
        (-0.008, {}, False, 2),
        (-0.002, {}, False, 1),
        (0.2, {13: 60.0}, False, 1),
        # three of eight pairs disagree: the median says native, which it already was
        (-0.2, {12: 60.0, 20: 60.0, 22: 60.0}, True, 2),
    ],
)
def test_less_is_enough_to_go_back_to_native(
    saved: float,
    late: Mapping[int, float],
    changes: bool,
    rounds: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, one = judged(("dp",), {"dp": saved}, late, monkeypatch, pays=True)
    assert (found["dp"].changes, one.rounds) == (changes, rounds)


def test_a_step_that_was_skipped_is_timed_when_it_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loss scaler that skips a step under torch's engines leaves its number to the next step."""
    seconds = 0.0
    monkeypatch.setattr(recheck, "now", lambda: seconds)
    one = Recheck(("dp",), 0)
    one.open(2, CPU)
    seconds = 5.0
    one.reopen(2)
    one.open(2, CPU)
    seconds = 6.0
    one.close(3, CPU)
    assert one._seconds(2) == pytest.approx(1.0)


def test_a_continued_run_that_saw_half_a_round_takes_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, one = judged(("dp",), {"dp": 0.2}, {}, monkeypatch, start=15)
    assert found["dp"].changes and one.rounds == 2
    text = describe_finding("dp", found["dp"], True, one.stop)
    assert text == (
        "dp: steps took 1000.0 ms natively and 800.0 ms encoded, in turns "
        f"(compression.dp.when: auto): compressed from step {one.stop} on"
    )


def test_a_run_that_is_continued_in_the_second_round_stays_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The modes alternate as before, and error feedback keeps its residuals."""
    seconds = 0.0
    monkeypatch.setattr(recheck, "now", lambda: seconds)
    one = Verdicts()
    one.by_dimension["dp"] = Decision(False, 1 << 20, 0.1, 0.11)
    after = 10 + REHEARSED + CELLS  # the first step of a second round
    for step in range(10, after + 1):
        one.compare(step, (), CPU)
        seconds += 1.0 - (0.0 if one.native("dp", step) else 0.02)  # between staying and changing
    assert one.recheck is not None and one.recheck.rounds == 2
    again = Verdicts()
    again.by_dimension["dp"] = Decision(False, 1 << 20, 0.1, 0.11)
    state = one.state()
    assert are_decisions(state)
    again.restore(state)
    for step in range(after, after + CELLS):
        assert again.comparing(step) and not again.holds_nothing("dp", step)
        assert again.native("dp", step) == one.native("dp", step) == (step % 2 == 0)
        seconds += 1.0 - (0.0 if again.native("dp", step) else 0.02)
        again.compare(step + 1, (), CPU)
    assert again.by_dimension["dp"].checked and not again.may_compare
