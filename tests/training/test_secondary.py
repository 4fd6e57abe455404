"""``zero.secondary`` on DeepSpeed engines: trained, saved, resumed and changed as native."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import RunRanks
from tests.selection import by_day

if find_spec("deepspeed") is None:  # importing it here would take longer than the tests
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.training import trainer
from tests.training.trainer import (
    Job,
    Outcome,
    Tiny,
    batch,
    digests,
    ds_config,
    make_engine,
    train_step,
)

STEPS, NUMEL, SIZE = 6, 3000, "zero_hpz_partition_size"
EXACT: dict[str, Any] = {"zero": {"secondary": "exact"}, "min_bytes": 0}
BITS: dict[str, Any] = {"zero": {"secondary": {"bits": 8}}, "min_bytes": 0}
#: no persistent parameters, and two gathers a step, as in a large model
TWICE = {
    "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0,
}  # fmt: skip
HPZ = Job(3, "bf16", steps=STEPS, zero={SIZE: 2, **TWICE})
PREFETCHED = replace(HPZ, zero={SIZE: 2})  # and with persistent parameters
OVERFLOWS = {"fp16": {"enabled": True}}
JOBS = {
    "twice": HPZ,
    "prefetched": PREFETCHED,
    "accumulation": replace(HPZ, accumulation=2),
    "overflows": replace(HPZ, dtype="fp16", ds_json=OVERFLOWS, nan_step=4, steps=10),
    "sequential": replace(HPZ, zero={**HPZ.zero, "stage3_allgather_sequential": True}),
    "offload": replace(
        HPZ, zero={**HPZ.zero, "offload_param": {"device": "cpu"},
                   "offload_optimizer": {"device": "cpu"}},
    ),
    "small learning rate": replace(HPZ, lr=1e-5),
}  # fmt: skip
DAY = ("offload",)


def fresh(job: Job, **more: Any) -> Any:
    """Return an engine; DeepSpeed creates hpZ's groups once per process."""
    from deepspeed.utils import groups

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    return make_engine(job, **more)


def run(jobs: list[Job]) -> list[Outcome]:
    from deepspeed.utils import groups

    found = []
    for job in jobs:
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
        found.append(trainer.train(job))
    return found


@pytest.mark.parametrize("name", by_day(JOBS, DAY))
def test_trains_as_natively(module_ranks: RunRanks, name: str) -> None:
    job = JOBS[name]
    results = module_ranks(4, run, [job, replace(job, block=EXACT)])
    for native, coded in results:
        assert repr(coded.losses) == repr(native.losses)  # NaN is not equal to itself
        assert (coded.digests, coded.skipped) == (native.digests, native.skipped)
        assert any(coded.skipped) == (name == "overflows")
    sent = sum(coded.between["zero"][1] for _, coded in results)
    values = 5400 * (job.steps - sum(results[0][1].skipped))  # values of matrices
    assert 0 < 8 * sent / values < (6 if name == "small learning rate" else 20)


@pytest.mark.nightly
def test_many_steps_with_encoded_gradients(module_ranks: RunRanks) -> None:
    dp = {"dp": {"codec": "blockint", "bits": 4}, "min_bytes": 0}
    jobs = [replace(HPZ, steps=200, lr=1e-3, block={**more, **dp}) for more in ({}, EXACT)]
    for native, coded in module_ranks(4, run, jobs):
        assert (coded.losses, coded.digests) == (native.losses, native.digests)


def between(engine: Any) -> int:
    """Return this rank's parameter bytes to other nodes so far."""
    from hybridcomp.channels import channels_of

    channels = channels_of(engine)
    return 0 if channels is None else int(channels.ledger.interval["zero", "forward"].inter_nbytes)


def copies(engine: Any) -> int:
    """Return the bytes of secondary shards on this rank, DeepSpeed's and ours."""
    total = 0
    for param in engine.module.parameters():
        ours = getattr(getattr(param, "_hybridcomp_secondary", None), "held", None)
        total += sum(one.nbytes for one in (ours, param.ds_secondary_tensor) if one is not None)
    return total


