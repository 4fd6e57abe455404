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
    early: bool = False,
) -> tuple[dict[Dimension, StepComparison], Recheck]:
    """Compare steps: encoded ones save ``saved`` per dimension, and some are ``late``.

    ``pays``: whether all steps before are encoded. No step is timed before ``start``. ``early``:
    the comparison may end before its round.
    """
    seconds = 0.0
    monkeypatch.setattr(recheck, "now", lambda: seconds)
    comparison = Recheck(names, 10)
    for step in range(10, 10 + REHEARSED + 2 * CELLS + 1):
        if step >= start:
            comparison.close(step, CPU)
        if early:
            comparison.end_early(step, dict.fromkeys(names, pays), CPU)
        if step == comparison.stop:
            findings = comparison.judge(dict.fromkeys(names, pays), CPU)
            if findings is not None:
                return findings, comparison
        seconds += 1.0 + late.get(step, 0.0)
        seconds -= sum(saved.get(name, 0.0) for name in names if comparison.coded(name, step))
    raise AssertionError("no end")


def test_every_combination_runs_in_a_round() -> None:
    comparison = Recheck(NAMES, 10)
    steps = range(9, comparison.stop + 1)
    modes = [tuple(comparison.coded(name, step) for name in NAMES) for step in steps]
    assert modes[0] == modes[-1] == (None, None, None)
    assert modes[1:3] == [(False,) * 3, (True,) * 3]
    assert len(set(modes[3:-1])) == len(modes[3:-1]) == 8
    assert comparison.coded("pp", 12) is None
    assert comparison.covers(10) and not comparison.covers(comparison.stop)


def test_each_dimension_is_judged_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    findings, comparison = judged(NAMES, {"dp": 0.2, "zero": -0.2, "tp": 0.1}, {}, monkeypatch)
    assert {name: finding.changes for name, finding in findings.items()} == {
        "dp": True, "zero": False, "tp": True,
    }  # fmt: skip
    assert comparison.rounds == 1
    assert findings["dp"].native_s - findings["dp"].coded_s == pytest.approx(0.2)


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
    findings, comparison = judged(("dp",), {"dp": saved}, late, monkeypatch)
    assert (findings["dp"].changes, comparison.rounds) == (changes, rounds)


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
    findings, comparison = judged(("dp",), {"dp": saved}, late, monkeypatch, pays=True)
    assert (findings["dp"].changes, comparison.rounds) == (changes, rounds)


@pytest.mark.parametrize(
    ("saved", "pays", "pairs"),
    [(0.35, True, 1), (-0.5, False, 1), (0.18, True, 2), (0.02, True, CELLS // 2)],
)
def test_a_clear_loss_of_the_other_mode_ends_the_comparison_early(
    saved: float, pays: bool, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings, comparison = judged(("dp",), {"dp": saved}, {}, monkeypatch, pays=pays, early=True)
    assert comparison.stop == 10 + REHEARSED + 2 * pairs and not findings["dp"].changes


@pytest.mark.parametrize(
    ("pays", "coded_s", "close"),
    [(True, 0.012, False), (True, 0.013, True), (False, 0.19, True), (False, 0.2, False)],
)
def test_a_clear_trial_needs_no_steps(pays: bool, coded_s: float, close: bool) -> None:
    """Encoding must be eight times as fast alone, as computation hides the wire in a step."""
    assert Decision(pays, 1 << 20, 0.1, coded_s).is_close == close


def test_a_step_that_was_skipped_is_timed_when_it_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loss scaler that skips a step under torch's engines leaves its number to the next step."""
    seconds = 0.0
    monkeypatch.setattr(recheck, "now", lambda: seconds)
    comparison = Recheck(("dp",), 0)
    comparison.open(2, CPU)
    seconds = 5.0
    comparison.reopen(2)
    comparison.open(2, CPU)
    seconds = 6.0
    comparison.close(3, CPU)
    assert comparison._seconds(2) == pytest.approx(1.0)


def test_a_continued_run_that_saw_half_a_round_takes_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    findings, comparison = judged(("dp",), {"dp": 0.2}, {}, monkeypatch, start=15)
    assert findings["dp"].changes and comparison.rounds == 2
    text = describe_finding("dp", findings["dp"], True, comparison.stop)
    assert text == (
        "dp: steps took 1000.0 ms natively and 800.0 ms encoded, in turns "
        f"(compression.dp.when: auto): compressed from step {comparison.stop} on"
    )


def test_a_run_that_is_continued_in_the_second_round_stays_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The modes alternate as before, and error feedback keeps its residuals."""
    seconds = 0.0
    monkeypatch.setattr(recheck, "now", lambda: seconds)
    verdicts = Verdicts()
    verdicts.by_dimension["dp"] = Decision(False, 1 << 20, 0.1, 0.11)
    after = 10 + REHEARSED + CELLS  # the first step of a second round
    for step in range(10, after + 1):
        verdicts.compare(step, (), CPU)
        # between staying and changing
        seconds += 1.0 - (0.0 if verdicts.native("dp", step) else 0.02)
    assert verdicts.recheck is not None and verdicts.recheck.rounds == 2
    again = Verdicts()
    again.by_dimension["dp"] = Decision(False, 1 << 20, 0.1, 0.11)
    state = verdicts.state()
    assert are_decisions(state)
    again.restore(state)
    for step in range(after, after + CELLS):
        assert again.comparing(step) and not again.holds_nothing("dp", step)
        assert again.native("dp", step) == verdicts.native("dp", step) == (step % 2 == 0)
        seconds += 1.0 - (0.0 if again.native("dp", step) else 0.02)
        again.compare(step + 1, (), CPU)
    assert again.by_dimension["dp"].checked and not again.may_compare
