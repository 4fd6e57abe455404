"""Counting steps: torch's optimizers, late, foreign and skipped ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.autotune import recheck
from hybridcomp.autotune.recheck import Recheck
from hybridcomp.errors import PublishError
from hybridcomp.patches.torch import step_detection, steps
from tests.patches.torch.trainer import Job, build, train
from tests.ranks import Trained
from tests.selection import by_day
from tests.stand_ins.link_clock import clock

QUIET: dict[str, Any] = {"min_bytes": 0, "ledger": {"every": 1_000_000}}
B8: dict[str, Any] = {"codec": "blockint", "bits": 8}
LATER = {"dp": B8, "start_step": 2, **QUIET}


class Foreign:
    """Gradient descent that does not use ``torch.optim.Optimizer``."""

    def __init__(self, model: nn.Module, in_place: bool, forgets: bool) -> None:
        self.parameters = list(model.parameters())
        self.in_place, self.forgets = in_place, forgets
        self.behind: Callable[[], object] = lambda: None

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.parameters:
            held: Any = parameter if self.in_place else parameter.data
            if parameter.grad is not None:
                held.add_(parameter.grad, alpha=-0.01)
        self.behind()

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            if self.forgets:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


@contextmanager
def heard() -> Iterator[list[str]]:
    """Return the messages about steps."""
    said: list[str] = []
    with patch.object(step_detection, "say", said.append):
        yield said


def foreign(engine: Any, in_place: bool, forgets: bool, counts: bool) -> dict[str, Any]:
    """Run a foreign optimizer, one or two micro-batches a step; return steps, codecs, messages."""
    found: dict[str, Any] = {}
    for micro_batches in (1, 2):
        job = Job(engine=engine, micro_batches=micro_batches, sync_last=False)
        model = build(job)
        attached = hybridcomp.attach(model, LATER)
        assert attached is not None
        optimizer = Foreign(model, in_place, forgets)
        if counts:
            optimizer.behind = attached.count_step
        with heard() as said:
            train(job, model, optimizer, 0, 5)
        entry = attached.channels.ledger.interval["dp", "forward"]
        encoded = entry.messages - entry.native
        found[f"{micro_batches}"] = (attached.step, encoded > 0, sorted(set(said)))
    return found


def alone(engine: Any) -> tuple[int, list[str], str]:
    """Run torch's optimizer with gradients that are never reduced."""
    model: Any = build(Job(engine=engine))
    attached = hybridcomp.attach(model, LATER)
    assert attached is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with patch("hybridcomp.patches.torch.attached.say") as say:
        for _ in range(2 * step_detection.PATIENCE):
            if engine == "fsdp2":
                model.set_requires_gradient_sync(False)
            with model.no_sync() if engine == "ddp" else nullcontext():
                torch.autograd.backward(model(torch.zeros(2, 6, dtype=torch.long)).square().mean())
            optimizer.step()
    said = [text for (text,), _ in say.call_args_list]
    return attached.step, said, attached.channels.tuner.idle_reason(0)


def late() -> list[Any]:
    """Use torch's optimizer, given the parameters later; and with accumulation."""
    job = Job(engine="ddp")
    model = build(job)
    attached = hybridcomp.attach(model, LATER)
    assert attached is not None
    other = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([other], lr=0.01)
    other.grad = torch.zeros(1)
    optimizer.step()  # has no parameters of the model yet
    optimizer.add_param_group({"params": list(model.parameters())})
    with heard() as said:
        train(Job(engine="ddp", micro_batches=10, sync_last=False), model, optimizer, 0, 3)
    return [attached.step, said]


