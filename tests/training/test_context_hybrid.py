"""Sharded sequences with tensor ranks, pipeline stages, replicas and ZeRO: the same losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.ranks import Trained, run_ranks
from tests.selection import by_day
from tests.training.context_trainer import Job, run

pytest.importorskip("deepspeed")

EIGHT: dict[str, Any] = {
    "cp": {"codec": "blockint", "bits": 8}, "min_bytes": 0, "ledger": {"every": 10**6},
}  # fmt: skip


#: layouts as in a plan: two rings of two, as replicas or stages; one ring of four
LAYOUTS: dict[str, tuple[Job, dict[str, int]]] = {
    "replicas": (Job(stage=1), {"data": 2, "context": 2}),
    "encoded replicas": (Job(stage=2, block=EIGHT), {"data": 2, "context": 2}),
    "one": (Job(cp=4), {"data": 1, "context": 4}),
    # pipelines last: DeepSpeed keeps a process's grid
    "stages": (Job(pp=2), {"data": 1, "stages": 2, "context": 2}),
    "encoded stages": (Job(pp=2, block=EIGHT), {"data": 1, "stages": 2, "context": 2}),
}


@pytest.fixture(scope="module")
def four() -> Iterator[Trained]:
    with Trained(4, run) as trained:
        yield trained


@pytest.mark.parametrize("name", by_day(LAYOUTS, ["one", "encoded stages"]))
def test_rings_beside_replicas_and_stages(four: Trained, name: str) -> None:
    job, told = LAYOUTS[name]
    for found in four(job):
        assert {key: found.told[key] for key in told} == told
        if job.block is None:
            assert found.losses == pytest.approx(found.whole, rel=1e-5)
            continue
        assert found.losses == pytest.approx(found.whole, rel=5e-3)
        assert found.losses != found.whole
        for way in ("forward", "backward"):
            messages, untouched, *_ = found.ledger["cp", way]
            assert messages > 0 and not untouched


@pytest.mark.slow
@pytest.mark.nightly
def test_rings_beside_tensor_ranks_and_stages() -> None:
    """Eight ranks: two tensor ranks, two stages, two that share a sequence; and two replicas."""
    pytest.importorskip("megatron.core")
    jobs = [Job(tp=2, pp=2), Job(tp=2, stage=1), Job(tp=2, pp=2, block=EIGHT)]
    for staged, replicas, encoded in run_ranks(8, run, jobs, timeout=300.0):
        assert staged.losses == pytest.approx(staged.whole, rel=1e-5)
        assert replicas.losses == pytest.approx(replicas.whole, rel=1e-5)
        assert encoded.losses == pytest.approx(encoded.whole, rel=5e-3)
        assert (replicas.told["data"], replicas.told["tensor"]) == (2, 2)
