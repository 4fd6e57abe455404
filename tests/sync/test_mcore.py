"""Islands under megatron-core: exact if lossless, bit-identical, resumable, bad input."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybridcomp
from hybridcomp.errors import AgreementError, ConfigError
from hybridcomp.patches.mcore import islands
from tests.ranks import run_ranks
from tests.sync import simulated
from tests.sync.jobs import FED_BACK, beside, gathered, rendezvous
from tests.sync.jobs import block as block_at
from tests.sync.mcore_job import (
    MegatronIslandJob,
    block,
    quadratic_after,
    restarted,
    weights_after,
)  # fmt: skip
from tests.training.mcore_trainer import Job, armed, build, initialize, model_config, prepare, wrap

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.core") is None,
    reason="megatron-core is not installed",
)

LOCAL: dict[str, Any] = {"preset": "local-sgd", "every": 1}
LOSSY: dict[str, Any] = {**FED_BACK, "every": 2}
PLAIN: dict[str, Any] = {"clip": 0.0, "lr": 0.05, "steps": 3, "layers": 1}
SGD: dict[str, Any] = {**PLAIN, "optimizer": "sgd"}
SHARDED: dict[str, Any] = {**PLAIN, "linear": True, "distributed_optimizer": True}
#: rank orders in which islands of consecutive ranks hold whole pipelines
PIPELINES_FIRST = "tp-cp-ep-pp-dp"


def every_step(jobs: list[tuple[Job, int, str]]) -> None:
    """Islands that meet every step, with SGD inside and outside, equal a single job."""
    prepare()
    for job, size, codec in jobs:
        native = weights_after(job)
        # islands begin with other weights: all take the first one's
        first = 0 if dist.get_rank() < size else 5
        ours = dataclasses.replace(job, block=block(**LOCAL, islands=size, codec=codec))
        found = weights_after(ours, first)
        atol = 1e-2 if job.bf16 else 1e-6
        assert float((found - native).abs().max()) <= atol, (job, size)


def of_context_ranks() -> None:
    """Run DiLoCo with both ranks of an island as context ranks of one replica."""
    prepare()
    rule = {"preset": "diloco", "every": 3, "outer": {"lr": 0.5, "momentum": 0.8, "nesterov": True}}
    for sharded in (False, True):
        found = quadratic_after(block(**rule, islands=2), steps=9, cp=2, sharded=sharded)
        expected = simulated.diloco(2, 9, 3, 0.5, 0.8, True)[dist.get_rank() // 2]
        atol = 1e-4 if sharded else 1e-12  # the distributed optimizer keeps fp32
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=atol)


def test_context_ranks_inside_an_island() -> None:
    run_ranks(4, of_context_ranks, timeout=600.0)


def reported(folder: str) -> None:
    """Check the ledger's row of meetings."""
    path = Path(folder, "ledger.jsonl")
    told = {**block(**LOSSY), "ledger": {"every": 4, "jsonl": str(path)}}
    weights_after(Job(**{**PLAIN, "steps": 4}, block=told))
    if dist.get_rank() == 0:
        record = json.loads(path.read_text().splitlines()[0])
        assert record["sync"]["meetings"] == 2.0
        assert record["dimensions"]["sync"]["forward"]["messages"] > 0


@contextmanager
def groups_of(job: Job) -> Iterator[None]:
    with armed(job):
        initialize(job)
        yield