def evaluated(job: Job) -> list[Any]:
    """Return losses of evaluations and steps, bytes between nodes, copies' memory after each."""
    engine = fresh(job)
    found: list[Any] = []
    for step in range(3):
        before = between(engine)
        with torch.no_grad():
            engine.eval()
            values, targets = batch(dist.get_rank(), 77, torch.bfloat16)
            losses = [(engine(values) - targets).float().square().mean().item() for _ in range(2)]
            engine.train()
        evaluation, before, held = between(engine) - before, between(engine), copies(engine)
        loss = train_step(engine, job, step)
        found.append((losses, loss, evaluation, between(engine) - before, held, copies(engine)))
    return found


def test_evaluation_renews_what_the_next_step_uses(module_ranks: RunRanks) -> None:
    native, exact, bits = (
        module_ranks(4, evaluated, replace(HPZ, block=block)) for block in (None, EXACT, BITS)
    )
    for plain, coded, eight in zip(native, exact, bits, strict=True):
        assert [found[:2] for found in coded] == [found[:2] for found in plain]
        for some in (coded, eight):
            for step, (losses, _, evaluation, trained, _, _) in enumerate(some):
                assert losses[0] == losses[1] and trained == 0
                assert (evaluation > 0) == (step > 0), "only what a step changed crosses"
        held = plain[0][4]  # hpZ's bytes during a step; it drops its copy between steps
        assert {kept for found in coded for kept in found[4:]} == {held}
        assert max(kept for found in eight for kept in found[4:]) < 0.65 * held  # tiny shards: 0.5


def changed(job: Job, way: str) -> tuple[list[float], dict[str, str], list[int]]:
    """Return losses, digests and bytes between nodes around a change from outside of training."""
    import deepspeed
    from deepspeed.utils import safe_set_full_fp32_param

    from hybridcomp.channels import channels_of

    engine = fresh(job)
    losses, sent = [], []
    weight = engine.module.inner.weight
    for step in range(5):
        if step == 3 and way == "gathered":
            with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
                if dist.get_rank() == 0:
                    weight.data.mul_(1.5)
        if step == 3 and way == "read":
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                pass
        if step == 3 and way == "master":
            safe_set_full_fp32_param(weight, torch.full(weight.ds_shape, 0.01))
        channels = channels_of(engine)
        if channels is not None and step == 3 and way == "resync" and dist.get_rank() == 1:
            channels.resync()
        copy = getattr(weight, "_hybridcomp_secondary", None)
        if copy is not None and step == 3 and way == "written" and dist.get_rank() == 2:
            copy.held.view(-1)[5] = 3.0
        before = between(engine)
        losses.append(train_step(engine, job, step))
        sent.append(between(engine) - before)
    return losses, digests(engine), sent


@pytest.mark.parametrize(
    "way", by_day(["gathered", "read", "master", "resync", "written"], ["written"])
)
def test_what_changes_parameters_is_followed(module_ranks: RunRanks, way: str) -> None:
    native = module_ranks(4, changed, replace(HPZ, block=None), way)
    exact = module_ranks(4, changed, replace(HPZ, block=EXACT), way)
    assert [found[:2] for found in exact] == [found[:2] for found in native]
    for _, _, sent in exact:
        assert sent[0] == 0 and all(sent[1:3])
        if way in ("resync", "written"):
            assert sent[4] < 1.1 * sent[2] < sent[3], "whole"
        elif way == "read":
            assert sent[3] == 0, "what was gathered is not sent again"


def written(blocks: list[Any]) -> list[list[float]]:
    """Return by block the losses of evaluations before and after a write into a weight."""
    import deepspeed

    found = []
    for block in blocks:
        engine = fresh(replace(HPZ, block=block))
        train_step(engine, HPZ, 0)
        engine.eval()
        values, targets = batch(dist.get_rank(), 77, torch.bfloat16)
        losses, weight = [], engine.module.inner.weight
        for factor in (1.0, -1.0):
            if factor < 0:
                with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
                    weight.data.mul_(factor if dist.get_rank() == 0 else 1.0)
            with torch.no_grad():
                losses.append((engine(values) - targets).float().square().mean().item())
        found.append(losses)
        engine.destroy()
    return found


