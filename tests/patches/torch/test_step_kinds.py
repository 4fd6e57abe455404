"""Each optimizer step counts once, in any mode of the module and any way of training."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import hybridcomp
from hybridcomp.autotune import recheck
from hybridcomp.patches.torch import step_detection
from hybridcomp.patches.torch.attached import Attached
from tests.patches.torch.trainer import BATCH, LENGTH, VOCABULARY, WIDTH, Job, build, syncing
from tests.ranks import Trained
from tests.selection import by_day
from tests.stand_ins.link_clock import clock
from tests.sync import torch_job

#: optimizer steps of every case, at least as many as the ramp's
STEPS = 6
#: cases that also test reports, versions and comparisons of steps
MANY = 11
QUIET: dict[str, Any] = {"min_bytes": 0, "ledger": {"every": 1_000_000}}
BLOCK: dict[str, Any] = {
    "dp": {"codec": "blockint", "bits": 4, "ramp": {"from": 8, "steps": 4}}, **QUIET,
}  # fmt: skip
Adam = torch.optim.AdamW


class Sharpness(torch.optim.Optimizer):
    """SAM: wraps another optimizer, with gradients at weights moved uphill."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base = Adam(self.param_groups, lr=1e-3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        moved = [(p, p.grad.clone()) for g in self.param_groups for p in g["params"]
                 if p.grad is not None]  # fmt: skip
        for parameter, uphill in moved:
            parameter.add_(uphill, alpha=0.01)
        with torch.enable_grad():
            self.base.zero_grad()
            closure()
        for parameter, uphill in moved:
            parameter.sub_(uphill, alpha=0.01)
        self.base.step()