def refused() -> None:
    """Reject groups that span islands, and blocks that differ."""
    plain = Job(**SGD, block=block(**LOCAL))
    with groups_of(plain):
        island = [dist.get_rank()]
        with pytest.raises(ConfigError) as caught:
            wrap(plain, model_config(plain), [torch.nn.Linear(2, 2)], pg_collection=None)
        words = f"found ranks [0, 1]; the island of this rank is {island}; build DistributedData"
        where = "get_megatron_optimizer(...) in setup_model_and_optimizer"
        assert words in str(caught.value) and "island_pg_collection()" in str(caught.value)
        assert where in str(caught.value) and "\n" not in str(caught.value)
    with groups_of(plain):
        job = MegatronIslandJob(plain).train(1)
        _, job.optimizer = build(plain)
        with pytest.raises(ConfigError, match="found a second ChainedOptimizer that steps"):
            job.train(1)
    for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):
        with groups_of(plain):
            job = MegatronIslandJob(plain)
            setattr(job.optimizer.chained_optimizers[0].config, name, True)
            with pytest.raises(ConfigError, match=f"sync: found {name}; the weights are not"):
                job.train(1)
    sharded = Job(**SHARDED, block=block(**LOCAL))
    with groups_of(sharded):
        job = MegatronIslandJob(sharded)
        job.optimizer.chained_optimizers[0].data_parallel_group = dist.group.WORLD
        with pytest.raises(ConfigError, match=r"an optimizer with shards over ranks \[0, 1\]; the"):
            job.train(1)
    words = r"found the pipeline group of ranks \[0, 1\]; an island, here \[0\], holds whole"
    with groups_of(Job(pp=2, block=block(**LOCAL))), pytest.raises(ConfigError, match=words):
        hybridcomp.island_pg_collection()
    with armed(plain), pytest.raises(ConfigError, match="call initialize_model_parallel before"):
        hybridcomp.island_pg_collection()
    with groups_of(Job(block={"dp": "bf16"})), pytest.raises(ConfigError, match='no block with "s'):
        hybridcomp.island_pg_collection()
    unlike = block(**{**LOCAL, "every": 1 + dist.get_rank()})
    with armed(Job(block=unlike)), pytest.raises(AgreementError, match=r"sync.every.*rank"):
        initialize(Job())


def anew() -> None:
    """Build a model, drop it and build it again: it trains in islands."""
    prepare()
    plain = Job(**SGD, block=block(**LOCAL))
    with groups_of(plain):
        given_up = MegatronIslandJob(plain)
        vars(given_up.chunks[0])["itself"] = given_up  # only rank 1 collects it before
        del given_up
        if dist.get_rank():
            gc.collect()
        job = MegatronIslandJob(plain)
        known = islands._jobs[job.session].wrapper
        assert known is not None and known() is job.chunks[0]
        assert job.train(1).meetings.clock == 1


def overflowing(kinds: tuple[bool, ...]) -> None:
    """Overflow in fp16, which shrinks an island's loss scale; all meet as usual."""
    prepare()
    for sharded in kinds:
        told = block(preset="local-sgd", every=2)
        settings = {**SHARDED, "linear": False} if sharded else PLAIN
        job = Job(**settings, loss_scale=2.0**10, block=told)
        said = io.StringIO()
        with groups_of(job):
            ours = MegatronIslandJob(job).train(1)
            scaler = ours.optimizer.chained_optimizers[0].grad_scaler
            if dist.get_rank() == 1:
                scaler._scale.fill_(2.0**40)  # fp16 gradients end at 2^16
            before = ours.weights()
            with contextlib.redirect_stdout(said):
                ours.train(1)
            assert ours.meetings.clock == 2
            row = ours.meetings.row()
            assert row is not None and (row["meetings"], row["skipped"]) == (1.0, 0.0)
            mine = ours.weights()
            assert torch.equal(*gathered(mine)) and bool(mine.isfinite().all())
            assert not torch.equal(mine, before)  # the mean's
            assert float(scaler.scale) == (2.0**39 if dist.get_rank() else 2.0**10)
        words = (
            "sync: step 2: island 1 skips its step for an overflow, goes on with a loss scale of "
            "5.49756e+11, and meets the others as ever"
        )
        assert (words in said.getvalue()) == (dist.get_rank() == 1), said.getvalue()


def by_day(folder: str) -> None:
    anew()
    overflowing((True,))
    every_step([(Job(**SHARDED, bf16=True, overlap=True), 1, "expcode")])
    reported(folder)
    expected, found = restarted(RESUMED, folder, 3)
    assert torch.equal(expected, found)
    refused()


#: saved with a meeting in flight
RESUMED = Job(
    steps=6, layers=1, bf16=True, distributed_optimizer=True,
    block=block(**{**LOSSY, "preset": "wsp"}),
)  # fmt: skip


