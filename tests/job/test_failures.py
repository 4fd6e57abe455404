"""Failures at any step of an attach, a load, a save, a detach or a meeting, on any one rank.

Afterwards nothing has changed, or everything has, on all ranks alike; all know within seconds which
rank has failed; and the same operation works.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import hybridcomp
from hybridcomp.channels import ATTRIBUTE
from hybridcomp.codecs.blockint import BlockInt
from hybridcomp.errors import HybridcompError, PeerError
from hybridcomp.job import agreement
from hybridcomp.job.waits import awaited
from hybridcomp.patches.torch import attach
from hybridcomp.patches.torch.fsdp2 import comms as fsdp2_comms
from hybridcomp.patches.torch.fsdp2 import fsdp2
from hybridcomp.session.engine_session import session_of
from tests.job import renewing
from tests.job.failing import Outcome, steps
from tests.ranks import run_ranks
from tests.sync.jobs import beside, rendezvous
from tests.sync.jobs import block as islands
from tests.sync.torch_job import Job
from tests.training import trainer

#: longest wait of a rank in seconds, by night
LIMIT_S = 10.0
BLOCK: dict[str, Any] = {
    "sync": {
        "preset": "diloco", "islands": 2, "every": 1, "codec": "blockint", "bits": 4,
        "error_feedback": True,
    },
    "dp": {"codec": "blockint", "bits": 3, "error_feedback": True, "guard": {"error": 0.9}},
    "min_bytes": 0,
    "ledger": {"every": 1_000_000},
}  # fmt: skip


def bytes_of(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def digest(*values: Any) -> str:
    """Hash plain values and tensors."""
    sha = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            sha.update(repr((value.shape, value.dtype)).encode())
            sha.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            sha.update(digest(*(x for key in sorted(value) for x in (key, value[key]))).encode())
        elif isinstance(value, (list, tuple)):
            sha.update(digest(*value).encode())
        else:
            sha.update(repr(value).encode())
    return sha.hexdigest()


class Subject:
    """An attached model of four ranks, and the operations on it."""

    def __init__(self, folder: Path, engine: str, block: dict[str, Any]) -> None:
        self.folder, self.engine, self.block = folder, engine, block
        self.job = Job(block, engine).build().train(2)
        hybridcomp.save_state(folder / "first")
        dist.barrier()
        self.job.train(1)

    @property
    def meetings(self) -> Any:
        assert self.job.attached is not None
        return self.job.attached.session.followers.stateful[0]

    def held(self) -> str:
        """Hash weights, residuals, clocks and all other state of an operation."""
        attached = self.job.attached
        if attached is None:
            return hooks_of(self.job.model)
        channels = attached.channels
        progress = self.meetings.progress
        parts = [
            (p.fragment.start, p.fragment.momentum, p.fragment.residual, len(p.fragment.under_way))
            for p in progress.parts
        ]
        return digest(
            channels.residuals.state_dict(), channels.factors.state_dict(), channels.step,
            channels.guard.state(), channels.verdicts.state(), attached.loss_scale.value,
            list(self.job.weights()), parts, len(progress.under_way),
            files_of(self.folder / "saved"),
            "sync" if self.meetings._loaded is None else bytes_of(list(self.meetings._loaded)),
        )  # fmt: skip

    def save(self) -> None:
        hybridcomp.save_state(self.folder / "saved")

    def load(self) -> None:
        hybridcomp.load_state(self.folder / "first")

    def load_entries(self) -> None:
        assert self.job.attached is not None
        self.job.attached.load_state_dict(self.entries)

    def prepare_load_entries(self) -> None:
        assert self.job.attached is not None
        self.job.train(1)
        self.entries = self.job.attached.state_dict()
        self.job.train(1)

    def prepare_load(self) -> None:
        self.job.train(1)

    def begin(self) -> None:
        self.meetings.before_step()

    def prepare_begin(self) -> None:
        self.prepare_load()
        self.load()

    def meet(self) -> None:
        self.meetings.after_step(0)

    def attach(self) -> None:
        self.job.attached = hybridcomp.attach(self.job.model, self.block)

    def prepare_attach(self) -> None:
        if self.job.attached is not None:
            hybridcomp.detach(self.job.model)
        self.job.attached = None

    def detach(self) -> None:
        assert self.job.attached is not None
        self.job.attached.detach()  # behind the check of arguments, which changes nothing
        self.job.attached = None

    def prepare_detach(self) -> None:
        if self.job.attached is None or self.job.attached.is_detached:
            self.job.attached = None
            self.attach()
            self.job.train(1)
        assert self.job.attached is not None
        self.before_detach = self.job.attached

    def is_let_go(self) -> bool:
        """Return whether the model is native on this rank, without leftovers of the detach."""
        self.job.attached = None
        model = self.job.model
        slots = [fsdp2_comms.has_output(group) for group in fsdp2.groups_of(model)]
        return (
            self.before_detach.is_detached
            and attach.ATTRIBUTE not in vars(model)
            and not any([*slots, self.before_detach.channels.residuals.nbytes])
        )

    def ends_well(self) -> bool:
        """Train on; return whether the start copies of the islands are equal."""
        if self.job.attached is None:
            self.attach()
        self.job.train(2)
        alike: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(alike, [p.fragment.start for p in self.meetings.parts][:1])
        return all(torch.equal(alike[rank][0], alike[rank + 2][0]) for rank in (0, 1))


def hooks_of(model: Any) -> str:
    """Hash the hooks and parameter tags of hybridcomp on a model."""
    names = [name for name in vars(model) if "hook" in name]
    hooks = [(name, len(getattr(module, name))) for module in model.modules() for name in names
             if hasattr(module, name) and hasattr(getattr(module, name), "__len__")]  # fmt: skip
    return digest(hooks, [hasattr(p, ATTRIBUTE) for p in model.parameters()])


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of hybridcomp that this rank has written."""
    own = f"{dist.get_rank():05d}"
    files = sorted(folder.rglob("hybridcomp*")) if folder.is_dir() else []
    return {path.name: path.read_bytes() for path in files if own in path.name}


