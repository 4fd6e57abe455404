"""Islands of one job that publish: the first does, also between meetings."""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hybridcomp
from hybridcomp.errors import PublishError
from hybridcomp.session.engine_session import session_of
from tests.publishing.made import error_of, received
from tests.ranks import run_ranks
from tests.selection import by_day
from tests.sync.jobs import beside, gathered, rendezvous
from tests.sync.jobs import block as islands_at
from tests.sync.torch_job import Job
from tests.training.trainer import Job as DeepSpeedJob
from tests.training.trainer import make_engine, parameters, train_step


def published(folder: Path, engine: str) -> None:
    """Publish after steps with and without a meeting."""
    block: dict[str, Any] = {
        "sync": {"preset": "local-sgd", "islands": 2, "every": 3},
        "publish": {"to": str(folder), "every": 2, "dtype": "bf16", "wait": True},
        "min_bytes": 0,
        "ledger": {"every": 3},
    }
    job, kept = Job(block, engine).build(), []
    for step in range(2, 9, 2):
        first, *_, last = gathered(job.train(2).weights())
        assert torch.equal(first, last) == (step == 6)
        kept.append(first.to(torch.bfloat16))
    names = [name.removeprefix("module.") for name, _ in job.model.named_parameters()]
    hybridcomp.detach(job.model)
    dist.barrier()  # until everything is written
    receiver = hybridcomp.WeightReceiver(folder)
    for version, expected in enumerate(kept, 1):
        receiver.update(version)
        whole = dict(receiver.tensors())
        assert torch.equal(torch.cat([whole[name].flatten() for name in names]), expected)


@pytest.mark.parametrize("engine", by_day(["ddp", "fsdp2"], ["fsdp2"]))
def test_the_first_island_publishes(tmp_path: Path, engine: str) -> None:
    run_ranks(4, published, tmp_path, engine)


def by_script(folder: Path) -> None:
    """Publish from both islands: to separate folders, and to a shared one, where one fails."""
    job = Job({"sync": {"preset": "local-sgd", "islands": 1, "every": 2}, "min_bytes": 0}).build()
    rank = dist.get_rank()
    job.train(1)
    each = hybridcomp.publish(job.model, folder / str(rank), dtype="bf16")
    each.publish()
    receiver = received(folder / str(rank))
    weights = dict(job.model.named_parameters())
    assert (found := dict(receiver.tensors()))
    for name, tensor in found.items():
        of = weights.get(name, weights.get(f"module.{name}"))
        assert of is not None and torch.equal(tensor, of.detach().to(torch.bfloat16))
    both = hybridcomp.publish(job.model, folder / "one", dtype="bf16")
    dist.barrier()
    if rank == 0:
        both.publish()
    dist.barrier()
    if rank == 1:
        with pytest.raises(PublishError, match="that of rank 0 of this job, and this is that of r"):
            both.publish()
    dist.barrier()
    both.close()
    in_turn = hybridcomp.publish(job.model, folder / "one", dtype="bf16")
    dist.barrier()
    if rank == 1:  # a new publisher would continue the other's chain
        with pytest.raises(PublishError, match=r"/one: another job or island publishes there, "):
            in_turn.publish()
    else:
        assert in_turn.publish().version == 2
    dist.barrier()
    assert len(list((folder / "one").glob("v*.json"))) == 2


def test_islands_that_a_script_publishes_need_a_folder_each(tmp_path: Path) -> None:
    run_ranks(2, by_script, tmp_path)


def of_a_job(address: str, folder: Path, name: str) -> str:
    """Publish from an island that is a job; return its messages."""
    job = Job(islands_at(address, name=name, preset="local-sgd")).build().train(2)
    with contextlib.closing(hybridcomp.publish(job.model, folder, dtype="bf16")) as publisher:
        told = error_of(publisher.publish)
        job.train(2)
        hybridcomp.detach(job.model)
        return told


def test_islands_that_are_jobs_need_a_folder_each(tmp_path: Path) -> None:
    with rendezvous() as address:
        (one,), (two,) = beside(*((1, of_a_job, (address, tmp_path, name)) for name in "ab"))
    refused, other = (one, "b") if one else (two, "a")
    assert not (one and two) and f"has what island {other} of this run has saved, and" in refused
    assert len(list(tmp_path.glob("v*.json"))) == 1


def of_deepspeed(folder: Path) -> None:
    block: dict[str, Any] = {
        "sync": {"preset": "local-sgd", "islands": 1, "every": 2},
        "publish": {"to": str(folder), "every": 3, "wait": True},
        "min_bytes": 0,
        "ledger": {"every": 2},
    }
    job = DeepSpeedJob(stage=2, dtype="bf16", block=block)
    engine = make_engine(job)
    for step in range(3):
        train_step(engine, job, step)
    expected = {name: one.clone() for name, one in parameters(engine).items()}
    first, last = gathered(torch.cat([one.flatten() for one in expected.values()]))
    assert not torch.equal(first, last)
    session = session_of(engine)
    assert session is not None
    session.close()  # until everything is written
    engine.destroy()
    dist.barrier()
    receiver = received(folder)
    whole = torch.cat([dict(receiver.tensors())[name].flatten() for name in expected])
    assert torch.equal(whole, first)


def test_the_first_island_of_deepspeed_publishes(tmp_path: Path) -> None:
    run_ranks(2, of_deepspeed, tmp_path, timeout=60.0)


def of_megatron(folder: Path) -> None:
    from tests.sync.mcore_job import MegatronIslandJob
    from tests.sync.test_mcore import groups_of
    from tests.training.mcore_trainer import Job as MegatronJob
    from tests.training.mcore_trainer import prepare

    prepare()
    block: dict[str, Any] = {
        "sync": {"preset": "local-sgd", "islands": 1, "every": 2},
        "publish": {"to": str(folder), "every": 3, "wait": True},
        "min_bytes": 0,
    }
    job = MegatronJob(layers=1, bf16=True, distributed_optimizer=True, block=block)
    with groups_of(job):
        ours = MegatronIslandJob(job).train(3)
        first, last = gathered(ours.weights())
        assert not torch.equal(first, last)
        ours.session.close()
    dist.barrier()
    whole = torch.cat([one.float().flatten() for _, one in received(folder).tensors()])
    assert torch.equal(whole.sort().values, first.sort().values)


@pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.core") is None,
    reason="megatron-core is not installed",
)
def test_the_first_island_of_megatron_publishes(tmp_path: Path) -> None:
    run_ranks(2, of_megatron, tmp_path, timeout=120.0)