def skipped(feedback: bool) -> tuple[float, int]:
    """Return seconds of a step whose first attempt a loss scaler skips, and steps taken."""
    auto = {"codec": "blockint", "bits": 4, "error_feedback": feedback, "when": "auto"}
    model = build(Job(engine="ddp"))
    with clock(0.02, 0.01):
        attached = hybridcomp.attach(model, {"dp": auto, **QUIET})
    assert attached is not None
    compared = attached.channels.verdicts.recheck = Recheck(("dp",), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    seconds = 0.0
    with patch.object(recheck, "now", lambda: seconds):
        for factor in (float("inf"), 1.0):
            seconds += 60.0  # other work
            loss = model(torch.zeros(2, 6, dtype=torch.long)).square().mean() * factor
            scaler.scale(loss).backward()
            seconds += 1.0
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        compared.close(1, torch.device("cpu"))
    steps.forget_all()
    return compared._seconds(0), attached.step


def failing() -> list[int]:
    """Fail once at the end of the first of two models' steps; return the steps counted of both."""
    models = [DistributedDataParallel(nn.Linear(4, 4)) for _ in range(2)]
    both = [hybridcomp.attach(model, LATER) for model in models]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.01)
    assert both[0] is not None
    full = patch.object(both[0].session, "end_step", side_effect=PublishError("no room"))
    for may_fail in (full, nullcontext()):
        models[1](models[0](torch.ones(2, 4))).sum().backward()
        with may_fail, suppress(PublishError):
            optimizer.step()
        optimizer.zero_grad()
    for model in models:
        hybridcomp.detach(model)
    return [attached.step for attached in both if attached is not None]


def by_method() -> list[int]:
    """Train by a method that calls no module; count a follower's calls around the step."""
    model: Any = nn.Linear(4, 4)
    model.loss = lambda values: nn.functional.linear(values, model.weight).sum()
    fully_shard(model)
    register_fsdp_forward_method(model, "loss")
    attached, seen = hybridcomp.attach(model, LATER), Mock()
    assert attached is not None
    attached.session.follow(seen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        model.loss(torch.ones(2, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    hybridcomp.detach(model)
    return [seen.before_step.call_count, seen.after_step.call_count]


#: how a foreign optimizer updates, whether it drops gradients, whether it reports steps
FOREIGN = {
    "in place": (True, False, False),
    "in place, forgets": (True, True, False),
    "by data, forgets": (False, True, False),
    "unseen": (False, False, False),
    "by hand": (False, False, True),
}
ENGINES = ("ddp", "fsdp2")


def run(cases: list[tuple[Any, ...]]) -> list[Any]:
    """Call one of the functions above."""
    return [globals()[name](*given) for name, *given in cases]


@pytest.fixture(scope="module")
def two() -> Iterator[Trained]:
    with Trained(2, run) as found:
        yield found


SEEN = [(engine, how) for engine in ENGINES for how in list(FOREIGN)[:3]]


@pytest.mark.parametrize(
    ("engine", "how"), by_day(SEEN, [("ddp", "in place, forgets"), ("fsdp2", "by data, forgets")])
)
def test_steps_of_a_foreign_optimizer_are_counted(engine: str, how: str, two: Trained) -> None:
    """Without reports they count one step late; no pass sees the last one."""
    for found in two(("foreign", engine, *FOREIGN[how])):
        for step, encoded, said in found.values():
            assert (step, encoded, said) == (4, True, [step_detection.COUNTED])


@pytest.mark.parametrize("engine", by_day(ENGINES, ["fsdp2"]))
def test_steps_that_nobody_can_see_are_told_or_counted_by_hand(engine: str, two: Trained) -> None:
    unseen, counted = (two(("foreign", engine, *FOREIGN[how])) for how in ("unseen", "by hand"))
    told = [step_detection.NOT_COUNTED.format(step_detection.PATIENCE)]
    assert unseen == [{"1": (0, False, []), "2": (0, False, told)}] * 2  # at first too few passes
    assert counted == [dict.fromkeys("12", (5, True, []))] * 2


@pytest.mark.parametrize("engine", by_day(ENGINES, ["fsdp2"]))
def test_steps_without_reduced_gradients_are_told(engine: str, two: Trained) -> None:
    """Ranks may take different numbers of them, so they cannot be counted."""
    for counted, said, reason in two(("alone", engine)):
        assert (counted, said) == (0, [step_detection.LOCAL])
        assert reason.startswith("no optimizer step was counted in the last ")


def test_an_optimizer_that_gets_the_parameters_later_is_followed(two: Trained) -> None:
    assert two(("late",)) == [[3, []]] * 2


def test_a_pass_that_calls_no_module_begins_a_step(two: Trained) -> None:
    assert two(("by_method",)) == [[2, 2]] * 2


def test_an_error_of_one_model_keeps_no_other_from_counting(two: Trained) -> None:
    assert two(("failing",)) == [[1, 2]] * 2


@pytest.mark.parametrize("feedback", by_day([False, True], [True]))
def test_a_skipped_step_adds_no_time_to_the_next_one(feedback: bool, two: Trained) -> None:
    assert two(("skipped", feedback)) == [(1.0, 1)] * 2
