"""Levels under DeepSpeed: 4 ranks as 2 nodes, 8 as 2 sites, ZeRO, and a later layout change."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from hybridcomp.collectives.hierarchical.discovery import Hierarchy
from tests.ranks import RunRanks
from tests.selection import by_day

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.training.trainer import Job, make_engine, run, train_step

DP = {"codec": "blockint", "bits": 4, "error_feedback": True}
LEVELS = {"dp": DP, "zero": {"codec": "blockint", "bits": 8}, "min_bytes": 0, "hierarchy": 2}
JOBS = {
    "zero0": Job(0, steps=6),
    "zero1": Job(1, "bf16", steps=6),
    "zero2": Job(2, steps=6),
    "zero3": Job(3, steps=6),
    "bf16_optimizer": Job(1, "bf16", steps=6, bf16_optimizer=True),
}


def with_block(job: Job, hierarchy: Hierarchy) -> Job:
    block: dict[str, Any] = {**LEVELS, "hierarchy": hierarchy}
    if job.stage == 0:
        del block["zero"]
    return replace(job, block=block)


@pytest.mark.parametrize("name", by_day(JOBS, ["zero1", "zero3"]))
def test_training_in_two_levels(module_ranks: RunRanks, name: str) -> None:
    """Replicas stay equal, the loss follows the native one, and fewer bytes cross the nodes."""
    job = JOBS[name]
    # natively; every rank a node; two ranks a node
    jobs = [job, with_block(job, 1), with_block(job, 2)]
    native, flat, levels = zip(*module_ranks(4, run, jobs), strict=True)
    ends = [sum(sum(o.losses[-4:]) for o in ranks) for ranks in (native, levels)]
    assert abs(ends[1] - ends[0]) < 0.03 * ends[0], ends
    for ranks in (native, flat, levels):
        assert all(outcome.digests == ranks[0].digests for outcome in ranks)
    for dimension in ("dp", "zero") if job.stage else ("dp",):
        ring, nodes = (
            [sum(o.between[dimension][i] for o in ranks) for i in (0, 1)]
            for ranks in (flat, levels)
        )
        assert ring[0] == 2 * nodes[0] > 0, "a ring crosses at 4 or at 2 of its 4 links"
        assert 0 < nodes[1] < 0.67 * ring[1], (dimension, ring, nodes)


def residual_sum(job: Job, load: str | None, save: str | None) -> dict[str, float]:
    """Return per parameter the sum of this rank's residuals, after training or as loaded."""
    from hybridcomp.channels import channels_of
    from hybridcomp.channels.residuals.saved_residuals import held_in

    engine = make_engine(job)
    if load is not None:
        engine.load_checkpoint(load, tag="x")
    for step in range(3 if load is None else 0):
        train_step(engine, job, step)
    if save is not None:
        engine.save_checkpoint(save, tag="x")
    channels = channels_of(engine)
    assert channels is not None
    sums: dict[str, float] = {}
    for name, (_, values) in held_in(channels.residuals.state_dict()):
        sums[name] = sums.get(name, 0.0) + float(values.double().sum())
    engine.destroy()
    return sums


@pytest.mark.parametrize(("before", "after"), by_day([(1, 2), (2, 1)], [(2, 1)]))
def test_residuals_survive_other_nodes(
    module_ranks: RunRanks, before: int, after: int, tmp_path: Any
) -> None:
    """Their sum over the ranks is the gradient still to be sent, for any distribution."""
    job = JOBS["zero2"]
    saved = module_ranks(4, residual_sum, with_block(job, before), None, str(tmp_path))
    loaded = module_ranks(4, residual_sum, with_block(job, after), str(tmp_path), None)
    hold_sums(saved, loaded)


def hold_sums(saved: list[dict[str, float]], loaded: list[dict[str, float]]) -> None:
    names = set().union(*saved)
    assert len(names) == 8
    for name in names:
        before, after = (sum(found.get(name, 0.0) for found in ones) for ones in (saved, loaded))
        assert after == pytest.approx(before, rel=1e-3, abs=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(JOBS))
def test_training_in_three_levels(module_ranks: RunRanks, name: str, tmp_path: Any) -> None:
    """Two sites of two nodes: the loss follows that of two levels, and as much leaves a site."""
    job = JOBS[name]
    jobs = [with_block(job, 4), with_block(job, [2, 2])]
    sites, levels = zip(*module_ranks(8, run, jobs), strict=True)
    losses = [sum(sum(o.losses[-4:]) for o in outcomes) for outcomes in (sites, levels)]
    assert abs(losses[1] - losses[0]) < 0.02 * losses[0], losses
    assert all(outcome.digests == levels[0].digests for outcome in levels)
    for dimension in ("dp", "zero") if job.stage else ("dp",):
        two, three = (
            [sum(o.between[dimension][i] for o in outcomes) for i in (0, 1)]
            for outcomes in (sites, levels)
        )
        assert three == two and 0 < three[1] < three[0], "what leaves a site is the same"
    saved = module_ranks(8, residual_sum, jobs[1], None, str(tmp_path))
    hold_sums(saved, module_ranks(8, residual_sum, jobs[0], str(tmp_path), None))
