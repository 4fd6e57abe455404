"""scripts/bench/bench_sites.py: what ranks of two sites train, go on with, and what is told."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench import bench_sites
from bench.sites_bench import curves
from bench.sites_bench.curves import SiteRun
from bench.sites_bench.rank import SitesJob
from tests.ranks import run_ranks


def run_of(losses: list[float], step_s: float, **more: Any) -> SiteRun:
    ends = np.asarray(step_s * np.arange(1, len(losses) + 1), np.float64)
    return SiteRun(np.asarray(losses), ends, 0, more.get("wait_ms"), more.get("every", 1))


def test_the_time_to_a_loss_is_interpolated() -> None:
    falling = [10.0 - step / 10 for step in range(61)]
    run = run_of(falling, 0.5)
    first = run.best[0]  # the mean of the first 30 steps
    assert first == pytest.approx(10 - 14.5 / 10) and len(run.best) == 32
    assert run.seconds_to(first) == pytest.approx(15.0)
    assert run.seconds_to(first - 0.25) == pytest.approx(15.0 + 2.5 * 0.5)
    assert run.seconds_to(0.1) is None
    noisy = run_of([*falling, *[20.0] * 30], 0.5)
    assert noisy.best[-1] == pytest.approx(run.best[-1])  # the lowest so far


def made() -> curves.Runs:
    falling = [5.0 - step / 50 for step in range(120)]
    return {
        curves.NATIVE: run_of(falling[:40], 1.0),
        curves.EVERY_STEP: run_of(falling, 0.2),
        curves.PLAIN: run_of(falling, 0.05, wait_ms=400.0, every=30),
        curves.STREAMING: run_of(falling[:110], 0.05, wait_ms=30.0, every=30),
        curves.PLAIN_FP32: run_of(falling[:31], 0.05, wait_ms=500.0, every=30),
    }


def test_equal_losses_are_those_that_all_reach() -> None:
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in curves.times(made())]
    level, few = rows[0][5], rows[0][7]
    assert float(level[5:]) == pytest.approx(5 - 24.5 / 50, abs=1e-3)
    assert float(few[5:]) == pytest.approx(5 - 94.5 / 50, abs=1e-3)
    by_name = {row[0]: row[1:] for row in rows[2:]}
    assert curves.PLAIN_FP32 not in by_name  # trained for its wait alone
    assert by_name[curves.NATIVE][4:] == ["40.0", "0.20", "-", "-"]
    assert by_name[curves.PLAIN][5] == "4.00" and by_name[curves.PLAIN][7] == "4.00"
    assert by_name[curves.EVERY_STEP][5] == "1.00"


def test_what_is_hidden_is_of_one_meeting_of_all_weights() -> None:
    rows = curves.hidden({"50mbit": made()})
    assert rows[2:] == ["| 50 Mb/s | 4 bits | 100.0 | 10.0 | 90% |"]


def job(tmp_path: Path) -> SitesJob:
    settings = bench_sites.settings_of(argparse.Namespace(batch=1, lr=1e-3, warmup=3))
    return SitesJob(
        blocks=bench_sites.blocks(8, 1), settings=settings, few={curves.PLAIN_FP32: 5}, steps=17,
        seconds=1e9, length=8, model={"vocabulary": 16, "layers": 1, "width": 16, "heads": 2},
        seed=0, data="data/text", out=str(tmp_path),
    )  # fmt: skip


def test_it_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    whole = job(tmp_path)
    assert bench_sites.missing(whole) == list(whole.blocks)
    for name in whole.blocks:
        row = {"told": whole.told(name), "losses": [2.0, 1.0], "ends": [1.0, 2.0], "sent": 9}
        (tmp_path / f"{name}.json").write_text(json.dumps(row))
    assert bench_sites.missing(whole) == []
    assert bench_sites.missing(replace(whole, data="other/text")) == []
    longer = replace(whole, steps=18)
    assert bench_sites.missing(longer) == [n for n in whole.blocks if n != curves.PLAIN_FP32]
    (tmp_path / "streaming.json").unlink()
    assert bench_sites.missing(whole) == ["streaming"]


class Text:
    """Samples of the same few tokens."""

    def batch(self, indices: range) -> tuple[Tensor, Tensor]:
        rows = [torch.arange(index, index + 9) % 16 for index in indices]
        tokens = torch.stack(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trained(made_job: SitesJob) -> list[dict[str, Any]]:
    """Train each case of ``made_job`` but those with fp32 messages."""
    import hybridcomp
    from bench.sites_bench import rank

    hybridcomp.install()
    names = [name for name in made_job.blocks if name not in curves.PAIRS[1]]
    return [rank.train(made_job, Text(), made_job.blocks[name], made_job.steps) for name in names]


def test_ranks_train_all_cases(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    found, other = run_ranks(2, trained, job(tmp_path))
    assert all(a["losses"] == b["losses"] for a, b in zip(found, other, strict=True))
    native, every_step, plain, streaming, sparse = found
    assert all(len(row["losses"]) == len(row["ends"]) == 17 for row in found)
    assert "meetings" not in native and "meetings" not in every_step
    assert plain["meetings"] == sparse["meetings"] == 2 and streaming["meetings"] >= 4
    assert plain["losses"][0] == native["losses"][0] and plain["losses"] != native["losses"]


def test_the_clock_ends_a_case_on_all_ranks(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    found, _ = run_ranks(2, trained, replace(job(tmp_path), seconds=0.0))
    assert [len(row["losses"]) for row in found] == [4, 4, 7, 7, 7]  # where it looks first
