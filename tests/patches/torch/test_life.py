"""Life of an attached model: freed when dropped, native again when detached."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.channels import Channels
from hybridcomp.errors import ConfigError
from hybridcomp.job.devices import default_device
from hybridcomp.patches.torch import attached as attached_module
from hybridcomp.patches.torch import steps
from hybridcomp.session import process
from tests.patches.torch.sent_bytes import sent_in
from tests.patches.torch.trainer import Job, build, digest, optimizer_of, train
from tests.ranks import RunRanks
from tests.selection import by_day

B4: dict[str, Any] = {"codec": "blockint", "bits": 4, "error_feedback": True}
DP: dict[str, Any] = {"dp": B4, "min_bytes": 0, "ledger": {"every": 2}}
BOTH: dict[str, Any] = {**DP, "zero": {"codec": "blockint", "bits": 8}}
JOBS = {
    "DDP": (2, Job(engine="ddp", block=DP)),
    "FSDP2": (2, Job(block=BOTH)),
    "HSDP": (4, Job(block=BOTH, replicas=2, micro_batches=2)),
}


def sweep(job: Job, runs: int, folder: Path) -> tuple[list[bool], list[int], int]:
    """Return by run whether a dropped model is freed, the remains of all, attached models."""
    gone, left = [], []
    for number in range(runs):
        model = build(job)
        ledger = {"every": 2, "jsonl": str(folder / f"ledger{number}.jsonl")}
        hybridcomp.attach(model, {**(job.block or {}), "ledger": ledger})
        train(job, model, optimizer_of(job, model), 0, 3)
        known = weakref.ref(model)
        del model
        gc.collect()
        gone.append(known() is None)
        left.append(sum(issubclass(type(thing), Channels) for thing in gc.get_objects()))
    return gone, left, len(steps.models())


@pytest.mark.parametrize("name", by_day(JOBS, ["DDP", "FSDP2"]))
def test_a_sweep_leaves_no_model_behind(module_ranks: RunRanks, name: str, tmp_path: Path) -> None:
    """It frees models, channels and ledgers; totals are written when a model is dropped."""
    world_size, job = JOBS[name]
    runs = 2
    for found in module_ranks(world_size, sweep, job, runs, tmp_path):
        assert found == ([True] * runs, [0] * runs, 0)
    ledgers = [path.read_text().splitlines() for path in sorted(tmp_path.iterdir())]
    assert len(ledgers) == runs
    assert all('"summary": true' in lines[-1] and '"step": 2' in lines[0] for lines in ledgers)


def destroyed() -> list[int]:
    """Return how many groups a model's channels know, while it changes them."""
    model = build(Job(engine="ddp"))
    attached = hybridcomp.attach(model, DP)
    assert attached is not None
    channel, counts = attached.channels["dp"], []
    for _ in range(4):
        group = dist.new_group([0, 1])
        channel.group(group)
        counts.append(len(channel.groups))
        dist.destroy_process_group(group)
    return counts


def test_destroyed_groups_are_let_go(module_ranks: RunRanks) -> None:
    groups = [2, 2, 2, 2]  # the model's, and the newest one
    assert module_ranks(2, destroyed) == [groups] * 2


def continued(job: Job) -> dict[str, Any]:
    """Run native steps, and steps after ``detach`` from the same weights; return both."""
    native, model = build(job), build(job)
    attached = hybridcomp.attach(model, job.block)
    assert attached is not None
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (native, model)]
    train(job, model, optimizers[1], 0, 2)
    steps_taken, held = attached.step, attached.channels.residuals.norm()
    said: list[str] = []
    with patch.object(attached_module, "say", said.append):
        hybridcomp.detach(model)
        hybridcomp.detach(model)  # harmless
    with torch.no_grad():
        for one, other in zip(native.parameters(), model.parameters(), strict=True):
            one.copy_(other)
    train(job, native, optimizers[0], 2, 4)  # DDP rebuilds buckets after its first step
    sent = [sent_in(lambda: train(job, model, optimizers[1], 2, 4))]
    found = {
        "weights": digest(native) == digest(model),
        "said": said, "steps": (steps_taken, attached.step), "models": len(steps.living()),
        "kept": (held > 0, attached.channels.residuals.norm()),
    }  # fmt: skip
    sent.append(sent_in(lambda: train(job, native, optimizers[0], 4, 5)))
    sent.append(sent_in(lambda: train(job, model, optimizers[1], 4, 5)))
    again = hybridcomp.attach(model, {**(job.block or {}), "dp": {"codec": "blockint", "bits": 8}})
    sent.append(sent_in(lambda: train(job, model, optimizers[1], 5, 6)))
    assert again is not None
    return {**found, "sent": sent, "again": again.step}


