"""A run of seconds of ``bench_sync.py``: two ranks, all ways, and what ``auto`` has chosen by."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from bench import bench_sync
from tests.ranks import run_ranks
from tests.scripts_on_ranks import free_port

SMALL = [
    "--width", "64", "--layers", "1", "--warmup", "2", "--settle", "1", "--mbytes", "2",
    "--rates", "1e-3", "--repeats", "2",
]  # fmt: skip


def run(port: int, arguments: list[str]) -> tuple[int, str]:
    """The script in a rank, whose process group is its own; its status and what it prints."""
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    shown = io.StringIO()
    with mock.patch.object(sys, "argv", ["bench_sync.py", *arguments]):
        try:
            with contextlib.redirect_stdout(shown):
                status: int = bench_sync.main()
            return status, shown.getvalue()
        finally:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def test_a_run_of_seconds(tmp_path: Path) -> None:
    kept = tmp_path / "traces.pt"
    first, second = run_ranks(2, run, free_port(), [*SMALL, "--traces", str(kept)])
    assert first[0] == second[0] == 0 and "|" not in second[1]
    lines = [line.split("|") for line in first[1].splitlines() if line.startswith("| ")]
    rows = {cells[1].strip(): cells[2].strip() for cells in lines}
    assert rows.pop("") == "0.001"
    names = ["auto: coded", "auto: raw", "auto: link, Gb/s", "auto sends raw"]
    assert list(rows) == ["stepcode", "raw", "dense", *names]
    assert all(0.0 <= float(value) < 1e3 for value in rows.values())
    assert float(rows["auto: link, Gb/s"]) > 0.0
    assert rows["auto sends raw"] in ("0.000", "1.000")
    assert kept.exists()
