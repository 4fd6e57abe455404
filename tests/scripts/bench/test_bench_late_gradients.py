"""bench_late_gradients.py: its cases are blocks that hold, and its table pairs runs by seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import bench_late_gradients as bench
from hybridcomp.config import CompressionConfig


def test_every_case_is_a_block_that_holds() -> None:
    for case in bench.CASES.values():
        assert bench.CASES[case.beside].pipeline is None
        assert bench.CASES[case.beside].optimizer["type"] in ("AdamW", case.optimizer["type"])
        if case.pipeline is not None:
            assert CompressionConfig.parse(case.settings["compression"]).pipeline.waitless


def write(folder: Path, name: str, seed: int, loss: float, finished: bool = True) -> None:
    path = folder / name / f"seed{seed}" / "loss.jsonl"
    path.parent.mkdir(parents=True)
    last = {"summary": True, "final_loss": loss, "valid_loss": 2.0} if finished else {"step": 1}
    path.write_text(json.dumps({"step": 1}) + "\n" + json.dumps(last) + "\n")


def test_the_table_pairs_runs_by_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(2):
        write(tmp_path, "flush", seed, 2.0 + seed)
        write(tmp_path, "stash", seed, (2.0 + seed) * 1.05)
    write(tmp_path, "1", 0, 2.2)
    write(tmp_path, "1", 1, 9.0, finished=False)
    assert bench.main(["--out", str(tmp_path), "--only-tables"]) == 0
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]]
        for row in capsys.readouterr().out.splitlines()
    ]
    assert rows[2:] == [
        ["flush", "2", "2.500", "", "2.000"],
        ["stash", "2", "2.625", "+5.00 ± 0.00", "2.000"],
        ["1", "1", "2.200", "+10.00", "2.000"],
    ]