class EngineSubject:
    """A DeepSpeed engine of two ranks, whose checkpoints hold hybridcomp's state."""

    def __init__(self, folder: Path, engine: str, block: dict[str, Any]) -> None:
        self.folder = folder
        self.job = trainer.Job(stage=int(engine.removeprefix("deepspeed")), block=block)
        self.deepspeed: Any = None
        self.model: Any = None
        self.prepare_attach()
        self.attach()
        self.save_as("first")
        self.step = 0
        self.train()

    def train(self) -> None:
        trainer.train_step(self.deepspeed, self.job, self.step)
        self.step += 1

    def held(self) -> str:
        if self.deepspeed is None:
            return digest([hasattr(p, ATTRIBUTE) for p in self.model.parameters()])
        session = session_of(self.deepspeed)
        assert session is not None
        channels = session.channels
        return digest(
            channels.residuals.state_dict(), channels.step, channels.guard.state(),
            session.loss_scale, files_of(self.folder / "saved"),
        )  # fmt: skip

    def save_as(self, name: str) -> None:
        self.deepspeed.save_checkpoint(str(self.folder / name), tag="tag")

    def save(self) -> None:
        self.save_as("saved")

    def load(self) -> None:
        self.deepspeed.load_checkpoint(str(self.folder / "first"), tag="tag")

    def prepare_load(self) -> None:
        self.train()

    def attach(self) -> None:
        self.deepspeed = trainer.make_engine(self.job, self.model)

    def prepare_attach(self) -> None:
        if self.deepspeed is not None:
            self.deepspeed.destroy()
        self.deepspeed, self.model = None, trainer.Tiny()

    def ends_well(self) -> bool:
        self.train()
        return True


AnySubject = Subject | EngineSubject | renewing.Renewing