def test_a_write_between_evaluations_is_in_the_copy(module_ranks: RunRanks) -> None:
    for native, exact, bits in module_ranks(4, written, [None, EXACT, BITS]):
        assert exact == native and bits == pytest.approx(native, rel=0.005)
        assert abs(native[1] / native[0] - 1) > 0.015


def resumed(job: Job, folder: str, save: bool) -> tuple[list[float], dict[str, str]]:
    """Return losses from step 3 on of a run that saved there, or loaded the save."""
    engine = fresh(job)
    if save:
        for step in range(3):
            train_step(engine, job, step)
        engine.save_checkpoint(folder, tag="third")
    else:
        train_step(engine, job, 9)
        engine.load_checkpoint(folder, tag="third")
    return [train_step(engine, job, step) for step in range(3, STEPS)], digests(engine)


@pytest.mark.parametrize("block", by_day([EXACT, BITS], [BITS]), ids=["exact", "bits"])
def test_a_resumed_run_is_the_unbroken_one(
    module_ranks: RunRanks, tmp_path: Any, block: dict[str, Any]
) -> None:
    coded, folder = replace(HPZ, block=block), str(tmp_path / "c")
    unbroken = module_ranks(4, resumed, coded, folder, True)
    assert module_ranks(4, resumed, coded, folder, False) == unbroken
    if block is EXACT:
        native = replace(HPZ, block=None)
        assert module_ranks(4, resumed, native, str(tmp_path / "n"), True) == unbroken
        assert module_ranks(4, resumed, native, folder, False) == unbroken


class Leaf(nn.Module):
    """Layers whose parameters DeepSpeed gathers at once."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.one(values) + self.two(values)  # type: ignore[no-any-return]


class Odd(nn.Module):
    """Parameters with fewer values than ranks; a leaf, an external and a recomputed module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Tiny()
        self.few = nn.Parameter(torch.ones(3))
        self.one = nn.Parameter(torch.ones(1))
        self.outside = nn.Linear(24, 24)
        self.leaf = Leaf()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        from torch.utils.checkpoint import checkpoint

        hidden = checkpoint(self.body, values, use_reentrant=False)
        hidden = nn.functional.linear(hidden, self.outside.weight)
        hidden = hidden * self.one + self.few.sum() * 0.01
        return self.leaf(hidden)  # type: ignore[no-any-return]


def odd(job: Job) -> tuple[list[float], dict[str, str], int]:
    import deepspeed
    from deepspeed.utils import set_z3_leaf_modules

    torch.manual_seed(3)
    model = Odd()
    set_z3_leaf_modules(model, [Leaf])
    deepspeed.zero.register_external_parameter(model, model.outside.weight)
    engine = fresh(job, model=model)
    losses = [train_step(engine, job, step) for step in range(4)]
    return losses, digests(engine), between(engine)


@pytest.mark.nightly
@pytest.mark.parametrize("job", [HPZ, PREFETCHED], ids=["twice", "prefetched"])
def test_small_external_leaf_and_recomputed_parameters(module_ranks: RunRanks, job: Job) -> None:
    """DeepSpeed #8210 and #5652: empty slices, and padding after others."""
    native, exact = (module_ranks(4, odd, replace(job, block=block)) for block in (None, EXACT))
    assert [found[:2] for found in exact] == [found[:2] for found in native]
    assert all(found[2] > 0 for found in exact)


def by_launcher(job: Job, nodes: list[int]) -> Any:
    """Train with nodes known only from the launcher; return DeepSpeed's size, and digests."""
    from hybridcomp.errors import ConfigError

    os.environ["GROUP_RANK"] = str(nodes[dist.get_rank()])
    try:
        engine = fresh(job)
    except ConfigError as error:
        return str(error)
    finally:
        del os.environ["GROUP_RANK"]
    for step in range(3):
        train_step(engine, job, step)
    return engine.zero_hpz_partition_size(), digests(engine), between(engine)


