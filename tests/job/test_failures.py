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
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybridcomp
from hybridcomp.errors import HybridcompError
from hybridcomp.job import agreement
from tests.job.failing import steps
from tests.ranks import run_ranks
from tests.sync.torch_job import Job

#: seconds that nobody may wait longer than
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
    """A digest of plain values and tensors."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            found.update(repr((value.shape, value.dtype)).encode())
            found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            found.update(digest(*(x for key in sorted(value) for x in (key, value[key]))).encode())
        elif isinstance(value, (list, tuple)):
            found.update(digest(*value).encode())
        else:
            found.update(repr(value).encode())
    return found.hexdigest()


@dataclass
class Outcome:
    """What one rank found out; equal on all ranks but for ``problems`` of its own."""

    tried: int = 0
    failed: int = 0
    longest_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    where: Counter[str] = field(default_factory=Counter)


class Subject:
    """An attached model of four ranks, and what is done with it."""

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
        """A digest of weights, residuals, clocks and all else that may not change by halves."""
        attached = self.job.attached
        assert attached is not None
        channels = attached.channels
        files = {
            path.name: path.read_bytes()
            for path in sorted((self.folder / "saved").glob("*"))
            if f"{dist.get_rank():05d}" in path.name
        }
        progress = self.meetings.progress
        parts = [
            (p.fragment.start, p.fragment.momentum, p.fragment.residual, len(p.fragment.under_way))
            for p in progress.parts
        ]
        return digest(
            channels.residuals.state_dict(), channels.factors.state_dict(), channels.step,
            channels.guard.state(), channels.verdicts.state(), attached.loss_scale.value,
            list(self.job.weights()), parts, len(progress.under_way), files,
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

    def detach(self) -> None:
        hybridcomp.detach(self.job.model)


def told(subject: Subject, what: str, fails_at: int | None, everywhere: bool) -> tuple[Any, ...]:
    """What one try comes to here: seconds, error, the step, and how many there were."""
    began, said = time.monotonic(), ""
    with steps(fails_at, everywhere) as counter, contextlib.redirect_stdout(io.StringIO()):
        try:
            getattr(subject, what)()
        except (HybridcompError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
    return time.monotonic() - began, said, counter.where, counter.found


def one(subject: Subject, what: str, draw: random.Random, most: list[int], found: Outcome) -> None:
    """Let one step fail on one rank, then do the same without; note what is wrong."""
    getattr(subject, f"prepare_{what}", lambda: None)()
    rank, step = draw.randrange(dist.get_world_size()), draw.randrange(most[0])
    mine = rank == dist.get_rank()
    is_open = what != "attach"
    before = subject.held() if is_open else ""
    dist.barrier()
    seconds, said, where, _ = told(subject, what, step if mine else None, False)
    after = subject.held() if is_open else str(subject.job.attached is None)
    every: list[Any] = [None] * dist.get_world_size()
    own = (seconds, said, where, before == after, bool(said))
    dist.all_gather_object(every, own)
    found.tried += 1
    found.longest_s = max(found.longest_s, *(row[0] for row in every))
    failed = [bool(row[1]) for row in every]
    name = f"{what}: rank {rank}, step {step} of {most[0]}, {every[rank][2]}"
    if any(failed):
        found.failed += 1
        found.where[every[rank][2].partition(":")[0]] += 1
        if not all(failed):
            found.problems.append(f"{name}: failed on some: {[row[1] for row in every]}")
        if not all(f"rank {rank}" in row[1] for row in every):
            found.problems.append(f"{name}: not named: {[row[1] for row in every]}")
        if is_open and not all(row[3] for row in every):
            found.problems.append(
                f"{name}: changed on {[r for r, x in enumerate(every) if not x[3]]}"
            )
    if max(row[0] for row in every) > LIMIT_S:
        found.problems.append(f"{name}: {max(row[0] for row in every):.1f} s")


def failing(folder: Path, engine: str, what: str, count: int, seed: int) -> Outcome:
    """``count`` failures of an operation, drawn by ``seed``."""
    agreement.LOOK_S = 0.05
    draw, found = random.Random(seed), Outcome()
    subject = Subject(folder, engine, BLOCK)
    if what == "attach":
        subject.detach()
    getattr(subject, f"prepare_{what}", lambda: None)()
    number = torch.tensor(told(subject, what, None, False)[3])
    dist.all_reduce(number, op=dist.ReduceOp.MIN)
    if what == "attach":
        subject.detach()
    for _ in range(count):
        subject.job.attached = None if what == "attach" else subject.job.attached
        one(subject, what, draw, [int(number)], found)
        if what == "attach" and subject.job.attached is not None:
            subject.detach()
    if what == "attach":
        subject.attach()
    else:
        getattr(subject, what)()
    subject.job.train(2)
    alike: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(alike, [p.fragment.start for p in subject.meetings.parts][:1])
    if not all(torch.equal(alike[rank][0], alike[rank + 2][0]) for rank in (0, 1)):
        found.problems.append("start copies differ between islands")
    return found


WHATS = ("meet", "save", "load", "load_entries", "begin", "attach")


@pytest.mark.parametrize("what", WHATS)
def test_a_failure_of_one_rank_is_one_of_all(what: str, tmp_path: Path) -> None:
    for found in run_ranks(4, failing, tmp_path, "ddp", what, 12, 1):
        assert not found.problems
        assert found.tried == 12 and found.failed > 6
