"""Failures on one rank around messages without gates: trials, sums at the end of a step.

The rank closes its connections, so each failure needs a new process group.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import hybridcomp
from hybridcomp.autotune import timing
from hybridcomp.autotune.timing import seconds
from hybridcomp.errors import CheckpointError, HybridcompError
from hybridcomp.job import agreement, gates, peer_liveness, small_messages
from hybridcomp.job.together import ending, together
from hybridcomp.nn import CachedEmbedding, RowOptimizer
from tests.job.failing import Outcome, steps
from tests.ranks import RunRanks, run_ranks
from tests.sync.torch_job import Job

#: longest wait of a rank in seconds, by night
LIMIT_S = 10.0
#: guard, report and residuals in every step
BLOCK: dict[str, Any] = {
    "dp": {"codec": "blockint", "bits": 3, "error_feedback": True, "guard": {"error": 0.9}},
    "min_bytes": 0,
    "ledger": {"every": 1, "sample_every": 1},
}  # fmt: skip


def step_end(folder: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    """Run the end of a step under DDP, and the next message of all ranks."""
    job = Job(None).build()
    job.attached = hybridcomp.attach(job.model, BLOCK)
    assert job.attached is not None
    job.train(1)
    return job.attached.session.end_step, lambda: job.train(1)


def norm_of_rows(folder: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    """Compute the norm of rows' gradients, and send the next message of all ranks."""
    table = CachedEmbedding(64, 8, resident=32)
    optimizer = RowOptimizer([table], "sgd", lr=0.1)

    def train() -> None:
        ids = torch.arange(8) + 8 * dist.get_rank()
        torch.autograd.backward(table(ids).sum())

    train()
    return optimizer.square_norm, train


def trial(folder: Path) -> tuple[Callable[[], object], Callable[[], object]]:
    """Attach with a trial of the codec; only steps of its messages fail."""
    block, plain = {"dp": {"codec": "blockint", "bits": 4, "when": "auto"}, "min_bytes": 0}, seconds

    def work() -> None:
        counter = sys.getprofile()
        sys.setprofile(None)

        def counted(*args: Any) -> float:
            sys.setprofile(counter)
            try:
                return plain(*args)
            finally:
                sys.setprofile(None)

        with patch.object(timing, "seconds", counted):
            hybridcomp.attach(Job(None).build().model, block)

    return work, bool


KINDS = {"step_end": step_end, "norm_of_rows": norm_of_rows, "trial": trial}


def said_by(call: Callable[[], object]) -> str:
    """Return a call's error, with the frames below if they are not ours."""
    try:
        call()
    except (HybridcompError, RuntimeError) as error:
        return f"{type(error).__name__}: {peer_liveness._last_words(error)}"
    return ""


def failing(folder: Path, kind: str, count: int, seed: int) -> Outcome:
    """Inject ``count`` failures, each in a new process group."""
    agreement.LOOK_S = 0.05
    draw, outcome, me = random.Random(seed), Outcome(), dist.get_rank()
    world, number = dist.get_world_size(), 0
    for tried in range(count):
        store = dist.FileStore(str(folder / f"words{tried}"), world)  # type: ignore[attr-defined]
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store{tried}", rank=me, world_size=world,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
        work, behind = KINDS[kind](folder)
        with steps() as counter:
            work()
        number = number or counter.found
        rank, step = draw.randrange(world), draw.randrange(number)
        began = time.monotonic()
        with steps(step if me == rank else None) as counter:
            said = said_by(work)
        if not said and (said := said_by(behind)):  # others may not yet have waited for that rank
            small_messages.cut_off(whole())  # as the end of this process would
        store.set(str(me), json.dumps([time.monotonic() - began, said, counter.where]))
        every = [json.loads(store.get(str(rank))) for rank in range(world)]
        note(outcome, f"{kind}: rank {rank}, step {step} of {number}", rank, every)
    return outcome


def note(outcome: Outcome, name: str, rank: int, every: list[Any]) -> None:
    """Count a failure, and record its problems."""
    where = every[rank][2]
    outcome.tried += 1
    outcome.longest_s = max(outcome.longest_s, *(row[0] for row in every))
    if not where or not every[rank][1]:
        return  # a step that did not occur again, or an error without effect
    outcome.failed += 1
    if not all(f"rank {rank}" in row[1] and "Injected" in row[1] for row in every):
        outcome.problems.append(f"{name}, {where}: not named: {[row[1] for row in every]}")


def whole() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def told_by_others() -> str:
    """Return the error of rank 2, which waits for rank 0, which waits for the failing rank 1."""
    me, value = dist.get_rank(), torch.empty(1)
    if me == 1:
        small_messages.cut_off(whole())
        return ""
    with pytest.raises(RuntimeError) as error:
        dist.recv(value, 1 - me if me == 0 else 0)
    if me == 0:
        small_messages.cut_off(whole())
    return str(error.value)


def test_a_failure_ends_the_waits_of_ranks_that_wait_for_waiting_ranks() -> None:
    """A rank closes all its connections even if the first is already closed."""
    _, *others = run_ranks(3, told_by_others)
    assert "imed out" not in others[1] and "onnection" in others[1]


@pytest.mark.parametrize(("kind", "count"), [
    ("step_end", 6), ("norm_of_rows", 3), ("trial", 2),
    pytest.param("step_end", 60, marks=pytest.mark.nightly),
    pytest.param("trial", 40, marks=pytest.mark.nightly),
    pytest.param("norm_of_rows", 30, marks=pytest.mark.nightly),
])  # fmt: skip
def test_a_failure_beside_a_message_without_gates_ends_all_ranks(
    kind: str, count: int, tmp_path: Path
) -> None:
    outcome, *_ = run_ranks(3, failing, tmp_path, kind, count, 1, timeout=600.0)
    print(f"{kind}: {outcome.failed} of {outcome.tried}, at most {outcome.longest_s:.2f} s")
    assert not outcome.problems
    assert outcome.tried == count and outcome.failed > count // 2
    if count > 10:  # by day a busy machine may need longer
        assert outcome.longest_s <= LIMIT_S


def known() -> float:
    """Raise an error that all ranks know; return a sum that they make after it."""
    with pytest.raises(CheckpointError), ending("step"):
        raise CheckpointError.naming_rank("save: rank 1: no space")
    total = torch.ones(())
    dist.all_reduce(total)
    return float(total)


def test_an_error_that_all_ranks_know_closes_no_connection(on_ranks: RunRanks) -> None:
    assert on_ranks(2, known) == [2.0, 2.0]


def test_an_error_that_names_its_rank_is_not_named_again() -> None:
    words = "^save: rank 1: no space$"
    with pytest.raises(CheckpointError, match=words), together("step", lambda: None):
        raise CheckpointError.naming_rank("save: rank 1: no space")


def test_a_wait_ends_for_failures_in_any_operation_around_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[str] = []
    operations = [SimpleNamespace(check=lambda _, n=name: checked.append(n)) for name in "ab"]
    monkeypatch.setattr(gates.here, "operations", operations)
    gates.check_failed()
    assert checked == ["a", "b"]
