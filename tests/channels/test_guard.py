"""Decisions of the guard on one rank; with ranks and trainings: tests/patches/ds/test_guard.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hybridcomp.channels.accounting.guard import Guard, are_trips
from hybridcomp.config import CompressionConfig, describe
from hybridcomp.config.policy import Limits
from hybridcomp.errors import ConfigError

BLOCKINT = {"codec": "blockint", "bits": 4}


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Guard:
    """Return a guard of one rank, whose samples are the job's."""
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, group=None: None)
    return Guard({"dp": Limits(0.5, 10.0), "pp": Limits(0.5, None)})


@pytest.mark.parametrize(
    ("sample", "figure"),
    [
        ((0.24, 1.0, 99.0), None),
        ((0.26, 1.0, 0.0), "error"),
        ((0.0, 1.0, 101.0), "residual"),
        ((math.inf, 1.0, 0.0), "error"),  # finite values decoded to Inf or NaN
        ((0.0, 1.0, math.nan), "residual"),
        ((0.26e-50, 1e-50, 0.0), "error"),  # squares beyond the range of fp32
        ((0.24e50, 1e50, 0.0), None),
        ((9.0, 0.0, 9.0), None),  # no values: nothing was sampled, or a step without gradients
    ],
)
def test_limits(guard: Guard, sample: tuple[float, float, float], figure: str | None) -> None:
    guard.sample(("dp", "forward"), *sample)
    assert guard.decide(7, torch.device("cpu")) == (["dp"] if figure else [])
    if figure:
        trip = guard.trips["dp"]
        assert (trip.step, trip.figure) == (7, figure)
        assert guard.native("dp", 7) and not guard.native("dp", 6)
        assert trip.describe("dp").startswith("dp: ") and "rest of the run" in trip.describe("dp")
    assert not guard.native("pp", 7)


def test_samples_add_up_and_start_anew(guard: Guard) -> None:
    cpu = torch.device("cpu")
    guard.sample(("pp", "backward"), 0.3, 1.0, 0.0)
    guard.sample(("pp", "backward"), 0.1, 1.0, 0.0)  # sqrt(0.4 / 2) = 0.45
    assert guard.decide(1, cpu) == []
    guard.sample(("pp", "backward"), 0.3, 1.0, 0.0)
    assert guard.decide(2, cpu) == ["pp"], "either direction, and only what came since"
    guard.sample(("pp", "forward"), 0.9, 1.0, 0.0)
    assert guard.decide(3, cpu) == [] and guard.trips["pp"].step == 2, "once"
    assert guard.watching
    guard.sample(("dp", "forward"), 0.9, 1.0, 0.0)
    guard.decide(4, cpu)
    assert not guard.watching


def test_state_survives(guard: Guard) -> None:
    guard.sample(("dp", "forward"), 0.9, 1.0, 0.0)
    guard.decide(4, torch.device("cpu"))
    other = Guard({"dp": Limits(0.5, None)})
    assert other.restore(guard.state()) == ["dp"] and other.trips == guard.trips
    assert other.restore(guard.state()) == [], "said once"


def limits(block: dict[str, Any]) -> dict[str, Any]:
    return {n: (v.error, v.residual) for n, v in CompressionConfig.parse(block).limits().items()}


def test_defaults_watch_what_is_lossy() -> None:
    feedback = {**BLOCKINT, "error_feedback": True}
    assert limits({"dp": feedback, "pp": "mpc", "tp": BLOCKINT}) == {
        "dp": (1.0, 20.0),
        "tp": (1.0, None),
    }
    assert limits({"dp": {**BLOCKINT, "guard": {"error": 0.5}}}) == {"dp": (0.5, None)}
    assert limits({"dp": {**feedback, "guard": {"error": None}}}) == {"dp": (None, 20.0)}
    assert limits({"dp": {**feedback, "guard": "none"}}) == {}
    assert limits({"dp": feedback, "ledger": {"sample_every": 0}}) == {}
    kept = {"error_feedback": True, "guard": {"residual": 3.0}}
    assert limits({"preset": "recommended", "dp": kept})["dp"] == (1.0, 3.0)


def test_ranks_agree_on_the_limits() -> None:
    one, other = (
        CompressionConfig.parse({"dp": {**BLOCKINT, "guard": {"error": e}}}) for e in (0.5, 0.6)
    )
    assert one.digest() != other.digest()
    assert any("guard" in line and "dp error 0.5" in line for line in describe(one))
    sampled = CompressionConfig.parse({"dp": BLOCKINT, "ledger": {"sample_every": 5}})
    assert sampled.digest() != CompressionConfig.parse({"dp": BLOCKINT}).digest()


@pytest.mark.parametrize(
    ("block", "key", "fragment"),
    [
        ({"dp": {"codec": "mpc", "guard": {"error": 1}}}, "compression.dp.guard", "loses nothing"),
        ({"dp": {**BLOCKINT, "guard": {"residual": 3.0}}}, "compression.dp.guard.residual", "only"),
        ({"pp": {**BLOCKINT, "guard": {"residual": 3.0}}}, "compression.pp.guard.residual", "only"),
        ({"dp": {**BLOCKINT, "guard": {"error": 0}}}, "compression.dp.guard.error", "greater"),
        ({"dp": {**BLOCKINT, "guard": {"eror": 1}}}, "compression.dp.guard.eror", "'error'"),
        ({"dp": {**BLOCKINT, "guard": False}}, "compression.dp.guard", "expected limits"),
        (
            {"dp": {**BLOCKINT, "guard": {"error": 0.5}}, "ledger": {"sample_every": 0}},
            "compression.ledger.sample_every",
            "dp.guard looks at samples",
        ),
    ],
)
def test_guards_that_cannot_act(block: dict[str, Any], key: str, fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CompressionConfig.parse(block)
    assert caught.value.key == key and fragment in str(caught.value)


TRIP = {"step": 3, "figure": "error", "found": math.inf, "limit": 0.5}


@pytest.mark.parametrize(
    "state",
    [
        "of another kind",
        {"dp": "not a trip"},
        {"dp": {"of_later": 1}},
        {"dp": TRIP | {"of_later": 1}},
        {"dp": TRIP | {"step": "3"}},
        {"dp": TRIP | {"step": -1}},
        {"dp": TRIP | {"figure": "residue"}},
        {"dp": TRIP | {"limit": None}},
    ],
)
def test_a_state_of_another_form_is_refused(state: object) -> None:
    assert not are_trips(state)
    assert are_trips({}) and are_trips({"dp": TRIP}) and are_trips({"later": {"of_later": 1}})