class Unhooked(Adam):
    """An optimizer whose ``step``, assigned later, calls no hook of torch."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-3)
        inner = Adam.step.__wrapped__  # type: ignore[attr-defined]
        type(self).step = lambda self, closure=None: inner(self, closure)  # type: ignore[method-assign]


class Case:
    """A model under an engine, in eval mode, and the usual actions of most cases."""

    def __init__(self, engine: Any, attaches: bool = True, **changed: Any) -> None:
        self.job = Job(engine=engine, **changed)
        self.model: Any = build(self.job)
        self.optimizer: Any = Adam(self.model.parameters(), lr=1e-3)  # before it is attached
        if attaches:
            self.attach()
        self.model.eval()

    def attach(self) -> None:
        found = hybridcomp.attach(self.model, BLOCK)
        assert found is not None
        self.attached: Attached = found

    def use(self, make: Callable[..., Any], **given: Any) -> Any:
        """Replace the first optimizer by another."""
        del self.optimizer
        self.optimizer = make(self.model.parameters(), **given)
        return self.optimizer

    def loss(self, model: Any = None, **given: Any) -> Tensor:
        tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % VOCABULARY
        logits: Tensor = (model or self.model)(tokens, **given)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    def closure(self) -> Tensor:
        self.model.zero_grad()
        loss = self.loss()
        torch.autograd.backward(loss)
        return loss

    def step(self) -> None:
        self.closure()
        self.optimizer.step()

    def parts(self) -> tuple[list[Any], list[Any]]:
        """Split parameters between two optimizers."""
        every = list(self.model.parameters())
        return every[::2], every[1::2]


def plain(case: Case) -> None:
    for _ in range(STEPS):
        case.step()


def modes_change(case: Case) -> None:
    for number in range(STEPS):
        case.model.train(number % 3 > 0)
        case.step()


def validation_with_gradients(case: Case) -> None:
    """Run eval passes without backward, also between a backward pass and its step."""
    for _ in range(STEPS):
        case.model.train()
        case.closure()
        case.model.eval()
        case.loss()
        case.optimizer.step()
        case.loss()


def two_optimizers(case: Case) -> None:
    first, second = (Adam(part, lr=1e-3) for part in case.parts())
    for _ in range(STEPS):
        case.closure()
        first.step()
        case.loss()  # a validation in between
        second.step()


def optimizers_by_turns(case: Case) -> None:
    both = [Adam(part, lr=1e-3) for part in case.parts()]
    for number in range(STEPS):
        case.closure()
        both[number % 2].step()


def one_optimizer_each(case: Case) -> None:
    every = [torch.optim.SGD([p], lr=1e-3) for p in case.model.parameters()]
    for _ in range(STEPS):
        case.closure()
        for optimizer in every:
            optimizer.step()


def in_backward(case: Case) -> None:
    """Use an optimizer per parameter, which steps as soon as its gradient is ready."""
    recomputed(case.model)
    every = {p: torch.optim.SGD([p], lr=1e-3) for p in case.model.parameters()}
    seen: list[int] = []

    def hook(parameter: Tensor) -> None:
        every[parameter].step()
        seen.append(case.attached.step)
        parameter.grad = None

    for parameter in every:
        parameter.register_post_accumulate_grad_hook(hook)
    for number in range(STEPS):
        seen.clear()
        torch.autograd.backward(case.loss())
        assert set(seen) == {number}, "no step ends in the middle of a pass"


def recomputed(model: Any) -> None:
    """Activation checkpointing of the layers."""
    for layer in getattr(model, "module", model).layers:
        inner = layer.forward
        layer.forward = lambda values, inner=inner: checkpoint(inner, values, use_reentrant=False)


def checkpointed(case: Case) -> None:
    recomputed(case.model)
    plain(case)


def lbfgs(case: Case) -> None:
    optimizer = case.use(torch.optim.LBFGS, lr=1e-3, max_iter=4)
    for _ in range(STEPS):
        optimizer.step(case.closure)


def sharpness(case: Case) -> None:
    optimizer = case.use(Sharpness)
    for _ in range(STEPS):
        case.closure()
        optimizer.step(case.closure)


def skipped(case: Case) -> None:
    """A loss scaler skips every third step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(STEPS + STEPS // 2):
        case.optimizer.zero_grad()
        factor = float("inf") if number % 3 == 2 else 1.0
        torch.autograd.backward(scaler.scale(case.loss() * factor))
        scaler.step(case.optimizer)
        scaler.update()


def accumulated(case: Case, syncs: bool) -> None:
    for _ in range(STEPS):
        case.optimizer.zero_grad()
        for number in range(9):  # more than the patience with a foreign optimizer
            with syncing(case.job, case.model, syncs or number == 8):
                torch.autograd.backward(case.loss())
        case.optimizer.step()


def hidden(case: Case) -> None:
    """Hide the step: it is counted one pass later, with a message."""
    case.use(Unhooked)
    plain(case)
    case.loss()


def redundant(case: Case) -> None:
    """Wrap an optimizer in another, which sends the weights after the inner step."""
    optimizer = case.use(ZeroRedundancyOptimizer, optimizer_class=Adam, lr=1e-3)
    assert type(optimizer.optim) is Adam
    known: list[list[Tensor]] = []
    end = case.attached.session.end_step

    def ends() -> None:
        known.append([parameter.detach().clone() for parameter in case.model.parameters()])
        end()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(case.attached.session, "end_step", ends)
        for _ in range(STEPS):
            case.step()
            assert all(map(torch.equal, known.pop(), case.model.parameters())), "all are there"


def adapters(case: Case) -> None:
    """Freeze all but one layer."""
    inner = getattr(case.model, "module", case.model)
    trained = set(inner.extra.parameters())
    for parameter in case.model.parameters():
        parameter.requires_grad_(parameter in trained)
    case.use(lambda every, **given: Adam([p for p in every if p.requires_grad], **given), lr=1e-3)
    plain(case)


def penalized(case: Case) -> None:
    """Use a gradient penalty: a nested backward pass, which sends nothing."""
    for _ in range(STEPS):
        case.optimizer.zero_grad()
        soft = torch.zeros(BATCH, LENGTH, WIDTH, requires_grad=True)
        inner = getattr(case.model, "module", case.model)
        hook = inner.embedding.register_forward_hook(lambda _, __, out, soft=soft: out + soft)
        loss = case.loss()
        hook.remove()
        (slope,) = torch.autograd.grad(loss, soft, create_graph=True)
        torch.autograd.backward(loss + slope.square().sum())
        case.optimizer.step()


def adversaries(case: Case) -> None:
    """Train two models, one on gradients through the other, stepping half as often."""
    other = Case(case.job.engine)
    for number in range(STEPS):
        other.model.zero_grad()
        case.model.zero_grad()
        torch.autograd.backward(case.loss() + other.loss())
        case.optimizer.step()
        if number % 2:
            other.step()
    assert other.attached.step == STEPS // 2
    hybridcomp.detach(other.model)


def compiled(case: Case) -> None:
    case.model = torch.compile(case.model, backend="eager")
    plain(case)


def compiled_long_before(case: Case) -> None:
    """Attach after a pass has been compiled."""
    case.attached.detach()
    case.model = torch.compile(case.model, backend="eager")
    case.step()
    case.attach()
    plain(case)


def compiled_step(case: Case) -> None:
    step: Any = torch.compile(case.optimizer.step, backend="eager")
    for _ in range(STEPS):
        case.closure()
        step()


class Around(nn.Module):
    """A user's module around the model under DDP or ``fully_shard``."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Any:
        return self.inner(tokens)


#: objects that a user may hold instead of the model: name -> how to make it
HANDLES: dict[str, Callable[[Any], Any]] = {
    "model": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "around": lambda model: Around(model).eval(),
    "around compiled": lambda model: Around(torch.compile(model, backend="eager")).eval(),
    "compiled around": lambda model: torch.compile(Around(model).eval(), backend="eager"),
}


def held(case: Case, how: str, called: bool = True) -> None:
    """Attach by the outer object, which is also called unless ``called`` is."""
    case.attached.detach()
    model, case.model = case.model, HANDLES[how](case.model)
    case.attach()
    if not called:
        case.model = model
    plain(case)


#: case -> its function, and its engines unless both
CASES: dict[str, tuple[Callable[[Case], None], tuple[str, ...]]] = {
    "eval": (plain, ()),
    "modes change": (modes_change, ()),
    "validation with gradients": (validation_with_gradients, ()),
    "two optimizers": (two_optimizers, ()),
    "optimizers by turns": (optimizers_by_turns, ()),
    "one optimizer each": (one_optimizer_each, ()),
    "in backward, recomputed": (in_backward, ("fsdp2",)),
    "recomputed": (checkpointed, ()),
    "LBFGS": (lbfgs, ("ddp",)),
    "SAM": (sharpness, ()),
    "skipped": (skipped, ()),
    "accumulated": (lambda case: accumulated(case, False), ()),
    "accumulated, all reduced": (lambda case: accumulated(case, True), ()),
    "hidden": (hidden, ()),
    "redundant": (redundant, ("ddp",)),
    "adapters": (adapters, ("fsdp2",)),
    "gradient penalty": (penalized, ("ddp",)),  # FSDP2 frees what it needs
    "adversaries": (adversaries, ()),
    "compiled": (compiled, ()),
    "compiled long before": (compiled_long_before, ()),
    "compiled step": (compiled_step, ()),
    **{
        f"compiled, {how}": (lambda case, how=how: held(case, how), ())  # type: ignore[misc]
        for how in HANDLES
        if how.startswith(("around", "compiled "))
    },
    "around, model called": (lambda case: held(case, "around", False), ()),
}
ENGINES = ("ddp", "fsdp2")
NAMES = [f"{engine}, {name}" for name, (_, some) in CASES.items() for engine in some or ENGINES]


#: by day each way of training under an engine, both where the engines detect its steps differently
DAY = [
    *(f"{engine}, {name}" for engine in ENGINES for name in (
        "validation with gradients", "two optimizers", "accumulated", "hidden",
    )),
    *(f"ddp, {name}" for name in (
        "modes change", "optimizers by turns", "LBFGS", "SAM", "skipped", "redundant",
        "gradient penalty", "adversaries", "compiled",
    )),
    *(f"fsdp2, {name}" for name in (
        "one optimizer each", "in backward, recomputed", "adapters",
    )),
]  # fmt: skip


def run(names: list[str]) -> list[tuple[int, str, list[str]]]:
    """Run cases; return steps, later codecs, messages."""
    return [counted(*one.split(", ", 1)) for one in names]


def counted(engine: str, name: str) -> tuple[int, str, list[str]]:
    torch._dynamo.reset()
    case = Case(engine, bucket_mb=25 if name.startswith("compiled") else 0.004)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        for module in ("attached", "step_detection"):
            patched.setattr(f"hybridcomp.patches.torch.{module}.say", said.append)
        CASES[name][0](case)
    codec = case.attached.channels["dp"].choose(4096, torch.float32, 2, "forward")
    assert codec is not None
    found = case.attached.step, codec.spec, sorted(set(said))
    case.attached.detach()
    return found


@pytest.fixture(scope="module")
def two() -> Iterator[Trained]:
    with Trained(2, run) as found:
        yield found


@pytest.mark.parametrize("name", by_day(NAMES, DAY))
def test_every_step_is_counted_once(name: str, two: Trained) -> None:
    told = [step_detection.COUNTED] if "hidden" in name else []
    assert two(name) == [(STEPS, "blockint(bits=4)", told)] * 2


def acting(engine: str, trains: bool, folder: Path) -> dict[str, Any]:
    """Return effects of steps: reports, a ramp, the first encoded step, versions, decisions."""
    block: dict[str, Any] = {
        **BLOCK, "start_step": 3,
        "publish": {"to": folder.as_uri(), "every": 1, "dtype": "bf16", "wait": True},
        "ledger": {"every": 5, "jsonl": f"{folder}.jsonl"},
    }  # fmt: skip
    block["dp"] = {**block["dp"], "when": "auto"}
    case = Case(engine, attaches=False)
    case.model.train(trains)
    with clock(0.011, 0.010):  # close, so that steps are compared
        attached = hybridcomp.attach(case.model, block)
    assert attached is not None
    encoded, seconds = [], count()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recheck, "now", lambda: float(next(seconds)))
        for _ in range(MANY):
            entry = attached.channels.ledger.interval["dp", "forward"]
            before = entry.messages - entry.native
            case.closure()
            encoded.append(entry.messages - entry.native > before)
            case.optimizer.step()
    compared = attached.channels.verdicts.recheck
    assert compared is not None
    timed = sorted(compared._starts)
    attached.detach()
    dist.barrier()
    reports = Path(f"{folder}.jsonl").read_text().splitlines()
    steps = [json.loads(line).get("step") for line in reports]
    files = sorted(re.sub(r"[0-9a-f]{8,}", "*", found.name) for found in folder.rglob("*"))
    return {"step": attached.step, "encoded": encoded, "timed": timed, "reports": steps,
            "files": files}  # fmt: skip


def meeting(engine: str, trains: bool) -> tuple[int, int]:
    """Run steps, and meetings of two single-rank islands."""
    block = {"sync": {"islands": 1, "every": 2}, **QUIET}
    job = torch_job.Job(block, engine).build()
    job.model.train(trains)
    job.train(MANY)
    attached = job.attached
    assert attached is not None
    found = attached.step, job.meetings._figures.meetings
    attached.detach()
    return found


def both_modes(engine: str, folder: Path) -> list[Any]:
    return [
        (acting(engine, trains, folder / f"{trains}"), meeting(engine, trains))
        for trains in (True, False)
    ]


@pytest.mark.parametrize("engine", by_day(ENGINES, ["fsdp2"]))
def test_what_follows_from_steps_is_alike_in_both_modes(
    engine: str, two: Trained, tmp_path: Path
) -> None:
    """Reports, ramp, start_step, versions, comparison of steps, meetings of islands."""
    for trained, evaluated in two.pool.run(both_modes, engine, tmp_path):
        assert evaluated == trained
        acts, (steps, meetings) = evaluated
        assert (acts["step"], steps, meetings) == (MANY, MANY, MANY // 2)
        assert not any(acts["encoded"][:3]) and any(acts["encoded"])
        assert {5, 10} <= set(acts["reports"]) and acts["timed"]
        assert len(acts["files"]) >= MANY


def by_handle(engine: str, how: str, folder: Path) -> tuple[bool, int, int, bool]:
    """Use a handle of a model in eval mode for state, steps, a new generation and versions."""
    torch._dynamo.reset()
    case = Case(engine, bucket_mb=25)
    model, case.model = case.model, HANDLES[how](case.model)
    generation = case.attached.channels.generation
    publisher = hybridcomp.publish(case.model, folder, dtype="bf16")
    receiver = hybridcomp.WeightReceiver(folder)
    for _ in range(3):
        case.step()
        publisher.publish()
        receiver.update()
    hybridcomp.resync(case.model)
    weights = {name: weight.full_tensor() if isinstance(weight, DTensor) else weight
               for name, weight in model.named_parameters()}  # fmt: skip
    expected = {name.removeprefix("module."): weight.detach().to(torch.bfloat16)
                for name, weight in weights.items()}  # fmt: skip
    sent = dict(receiver.tensors())
    found = (
        hybridcomp.stateful(case.model) is hybridcomp.stateful(model) is case.attached,
        case.attached.step, case.attached.channels.generation - generation,
        sent.keys() == expected.keys()
        and all(torch.equal(sent[name].view_as(w), w) for name, w in expected.items()),
    )  # fmt: skip
    dist.barrier()
    publisher.close()
    hybridcomp.detach(case.model)
    return found


HELD = [(engine, how) for engine in ENGINES for how in HANDLES]


@pytest.mark.parametrize(("engine", "how"), by_day(HELD, [("ddp", "around compiled")]))
def test_every_handle_of_a_model_stands_for_it(
    engine: str, how: str, two: Trained, tmp_path: Path
) -> None:
    """torch.compile's wrapper, a user's module around the model, and both."""
    assert two.pool.run(by_handle, engine, how, tmp_path) == [(True, 3, 1, True)] * 2