def test_two_islands(tmp_path: Path) -> None:
    run_ranks(2, by_day, str(tmp_path), timeout=600.0)


@pytest.mark.nightly
def test_two_ranks_are_the_native_job() -> None:
    run_ranks(2, overflowing, (False,))
    found = [Job(**SGD), Job(**SGD, bf16=True), Job(**SHARDED), Job(**SHARDED, overlap=True)]
    run_ranks(2, every_step, [(job, 1, "none") for job in found], timeout=600.0)


def compressed() -> None:
    """Compare gathers after meetings with native ones, under lossless codecs and deltas."""
    prepare()
    for overlap in (False, True):
        told = block(preset="diloco", every=2, codec="none", islands=2)
        job = Job(**{**SHARDED, "steps": 5}, bf16=True, overlap=overlap, block=told)
        native = weights_after(job)
        for zero in ("stepcode", {"codec": "mpc", "delta": True}):
            encoded = weights_after(dataclasses.replace(job, block={**told, "zero": zero}))
            assert torch.equal(native, encoded), (zero, overlap)


def tied() -> None:
    """Reject a weight that two stages share, before sending anything."""
    prepare()
    job = Job(pp=2, order=PIPELINES_FIRST, tied=True, block=block(**LOCAL, islands=2))
    words = "found share_embeddings_and_output_weights over pipeline stages; first and last"
    with groups_of(job), pytest.raises(ConfigError, match=words):
        build(job)


def alike(folder: str) -> None:
    """Check that ranks of a position agree after lossy meetings, and tensor ranks on norms."""
    prepare()
    for sharded in (False, True):
        told = block(**LOSSY, islands=2)
        job = Job(tp=2, layers=1, steps=4, distributed_optimizer=sharded, block=told)
        with groups_of(job):
            ours = MegatronIslandJob(job).train(job.steps)
            every = gathered(ours.weights())
            assert torch.equal(every[0], every[2]) and torch.equal(every[1], every[3])
            common = torch.cat(
                [
                    p.detach().flatten()
                    for p in ours.chunks[0].module.parameters()
                    if not p.tensor_model_parallel
                ]
            )
            assert all(torch.equal(one, common) for one in gathered(common))
        expected, found = restarted(dataclasses.replace(job, steps=6), f"{folder}/{sharded}", 3)
        assert torch.equal(expected, found)


@pytest.mark.nightly
def test_compressed_gathers() -> None:
    run_ranks(4, compressed, timeout=600.0)


@pytest.mark.nightly
def test_four_ranks(tmp_path: Path) -> None:
    run_ranks(4, alike, str(tmp_path), timeout=600.0)
    run_ranks(4, tied, timeout=600.0)


@pytest.mark.nightly
def test_four_ranks_are_the_native_job() -> None:
    found = [
        (Job(**SGD, tp=2), 2, "none"), (Job(**SHARDED, tp=2), 2, "expcode"),
        (Job(**SGD), 2, "expcode"), (Job(**SHARDED), 2, "none"),
        (Job(**SHARDED, bf16=True, sequence_parallel=True, tp=2), 2, "none"),
        (Job(**{**SHARDED, "layers": 2}, pp=2, order=PIPELINES_FIRST), 2, "none"),
        (Job(**SHARDED, experts=4, ep=2), 2, "none"),
    ]  # fmt: skip
    run_ranks(4, every_step, found, timeout=600.0)


def whole(address: str, steps: int) -> torch.Tensor:
    """Train an island that is a single-rank job."""
    prepare()
    job = Job(steps=steps, layers=1, block=block_at(address, **LOSSY))
    with groups_of(job):
        ours = MegatronIslandJob(job).train(steps)
        ours.meetings.close()
        return ours.weights()


@pytest.mark.nightly
def test_islands_that_are_jobs() -> None:
    with rendezvous() as address:
        one, other = beside((1, whole, (address, 4)), (1, whole, (address, 4)))
    assert torch.equal(one[0], other[0])
