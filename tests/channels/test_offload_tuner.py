"""``"when": "auto"`` of offload: the variant of each step, and the decision from their times."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridcomp.autotune.verdicts import Decision
from hybridcomp.channels import Channels
from hybridcomp.channels.accounting.offload_tuner import (
    TIMED,
    TURNS,
    WARM_UP,
    OffloadTuner,
    is_pace,
)
from hybridcomp.config import CompressionConfig

CPU = torch.device("cpu")
BOTH = {"codec": "blockint", "bits": 8, "when": "auto"}
GRADIENTS = {**BOTH, "forward": "none"}


def pace_of(offload: dict[str, Any]) -> OffloadTuner:
    config = CompressionConfig.model_validate({"offload": offload})
    return OffloadTuner.of(config, config.policy())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Fake the clock; sums over ranks use one rank."""
    now = [0.0]
    monkeypatch.setattr(
        "hybridcomp.channels.accounting.offload_tuner.time.perf_counter", lambda: now[0]
    )
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: None)
    return now


def drive(
    found: OffloadTuner,
    clock: list[float],
    cost: Callable[[bool, bool], float],
    first: int,
    last: int,
) -> list[str]:
    """Run steps that take ``cost(parameters encoded, gradients encoded)`` seconds."""
    told = []
    for step in range(first, last):
        ways = found.encodes("forward", step, 0), found.encodes("backward", step, 0)
        clock[0] += cost(*ways)
        told += found.took(step, CPU, skipped=False)
    return told


def ways(found: OffloadTuner, step: int) -> tuple[bool, bool]:
    return found.encodes("forward", step, 0), found.encodes("backward", step, 0)


def test_always_encodes_and_times_nothing() -> None:
    found = pace_of({"codec": "blockint", "bits": 8})
    assert ways(found, 0) == ways(found, 999) == (True, True)
    assert found.took(0, CPU, skipped=False) == [] and found.state() == {}
    assert not found.is_native


def test_native_first_then_every_kind_in_turns() -> None:
    found = pace_of(BOTH)
    kinds = [ways(found, step) for step in range(found.length)]
    assert kinds[:WARM_UP] == [(False, False)] * WARM_UP
    turn = (
        [(False, False)] * (TIMED + 1)
        + [(False, True)] * (TIMED + 1)
        + [(True, True)] * (TIMED + 1)
    )
    assert kinds[WARM_UP:] == turn * TURNS
    one_way = pace_of(GRADIENTS)
    assert len(one_way.kinds) == 2 and not any(
        one_way.encodes("forward", step, 0) for step in range(one_way.length)
    )


@pytest.mark.parametrize(("costs", "expected", "todo"), [
    ((0.3, 0.2, 0.1), (True, True), "): compressed"),
    ((0.3, 0.1, 0.2), (False, True), "): only gradients compressed"),
    ((0.1, 0.2, 0.3), (False, False), '): native for this run; "when": "always" compresses'),
    ((0.1, 0.0995, 0.3), (False, False), "native for this run"),
])  # fmt: skip
def test_the_fastest_stays(
    clock: list[float], costs: tuple[float, ...], expected: tuple[bool, bool], todo: str
) -> None:
    found = pace_of(BOTH)
    table = dict(zip([(False, False), (False, True), (True, True)], costs, strict=True))
    told = drive(found, clock, lambda *way: table[way], 0, found.length + 3)
    assert len(told) == 1 and todo in told[0]
    assert f"{costs[0] * 1e3:.1f} ms natively" in told[0]
    assert ways(found, found.length) == ways(found, 10**6) == expected
    assert found.is_native == (expected == (False, False))


def test_the_first_step_of_a_turn_and_skipped_ones_do_not_count(clock: list[float]) -> None:
    """One-time costs of a change do not count for the variant."""
    found, before = pace_of(BOTH), None
    told = []
    for step in range(found.length):
        way = ways(found, step)
        clock[0] += 5.0 if way != before else (0.1 if any(way) else 0.2)
        skipped = step == 12
        clock[0] += 100.0 * skipped
        before = way
        told += found.took(step, CPU, skipped=skipped)
    assert found.medians == pytest.approx((0.2, 0.1, 0.1))
    assert len(found.seconds) == TURNS * 3 * TIMED - 1


def test_a_resumed_run_goes_on_as_the_first(clock: list[float]) -> None:
    """Resumes in the middle of a turn, and after the decision, which is logged again."""

    def cost(forward: bool, backward: bool) -> float:
        return 0.2 - 0.05 * backward - 0.05 * forward

    whole = pace_of(BOTH)
    drive(whole, clock, cost, 0, 11)
    resumed = pace_of(BOTH)
    assert resumed.restore(whole.state()) == []
    assert [ways(resumed, s) for s in range(26)] == [ways(whole, s) for s in range(26)]
    drive(resumed, clock, cost, 11, whole.length)
    assert resumed.medians == pytest.approx((0.2, 0.15, 0.1)) and ways(resumed, 50) == (True, True)
    third = pace_of(BOTH)
    (told,) = third.restore(resumed.state())
    assert "compressed, as measured in the run that is continued" in told
    assert ways(third, 50) == (True, True) and third.took(50, CPU, skipped=False) == []
    assert third.state() == resumed.state()
    assert all(is_pace(one.state()) for one in (whole, resumed, third, pace_of(BOTH)))
    other = pace_of(GRADIENTS)
    assert other.restore(resumed.state()) == [] and other.chosen is None


def test_start_step_comes_first() -> None:
    found = pace_of(BOTH)
    assert not found.encodes("backward", 0, 7) and found.begin == 7
    assert not found.encodes("backward", 7 + WARM_UP + TIMED, 7)
    assert found.encodes("backward", 7 + WARM_UP + TIMED + 1, 7)


def test_other_dimensions_compare_their_steps_afterwards(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile their steps would differ by offload's variants."""
    block = {"offload": BOTH, "dp": {"codec": "blockint", "when": "auto"}}
    channels, asked = Channels(CompressionConfig.model_validate(block)), []
    channels.verdicts.by_dimension["dp"] = Decision(True, 1, 1.0, 0.9)

    def compare(step: int, *rest: object) -> list[str]:
        asked.append(step)
        return []

    monkeypatch.setattr(channels.verdicts, "compare", compare)
    found = channels.host.pace
    for step in range(found.length + 2):
        ways(found, step)
        clock[0] += 0.1
        found.took(step, CPU, skipped=False)
        channels.step = step + 1
        channels.close_step(False, CPU)
    assert asked == [found.length, found.length + 1, found.length + 2]


def test_no_time_at_all_stays_native(clock: list[float]) -> None:
    """Every step overflowed, so there are no times."""
    found = pace_of(BOTH)
    for step in range(found.length):
        ways(found, step)
        told = found.took(step, CPU, skipped=True)
    assert found.chosen == 0 and math.inf in found.medians and told


def test_a_state_of_another_form_is_refused() -> None:
    kinds = [[], ["backward"]]
    sound = {"kinds": kinds, "begin": 3, "seconds": {2: 0.1}, "chosen": 1, "medians": [0.2, 0.1]}
    assert is_pace(sound) and is_pace(sound | {"chosen": None, "medians": []})
    for key, bad in (
        ("begin", None), ("seconds", [0.1]), ("seconds", {2: "0.1"}), ("chosen", 2),
        ("medians", [None]), ("of_later", 1),
    ):  # fmt: skip
        assert not is_pace(sound | {key: bad}), key
    assert not is_pace([]) and not is_pace({"kinds": kinds})