def attempt(subject: AnySubject, what: str, fails_at: int | None) -> tuple[Any, ...]:
    """Run an operation; return its seconds, its error, the failed step, and the number of steps."""
    began, said = time.monotonic(), ""
    inside = what == "attach"
    with steps(fails_at, inside) as counter, contextlib.redirect_stdout(io.StringIO()):
        try:
            getattr(subject, what)()
        except (HybridcompError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
    return time.monotonic() - began, said, counter.where, counter.found


def fail(subject: AnySubject, what: str, rank: int, step: int, outcome: Outcome) -> None:
    """Make a step fail on ``rank``; record problems in ``outcome``."""
    getattr(subject, f"prepare_{what}", lambda: None)()
    before = subject.held()
    dist.barrier()
    seconds, said, where, _ = attempt(subject, what, step if rank == dist.get_rank() else None)
    every: list[Any] = [None] * dist.get_world_size()
    is_local = what == "detach"  # no other rank waits: this rank is detached in any case
    if is_local:
        assert isinstance(subject, Subject)
        is_whole = subject.is_let_go()
    else:
        is_whole = before == subject.held()
    dist.all_gather_object(every, (seconds, said, where, is_whole))
    outcome.tried += 1
    outcome.longest_s = max(outcome.longest_s, *(row[0] for row in every))
    name = f"{what}: rank {rank}, step {step}, {every[rank][2]}"
    if any(row[1] for row in every):
        outcome.failed += 1
        own = is_local or every[rank][1].startswith(("ConfigError", "SeamError"))  # as it is
        others = [row for row in every if row is not every[rank]]
        if is_local and any(row[1] for row in others):
            outcome.problems.append(f"{name}: others failed: {[row[1] for row in every]}")
        named = [] if is_local else [*others, *([] if own else [every[rank]])]
        if not all(f"rank {rank}" in row[1] for row in named):
            outcome.problems.append(f"{name}: not named: {[row[1] for row in every]}")
    if (is_local or any(row[1] for row in every)) and not all(row[3] for row in every):
        changed = [number for number, row in enumerate(every) if not row[3]]
        outcome.problems.append(f"{name}: half done on {changed}")


def met(address: str, first: int, count: int, fails: int) -> tuple[dict[int, Any], Outcome]:
    """Hold ``count`` meetings as an island of two ranks that is a job; ``fails`` of them fail.

    Returns the start copies after each meeting, and the problems.
    """
    agreement.LOOK_S = 0.05
    sync = {key: value for key, value in BLOCK["sync"].items() if key != "islands"}
    job = Job({**BLOCK, **islands(address, **sync)}, first=first).build().train(1)
    of, outcome, draw = job.job_meetings, Outcome(), random.Random(first + count)
    subject: Any = SimpleNamespace(meet=lambda: of.after_step(0))
    starts: dict[int, Any] = {}
    while of.membership.last.number < count:
        job.train(1)
        if of.membership.last.number >= count:
            break
        fails_at = draw.randrange(80) if outcome.tried < fails else None
        rank, me = draw.randrange(2), dist.get_rank()
        seconds, said, where, _ = attempt(subject, "meet", fails_at if rank == me else None)
        number = of.membership.last.number
        state = number, len(of.under_way), digest(job.weights())
        every: list[Any] = [None, None]
        dist.all_gather_object(every, (seconds, said, where, state))
        outcome.tried += fails_at is not None
        outcome.failed += any(row[1] for row in every)
        outcome.longest_s = max(outcome.longest_s, *(row[0] for row in every))
        if every[0][3] != every[1][3]:
            outcome.problems.append(f"half done: {every}")
        if any(row[1] for row in every) and not all(f"rank {rank}" in row[1] for row in every):
            outcome.problems.append(f"not named: {every}")
        starts[number] = [part.fragment.start.clone() for part in of.parts]
    hybridcomp.detach(job.model)
    return starts, outcome


@pytest.mark.parametrize("fails", [8, pytest.param(60, marks=pytest.mark.nightly)])
def test_a_failure_in_an_island_that_is_a_job_is_one_of_its_ranks(fails: int) -> None:
    """The island continues, and the other island, which waits for it, has equal start copies."""
    count = 2 * fails
    with rendezvous() as address:
        ones, others = beside(
            (2, met, (address, 0, count, fails)), (2, met, (address, 2, count, 0))
        )
    for (starts, outcome), (same, healthy) in zip(ones, others, strict=True):
        assert not outcome.problems and not healthy.problems
        assert outcome.tried == fails and outcome.failed > fails // 2 and not healthy.failed
        print(f"islands: {outcome.failed} of {outcome.tried}, at most {outcome.longest_s:.2f} s")
        assert fails == 8 or outcome.longest_s <= LIMIT_S
        shared = starts.keys() & same.keys()
        assert len(shared) > fails // 2
        for number in shared:
            assert all(map(torch.equal, starts[number], same[number])), number


def told_in_a_trial(fails_at: int) -> tuple[float, str]:
    """Attach with a trial of a codec that fails on rank 1 at an encoding; return the error."""
    job = Job(None).build()
    block = {"dp": {"codec": "blockint", "bits": 4, "when": "auto"}, "min_bytes": 0}
    calls, plain = [0], BlockInt.encode

    def encode(self: BlockInt, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] == fails_at and dist.get_rank() == 1:
            raise RuntimeError("no memory is left")
        return plain(self, *args)

    began = time.monotonic()
    with patch.object(BlockInt, "encode", encode), pytest.raises(PeerError) as error:
        hybridcomp.attach(job.model, block)
    assert attach.channels_of_model(job.model) is None
    return time.monotonic() - began, str(error.value)


@pytest.mark.parametrize("fails_at", [1, 4])
def test_a_failure_in_the_message_of_a_trial_ends_all_ranks(fails_at: int) -> None:
    """The failing rank reports it and closes its connections, which ends the others' waits."""
    for seconds, said in run_ranks(3, told_in_a_trial, fails_at):
        assert said.endswith("rank 1: RuntimeError: no memory is left"), said
        assert seconds < LIMIT_S


NAMED = "hybridcomp.detach: rank 1: hybridcomp.detach"
LATE = "hybridcomp.detach: rank(s) 1 never stated theirs"


def detached_alone() -> tuple[bool, str, list[str]]:
    """Detach another model on rank 1, then detach with rank 1 late.

    Returns whether the model stayed attached, the first error, and the complaints about rank 1.
    """
    job = Job(None).build()
    job.attached = hybridcomp.attach(job.model, {"dp": {"codec": "blockint"}, "min_bytes": 0})
    assert job.attached is not None
    job.train(1)
    with pytest.raises(HybridcompError) as error:
        hybridcomp.detach(torch.nn.Linear(1, 1) if dist.get_rank() == 1 else job.model)
    was_kept = not job.attached.is_detached
    job.train(1)
    attach.SILENT_S, store = 0.2, dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:  # alive and late: no rank waits for it
        assert awaited(lambda: store.check(["0 is native", "2 is native"]) or None, 60.0)
    with patch.object(attach, "complain") as complained:
        hybridcomp.detach(job.model)
    store.set(f"{dist.get_rank()} is native", "")
    hybridcomp.detach(job.model)
    assert job.attached.is_detached
    job.train(1)
    hybridcomp.attach(job.model, {"dp": {"codec": "blockint"}, "min_bytes": 0})
    job.train(1)
    return was_kept, str(error.value), [call.args[0] for call in complained.call_args_list]


def test_a_detach_of_something_else_on_one_rank_lets_go_of_none() -> None:
    """No rank waits for a late one."""
    for rank, (was_kept, said, late) in enumerate(run_ranks(3, detached_alone)):
        assert was_kept
        assert [text.partition(", in ")[0] for text in late] == ([] if rank == 1 else [LATE])
        assert "expected a model that is attached" in said
        assert said.partition(": found Linear")[0] in ("hybridcomp.detach", NAMED)


def failing(folder: Path, engine: str, what: str, count: int, seed: int) -> Outcome:
    """Inject ``count`` failures into an operation, at steps and on ranks drawn by ``seed``."""
    agreement.LOOK_S = 0.05
    draw, outcome = random.Random(seed), Outcome()
    subject: AnySubject
    if engine.startswith("deepspeed"):
        subject = EngineSubject(folder, engine, {"dp": BLOCK["dp"], "min_bytes": 0})
    elif engine in renewing.ENGINES:
        subject = renewing.subject(folder, engine)
    else:
        subject = Subject(folder, engine, BLOCK)
    getattr(subject, f"prepare_{what}", lambda: None)()
    least = torch.tensor(attempt(subject, what, None)[3])
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    number_of_steps = int(least)
    # 0: in front of all gates
    order = [0, *draw.sample(range(1, number_of_steps), number_of_steps - 1)]
    for number in range(count):
        rank, step = draw.randrange(dist.get_world_size()), order[number % len(order)]
        fail(subject, what, rank, step, outcome)
    getattr(subject, f"prepare_{what}", lambda: None)()
    getattr(subject, what)()
    if not subject.ends_well():
        outcome.problems.append("start copies differ between islands")
    return outcome


#: operation, engine, ranks; how many by day, and of the thousand by night
CASES = (
    ("meet", "ddp", 4, 8, 150), ("meet", "fsdp2", 4, 0, 100), ("begin", "ddp", 4, 0, 60),
    ("save", "ddp", 4, 4, 100), ("save", "fsdp2", 4, 0, 50), ("load", "ddp", 4, 4, 80),
    ("load", "fsdp2", 4, 0, 50), ("load_entries", "ddp", 4, 0, 60), ("attach", "ddp", 4, 0, 60),
    ("attach", "fsdp2", 4, 3, 40), ("detach", "ddp", 4, 4, 30), ("detach", "fsdp2", 4, 0, 20),
    ("attach", "deepspeed1", 2, 0, 30), ("save", "deepspeed1", 2, 3, 30),
    ("load", "deepspeed1", 2, 0, 30), ("attach", "deepspeed2", 2, 0, 10),
    ("save", "deepspeed2", 2, 0, 25), ("load", "deepspeed2", 2, 0, 20),
    ("attach", "deepspeed3", 2, 0, 10), ("save", "deepspeed3", 2, 0, 25),
    ("load", "deepspeed3", 2, 0, 20), ("renew", "copies", 4, 6, 60), ("renew", "frozen", 4, 0, 60),
    ("renew", "copies3", 4, 0, 40), ("renew", "frozen3", 4, 0, 40),
)  # fmt: skip


@pytest.mark.parametrize(("what", "engine", "ranks", "count", "is_night"), [
    *(pytest.param(*case[:4], False, id=f"{case[0]}-{case[1]}") for case in CASES if case[3]),
    *(pytest.param(*case[:3], case[4], True, id=f"{case[0]}-{case[1]}-all",
                   marks=pytest.mark.nightly) for case in CASES),
])  # fmt: skip
def test_a_failure_of_one_rank_is_one_of_all(
    what: str, engine: str, ranks: int, count: int, is_night: bool, tmp_path: Path
) -> None:
    outcome, *_ = run_ranks(ranks, failing, tmp_path, engine, what, count, 1, timeout=900.0)
    print(
        f"{what} {engine}: {outcome.failed} of {outcome.tried}, at most {outcome.longest_s:.2f} s"
    )
    assert not outcome.problems
    # files that are closed and logs that are ended may fail without a loss
    assert outcome.tried == count and outcome.failed > (0 if what == "detach" else count // 2)
    if is_night:  # by day a busy machine may take longer
        assert outcome.longest_s <= LIMIT_S
