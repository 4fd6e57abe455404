"""What ``bench_levels.py`` times: sums and gathers within their bound, and what they send."""

from __future__ import annotations

from math import isnan

import pytest
import torch
import torch.distributed as dist

from bench import bench_levels
from bench.bench_levels import ARMS, REFERENCE, SEGMENT, Arm, of_bound, planned
from hybridcomp.codecs import make_codec
from tests.ranks import run_ranks

CODEC = {"codec": "blockint", "bits": 8, "error_bound": 0.05}
NUMEL = 8 * SEGMENT


def arms() -> dict[str, tuple[float, float, float, float]]:
    """By arm: errors of a sum and a gather over what is allowed, bytes to the other site."""
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(dist.get_rank()))
    most = values.view(-1, SEGMENT).abs().amax(1)
    exact: dict[str, torch.Tensor] = {}
    found: dict[str, tuple[float, float, float, float]] = {}
    for name, hierarchy in ARMS.items():
        arm = Arm(hierarchy, CODEC, values)
        errors = []
        for kind in bench_levels.KINDS:
            result, seconds = arm.run(kind)
            exact.setdefault(kind, result.clone())
            bound = arm.bound(kind, 0.05)
            assert (bound < 0.05) == arm.inner
            errors.append(of_bound(result, exact[kind], most.amax().expand(8) * 8, bound))
            assert seconds > 0
        sent: tuple[float, float] = (0, 0)
        if arm.channels is not None:
            every = [arm.channels.ledger.interval[n, "forward"] for n in ("dp", "zero")]
            sent = every[0].inter_nbytes, every[1].inter_nbytes
        found[name] = (errors[0], errors[1], *sent)
    return found


def test_every_arm_stays_within_its_bound_and_sends_its_plan() -> None:
    results = run_ranks(8, arms)
    assert all(0 <= error < 1 for found in results for one in found.values() for error in one[:2])
    codec = make_codec("blockint", bits=8)
    assert results[0]["three levels, 8 bits inside"][0] > results[0]["three levels"][0] > 0
    for name in (
        "two levels: sites",
        "three levels",
        "three levels, 8 bits inside",
    ):  # the ledger counts what leaves a site
        for index, kind in enumerate(bench_levels.KINDS):
            sent = sum(found[name][2 + index] for found in results[:4])
            plan = planned(kind, ARMS[name], NUMEL, codec)
            receivers = 2 if kind == "gather" else 1  # a ring passes a payload on
            assert sent * receivers >= plan >= sent, (name, kind, sent, plan)


def test_planned_bytes() -> None:
    codec = make_codec("blockint", bits=8)
    whole = codec.wire_nbytes(NUMEL // 8, torch.float32) * 8
    plans = {name: planned("sum", ARMS[name], NUMEL, codec) / whole for name in ARMS}
    assert isnan(plans.pop("native"))
    assert plans == pytest.approx(
        {
            "one level": 4,
            "two levels: nodes": 2,
            "two levels: sites": 1,
            "three levels": 1,
            "three levels, 8 bits inside": 1,
        },
        rel=0.01,
    )
    assert planned("gather", [2, 2], NUMEL, codec) == whole / 2


def test_rows_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {REFERENCE: [0.2, 0.4, 0.3], "three levels": [0.1] * 3}
    row = bench_levels.row(seconds, "three levels", 1_070_000, 1_014_000, 0.04)
    assert row["x two levels"] == pytest.approx(3.0)
    assert "| three levels | 1.01 | 1.07 | 100 | 3 | 0.04 |" in bench_levels.table(
        {"three levels": row}
    )
    with pytest.raises(SystemExit):
        bench_levels.parse(["--arms", "three levels"])
    assert "expected native and" in capsys.readouterr().err
