"""What ``bench_gathers.py`` times: gathers that arrive, with the bits of their codecs."""

from __future__ import annotations

import math

import pytest
import torch

from bench import bench_gathers
from bench.bench_gathers import ARMS, EXACT, Gather
from hybridcomp.codecs.exact_steps import typical_steps
from tests.ranks import run_ranks

NUMEL = 20_000


def gathered() -> dict[str, tuple[bool, float, bool]]:
    """By arm: whether the weights arrived bit for bit, bits a value, whether time passed."""
    before = (0.02 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))).bfloat16()
    after = typical_steps(before)
    found = {}
    for name, zero in ARMS.items():
        arm = Gather(zero, before)
        seconds = [arm.run(before, after)[0] for _ in range(2)]
        same = torch.equal(arm.buffer.view(torch.int16), after.view(torch.int16))
        found[name] = (same, arm.bits(), min(seconds) > 0)
    return found


def test_every_arm_gathers() -> None:
    for found in run_ranks(2, gathered):
        assert {name for name, (same, *_) in found.items() if same} == set(EXACT)
        bits = {name: value for name, (_, value, _) in found.items()}
        assert bits["native"] == 16.0 and 8.2 < bits["blockint 8"] < 8.4
        assert bits["stepcode"] < 2.0 < bits["mpc, delta"] < bits["expcode"]
        assert all(passed for *_, passed in found.values())


def test_rows_and_table() -> None:
    seconds = {"native": [(0.2, 0.01), (0.4, 0.01), (0.3, 0.02)], "stepcode": [(0.1, 0.03)] * 3}
    row = bench_gathers._row(seconds, "stepcode", 1.7)
    assert abs(row["x native"] - 3.0) < 1e-6 and row["bits"] == 1.7
    assert abs(row["core ms"] - 20.0) < 1e-6 and abs(row["least ms"] - 100.0) < 1e-6
    assert "| stepcode | 1.7 | 100 | 100 | 3 | 20 |" in bench_gathers.table({"stepcode": row})


def test_up_to_which_link_exact_gathers_win() -> None:
    """At the limit both take as long: 11 ms more of a core for 4 bits a value less."""
    found = bench_gathers.pays_until(4.0, 14.0, 8.0, 3.0)
    assert found == pytest.approx(4e6 / 11e-3 / 1e9)
    assert bench_gathers.pays_until(4.0, 3.0, 8.0, 3.0) == math.inf
    assert bench_gathers.pays_until(9.0, 14.0, 8.0, 3.0) == 0.0
    rows = {"0.001": {"native": {"bits": 16.0, "core ms": 0.0},
                      "stepcode": {"bits": 4.0, "core ms": 25.0}}}  # fmt: skip
    line = bench_gathers.limits(rows, 10_000_000).splitlines()[-1]
    assert line == "| native | 2.4 |"  # 12 bits of 5 M values in 25 ms