@pytest.mark.nightly
def test_nodes_that_the_launcher_tells(module_ranks: RunRanks) -> None:
    unset = replace(HPZ, zero=TWICE, block=EXACT)
    native = module_ranks(4, by_launcher, HPZ, [0, 0, 1, 1])
    found = module_ranks(4, by_launcher, unset, [0, 0, 1, 1])
    assert [one[:2] for one in found] == [one[:2] for one in native]
    for nodes in ([0, 0, 0, 0], [0, 1, 2, 3], [0, 1, 0, 1], [0, 0, 0, 1]):
        said = set(module_ranks(4, by_launcher, unset, nodes))
        assert len(said) == 1 and "zero.secondary: found " in said.pop(), "on all ranks"


def under_init(job: Job, size: int) -> Any:
    import deepspeed
    from deepspeed.utils import groups

    from hybridcomp.errors import ConfigError

    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    torch.manual_seed(0)
    told = ds_config(replace(job, block=None, zero={**TWICE, SIZE: size}))
    with deepspeed.zero.Init(config_dict_or_path=told):
        model = Tiny()
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    try:
        engine = make_engine(job, model=model)
    except ConfigError as error:
        return str(error)
    return [train_step(engine, job, step) for step in range(3)], digests(engine)


def test_models_built_under_zero_init(module_ranks: RunRanks) -> None:
    native = module_ranks(4, under_init, HPZ, 2)
    assert module_ranks(4, under_init, replace(HPZ, block=EXACT), 2) == native
    for said in module_ranks(4, under_init, replace(HPZ, block=EXACT), 1):
        assert "zero.Init" in said and "write it in the configuration" in said


@pytest.mark.nightly
def test_copies_before_the_first_step_are_upstreams(module_ranks: RunRanks) -> None:
    """Before ``start_step`` upstream gathers; its copies are the first references."""
    exact = replace(HPZ, block={**EXACT, "start_step": 3})
    bits = replace(HPZ, block={**BITS, "start_step": 3})
    for native, coded, eight in module_ranks(4, run, [HPZ, exact, bits]):
        assert (coded.losses, coded.digests) == (native.losses, native.digests)
        assert coded.between["zero"][1] > 0
        assert eight.losses[:3] == native.losses[:3] and eight.losses[4:] != native.losses[4:]
        assert eight.losses[-1] == pytest.approx(native.losses[-1], rel=0.03)


def renewed(fails: str) -> tuple[str, bool]:
    """Return how the renewal after one that failed on rank 1 is sent, and if its table is right."""
    from hybridcomp.channels import Channels
    from hybridcomp.channels.messages.node_copies import CopyGroups, renew, state_of
    from hybridcomp.config import CompressionConfig

    channel = Channels(CompressionConfig.parse(EXACT))["zero"]
    groups, native = CopyGroups.of(2, "test"), (NUMEL, torch.bfloat16)
    failing = dist.get_rank() == 1
    old, new, newer = (
        torch.full((4, NUMEL), value, dtype=torch.bfloat16) for value in (1.0, 1.25, 1.5)
    )
    own = slice(groups.shares.start, groups.shares.stop)
    held = renew(channel, groups, old[dist.get_rank()], None, native)
    if failing and fails == "before":
        stopped = patch.object(CopyGroups, "old_share", side_effect=MemoryError)
        with stopped, pytest.raises(MemoryError):
            renew(channel, groups, new[1], held, native)
    table = renew(channel, groups, new[dist.get_rank()], held.clone(), native)
    if not failing or fails == "before":
        held = table
    sent = state_of(channel, groups, lambda: ([held.view(-1)], False), held.device)
    steps_from = None if sent == "whole" else held
    table = renew(channel, groups, newer[dist.get_rank()], steps_from, native)
    return sent, torch.equal(table, newer[own])


@pytest.mark.parametrize(("fails", "sent"), [("before", "steps"), ("after", "whole")])
def test_a_rank_that_fails_in_a_renewal(module_ranks: RunRanks, fails: str, sent: str) -> None:
    """A failure before the send retries; after a lost receive everything is sent in full."""
    assert module_ranks(4, renewed, fails) == [(sent, True)] * 4
