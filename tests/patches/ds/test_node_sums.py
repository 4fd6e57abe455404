"""Sums of micro-batches inside the node under DeepSpeed, 4 ranks as 2 nodes: ``dp.accumulate``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.ranks import RankPool

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.selection import by_day
from tests.training.integers import USED, Integers
from tests.training.trainer import Job, digests, make_engine, run

NODE = {"codec": "expcode", "accumulate": "node"}
BLOCK: dict[str, Any] = {"dp": NODE, "min_bytes": 0, "hierarchy": 2}
STEPS = 2
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
UNMANAGED = {"managed_gradient_accumulation": False}
JOBS = {
    "ZeRO 2": Job(2),
    "ZeRO 2, bf16 and overlap": Job(2, "bf16", zero={"overlap_comm": True}),
    "ZeRO 2, summed in fp32": Job(2, "bf16", bf16_optimizer=True),
    "ZeRO 2, offload": Job(2, "bf16", zero=OFFLOAD),
    "ZeRO 2, unmanaged": Job(2, ds_json=UNMANAGED),
    "ZeRO 3": Job(3),
    "ZeRO 3, bf16 and offload": Job(3, "bf16", zero=OFFLOAD),
    "ZeRO 3, unmanaged": Job(3, ds_json=UNMANAGED),
}
#: cases of ``USED`` by job; default: all. With a host optimizer upstream loses gradients of
#: parameters unused by the last micro-batch; node sums lose none
CASES = {name: ["one in the last"] for name in JOBS if "," in name}
CASES |= {name: ["all", "some in the last alone"] for name in JOBS if "offload" in name}


@dataclass
class Found:
    """A rank's results: parameters, peak bytes kept, bytes between nodes, native bytes."""

    digests: dict[str, str]
    kept: int = 0
    between: int = 0
    raw: int = 0


def trained(job: Job, used: list[str], steps: int = STEPS) -> Found:
    """Train steps whose micro-batches use the parts ``used``."""
    from hybridcomp.channels import channels_of

    unmanaged = job.ds_json == UNMANAGED
    engine = make_engine(replace(job, accumulation=len(used)), Integers())
    channels, kept = channels_of(engine), 0
    for step in range(steps):
        for number, names in enumerate(used):
            engine.backward(engine(names, 1000 * step + 10 * number + dist.get_rank()))
            if channels is not None:
                kept = max(kept, channels.node_sums.nbytes)
            if not unmanaged or number == len(used) - 1:
                engine.step()
        assert channels is None or not channels.node_sums.nbytes, "all has crossed"
    found = Found(digests(engine), kept)
    if channels is not None:
        entry = channels.ledger.interval["dp", "forward"]
        found.between, found.raw = int(entry.inter_nbytes), int(entry.raw_nbytes)
    engine.destroy()
    return found


def all_trained(jobs: list[tuple[Any, ...]]) -> list[Found]:
    return [trained(*job) for job in jobs]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "name",
    by_day(JOBS, ["ZeRO 2, bf16 and overlap", "ZeRO 3, unmanaged"]),
)
def test_integers_are_summed_as_natively(pool: RankPool, name: str) -> None:
    """For all sets of used parameters: the same bits, and nothing is kept."""
    native, node = JOBS[name], replace(JOBS[name], block=BLOCK)
    cases = CASES.get(name, list(USED))
    jobs = [(job, USED[case]) for case in cases for job in (native, node)]
    for of_rank in pool.run(all_trained, jobs, timeout=400):
        for case, expected, found in zip(cases, of_rank[::2], of_rank[1::2], strict=True):
            assert found.digests == expected.digests, case
            assert found.kept > 0, case


def common_trained(jobs: list[tuple[Any, ...]]) -> list[Found]:
    """Run ``all_trained`` with vectors that tensor-parallel ranks share."""
    from hybridcomp.patches.ds import job_facts

    def vectors(engine: Any) -> frozenset[str]:
        named = engine.module.named_parameters()
        return frozenset(
            job_facts.unique_name(engine, name, parameter)
            for name, parameter in named
            if len(getattr(parameter, "ds_shape", parameter.shape)) < 2
        )

    with patch.object(job_facts, "common_names", vectors):
        return all_trained(jobs)