@pytest.mark.parametrize("name", by_day(JOBS, ["DDP", "FSDP2"]))
def test_a_detached_model_is_native(module_ranks: RunRanks, name: str) -> None:
    """It has the operations, bytes and values of a model never attached; then attach again."""
    world_size, job = JOBS[name]
    for found in module_ranks(world_size, continued, job):
        assert found["weights"] and found["models"] == 0
        assert found["kept"] == (True, 0.0) and found["steps"] == (2, 2)
        (line,) = found["said"]
        assert "what error feedback held back" in line and "save_state" in line
        _, native, after, encoded = found["sent"]
        assert native == after and "send" not in after
        assert "send" in encoded and found["again"] == 1


def uninstalled(job: Job) -> list[Any]:
    """Return a step's messages: native, installed late, uninstalled, installed again."""
    model = build(job)
    optimizer = optimizer_of(job, model)
    train(job, model, optimizer, 0, 2)  # it has run, and buckets were rebuilt
    found: list[Any] = []

    def note(step: int) -> None:
        sent = sent_in(lambda: train(job, model, optimizer, step, step + 1))
        found.append(("send" in sent, sent if "send" not in sent else {}, len(steps.living())))

    process.configure(None)
    hybridcomp.install()
    note(2)
    hybridcomp.install(job.block)
    note(3)
    hybridcomp.uninstall()
    note(4)
    hybridcomp.install()
    note(5)
    hybridcomp.detach(model)
    note(6)
    hybridcomp.uninstall()
    process.configure(None)
    return found


@pytest.mark.parametrize("name", by_day(JOBS, ["DDP", "FSDP2"]))
def test_install_comes_late_and_uninstall_detaches(module_ranks: RunRanks, name: str) -> None:
    """A model that ran before is attached at its next pass, also if it was seen without a block."""
    world_size, job = JOBS[name]
    for found in module_ranks(world_size, uninstalled, job):
        native = found[0]
        assert native[0] is False and native[2] == 0
        assert found == [native, (True, {}, 1), native, (True, {}, 1), native]


def validated() -> tuple[int, int]:
    """Return the attached models after one rank's pass without gradients, and after a step."""
    job = Job(engine="ddp")
    process.configure(None)
    hybridcomp.install(DP)
    model = build(job)
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(torch.zeros(1, 4, dtype=torch.long, device=default_device()))
    before = len(steps.living())
    train(job, model, optimizer_of(job, model), 0, 1)
    after = len(steps.living())
    hybridcomp.uninstall()
    process.configure(None)
    return before, after


def test_one_rank_may_validate_before_the_first_step(module_ranks: RunRanks) -> None:
    """Other ranks may wait for it in a barrier, and would not attach the model meanwhile."""
    assert module_ranks(2, validated) == [(0, 1)] * 2


def passed(model: Any) -> None:
    """Run a forward and a backward pass."""
    model(torch.ones(2, 8)).sum().backward()


def partly() -> dict[str, str]:
    """Return the message for a partly attached model, by cause."""
    found: dict[str, str] = {}

    def note(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except ConfigError as error:
            found[name] = str(error)

    def layers() -> Any:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))

    for name in ("between", "between, compiled"):
        between = layers()
        fully_shard(between[0])
        hybridcomp.attach(between, DP)
        run: Any = fully_shard(between)
        if name != "between":
            run = torch.compile(run, backend="eager")
        note(name, functools.partial(passed, run))
    child = layers()
    fully_shard(child[0])
    fully_shard(child)
    hybridcomp.attach(child[0], DP)
    note("child, then root", lambda: hybridcomp.attach(child, DP))
    note("child only", lambda: child(torch.ones(2, 8)))
    hybridcomp.detach(child[0])
    hybridcomp.attach(child, DP)
    note("root, then child", lambda: hybridcomp.attach(child[0], DP))
    child(torch.ones(2, 8)).sum().backward()  # the root as a whole is no error
    towers = layers()  # two roots, never combined
    for tower in towers:
        fully_shard(tower)
    hybridcomp.attach(towers, DP)
    note("two roots", lambda: towers(torch.ones(2, 8)).sum().backward())
    hook = DistributedDataParallel(layers())
    hybridcomp.attach(hook, DP)
    note("hook", lambda: hook.register_comm_hook(None, fp16_compress_hook))
    note("never attached", lambda: hybridcomp.detach(layers()))
    note("a list", lambda: hybridcomp.attach([hook], DP))  # type: ignore[arg-type]
    return found


def test_what_is_attached_in_part_is_an_error(module_ranks: RunRanks) -> None:
    for found in module_ranks(2, partly):
        for name in ("between", "between, compiled", "child, then root", "child only",
                     "root, then child"):  # fmt: skip
            assert "call attach once, for the root" in found[name], (name, found)
        for name in ("child, then root", "root, then child"):
            assert "attached already" in found[name]
        assert "fp16_compress_hook" in found["hook"] and "one communication hook" in found["hook"]
        assert "expected a model that is attached" in found["never attached"]
        assert "two roots" not in found
        assert found["a list"].startswith("compression: found list; attach takes one model")
        assert all("\n" not in text for text in found.values())
