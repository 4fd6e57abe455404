"""Sharded sequences with tensor ranks, pipeline stages, replicas and ZeRO: the same losses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.training.context_trainer import Job, run

pytest.importorskip("deepspeed")

EIGHT: dict[str, Any] = {
    "cp": {"codec": "blockint", "bits": 8}, "min_bytes": 0, "ledger": {"every": 10**6},
}  # fmt: skip


def test_rings_beside_replicas_and_stages() -> None:
    """Four ranks: two rings of two, as replicas or stages; layouts as in a plan."""
    # pipelines last: DeepSpeed keeps a process's grid
    jobs = [Job(stage=1), Job(stage=2, block=EIGHT), Job(cp=4), Job(pp=2), Job(pp=2, block=EIGHT)]
    for replicas, encoded, one, staged, both in run_ranks(4, run, jobs, timeout=300.0):
        for native in (replicas, staged, one):
            assert native.losses == pytest.approx(native.whole, rel=1e-5)
        for eight in (encoded, both):
            assert eight.losses == pytest.approx(eight.whole, rel=5e-3)
            assert eight.losses != eight.whole
            for way in ("forward", "backward"):
                messages, untouched, _ = eight.ledger["cp", way]
                assert messages > 0 and not untouched
        assert (replicas.told["data"], replicas.told["context"]) == (2, 2)
        assert (staged.told["data"], staged.told["stages"], staged.told["context"]) == (1, 2, 2)
        assert (one.told["data"], one.told["context"]) == (1, 4)


@pytest.mark.slow
def test_rings_beside_tensor_ranks() -> None:
    """Four ranks: two tensor ranks, two that share a sequence."""
    pytest.importorskip("megatron.core")
    for (encoded,) in run_ranks(4, run, [Job(tp=2, block=EIGHT)], timeout=300.0):
        assert encoded.losses == pytest.approx(encoded.whole, rel=5e-3)
        assert encoded.losses != encoded.whole
        assert (encoded.told["data"], encoded.told["tensor"]) == (1, 2)


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