def test_common_parameters_of_tensor_parallel_ranks(pool: RankPool) -> None:
    """They are summed exactly beside the message, and also inside the node."""
    jobs = [(Job(2), USED["all"]), (Job(2, block=BLOCK), USED["all"])]
    for native, found in pool.run(common_trained, jobs, timeout=400):
        assert found.digests == native.digests and found.kept > 0


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [2, 3])
def test_sums_in_three_levels(stage: int) -> None:
    """Two sites of two nodes of two ranks: each rank keeps its shard of its site's sums."""
    sites, nodes = ({**BLOCK, "hierarchy": one} for one in ([2, 2], 4))
    jobs = [(Job(stage, block=one), USED["one in the last"]) for one in (None, sites, nodes)]
    with RankPool(8) as ranks:
        for native, deep, flat in ranks.run(all_trained, jobs, timeout=400):
            assert deep.digests == flat.digests == native.digests
            assert deep.kept == flat.kept > 0


@pytest.mark.parametrize("stage", by_day([2, 3], [3]))
def test_an_eighth_crosses(pool: RankPool, stage: int) -> None:
    """With 8 micro-batches, also for messages below ``min_bytes``, which cross losslessly."""
    fixed = {"codec": "bf16"}
    block = {**BLOCK, "dp": fixed}
    blocks = [
        block,
        {**block, "dp": {**fixed, "accumulate": "node"}},
        {**BLOCK, "min_bytes": 1 << 20},
    ]
    jobs = [(Job(stage, block=one), USED["all"], 1) for one in blocks]
    every, once, small = (
        [sum(getattr(found, name) for found in ranks) for name in ("between", "raw")]
        for ranks in zip(*pool.run(all_trained, jobs, timeout=400), strict=True)
    )
    assert every[0] == 8 * once[0] > 0
    assert every[1] == once[1] == small[1], "native bytes are those of all micro-batches"
    assert 0 < small[0] < 3 * once[0], "fp32 without loss, once"


@pytest.mark.parametrize("stage", by_day([2, 3], [2]))
def test_losses_follow_and_overflows_are_seen(pool: RankPool, stage: int) -> None:
    """With 4 bits and error feedback; an infinite gradient in any micro-batch skips the step."""
    dp = {"codec": "blockint", "bits": 4, "error_feedback": True, "accumulate": "node"}
    native = Job(stage, "fp16", accumulation=4, steps=6, nan_step=4,
                 ds_json={"fp16": {"enabled": True, "initial_scale_power": 8}})  # fmt: skip
    jobs = [native, replace(native, block={**BLOCK, "dp": dp})]
    for expected, found in pool.run(run, jobs, timeout=400):
        assert found.skipped == expected.skipped and sum(found.skipped) == 1
        del expected.losses[4], found.losses[4]
        assert sum(found.losses) == pytest.approx(sum(expected.losses), rel=0.03)


def freed(stage: int, how: str, folder: str) -> tuple[int, int, list[str]]:
    """Return the kept bytes before and after ``how``, and the remaining names."""
    from hybridcomp.channels import channels_of

    engine = make_engine(Job(stage, accumulation=2, block=BLOCK), Integers())
    channels = channels_of(engine)
    assert channels is not None
    engine.save_checkpoint(folder, tag="x")
    engine.backward(engine("abc", dist.get_rank()))
    engine.step()
    before = channels.node_sums.nbytes
    if how == "load":
        engine.load_checkpoint(folder, tag="x")
    elif how == "zero_grad":
        engine.optimizer.zero_grad()
    elif how == "save":
        engine.save_checkpoint(folder, tag="y")
    elif how == "destroy":
        engine.destroy()
    outcome = before, channels.node_sums.nbytes, sorted(channels.node_sums.left)
    if how != "destroy":
        engine.destroy()
    return outcome


WAYS = [(2, "load"), (3, "zero_grad"), (2, "destroy"), (2, "save")]


@pytest.mark.parametrize(("stage", "how"), by_day(WAYS, WAYS[:2]))
def test_who_frees_what_is_kept(pool: RankPool, stage: int, how: str, tmp_path: Any) -> None:
    """A load, ``zero_grad`` at stage 3 and ``destroy`` free it; a checkpoint does not."""
    for before, after, left in pool.run(freed, stage, how, str(tmp_path), timeout=200):
        assert before > 0
        assert (after == before and left) if how == "save" else (after == 0 and not left)


def refused() -> list[str]:
    """Return this rank's engine error, by ranks per node."""
    from hybridcomp.errors import ConfigError

    found = []
    for hierarchy in (4, "auto"):
        try:
            make_engine(Job(2, accumulation=2, block={**BLOCK, "hierarchy": hierarchy}))
        except ConfigError as error:
            found.append(str(error))
    return found


def test_one_node_is_refused_on_all_ranks(pool: RankPool) -> None:
    for told in pool.run(refused):
        assert len(told) == 2 and all("all ranks share one node" in one for one in told)
        assert all(one.startswith("compression.dp.accumulate") for one in told)
