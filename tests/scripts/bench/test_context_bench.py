"""scripts/bench/bench_context.py and bench_slices.py: what bytes allow, tables, their chapter."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from bench import bench_context, bench_slices, results
from bench.context_bench import links, report, slices_table
from lab.layout import Rates


def test_a_ring_hides_messages_behind_blocks_and_others_wait() -> None:
    assert report.allowed("gather", 4, (1.0, 2.0), (0.5, 1.5), 0.5) == 5.0
    assert report.allowed("Ulysses", 4, (1.0, 2.0), (0.5, 1.5), 0.5) == 5.0
    # nothing but computing, nothing but bytes
    assert report.allowed("ring", 4, (1.0, 2.0), (0.0, 0.0), 0.0) == pytest.approx(3.0)
    assert report.allowed("ring", 4, (0.0, 0.0), (0.6, 1.5), 0.6) == pytest.approx(2.1)
    # of 3 hops of 1 s each is behind a block of 0.5 s; the last block is behind nothing
    assert report.allowed("ring", 4, (2.0, 0.0), (3.0, 0.0), 0.0) == pytest.approx(3.5)
    # two ranks, backward: keys behind the own block, gradients of the other's behind nothing
    assert report.allowed("ring", 2, (0.0, 2.0), (0.0, 1.75), 1.5) == pytest.approx(2.75)


def rows() -> list[dict[str, Any]]:
    """One length and rate: 4 MB natively and 2 MB at 8 bits over 8 Mb/s of messages."""
    rate = 8_000_000 * report.FRAMES
    common = {"length": 1024, "ratio": 1.0, "rate": rate, "method": "ring"}
    native = {**common, "codec": "native", "nbytes": [1_000_000, 3_000_000], "error": 0.0}
    coded = {**common, "codec": "8 bits", "nbytes": [500_000, 1_500_000], "error": 0.004}
    return [
        {**native, "free": [[1.0, 3.0], [1.0, 3.0]], "seconds": [[1.5, 5.0], [1.5, 5.0]]},
        {**coded, "free": [[1.1, 3.2], [1.1, 3.2]], "seconds": [[1.2, 4.0], [1.2, 4.0]]},
    ]


def kept() -> dict[str, Any]:
    options = vars(bench_context.parse(["--layout", "2x2", "--slower", "4"]))
    return {"options": {**options, "out": None}, "load": 0.5, "rows": rows()}


def test_the_codec_counts_against_what_is_used() -> None:
    native, coded = report.with_figures(kept())
    assert native["of_native"] == native["speed_up"] == 1.0
    assert coded["of_native"] == 0.5 and coded["speed_up"] == 1.25
    # computing of the native messages: 4 blocks of 1/4 s, then of 1/2 s; keys of 1/6 s a hop, and
    # gradients of 1/3 s, the last behind nothing
    assert coded["computing"] == 3.0
    assert coded["allowed"] == pytest.approx(1.0 + 2.0 + 1 / 3)
    assert coded["used"] == pytest.approx((3 + 1 / 3) / 4) and coded["overlap"] == 0.75
    text = report.tables(kept())
    assert "4 times slower" in text and "| 8 bits | 2.000 | 0.500 | 4.0e-03 |" in text


def test_chapter(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    arguments = ["--context", str(source), "--out", str(out)]
    assert results.main(arguments) == 1, "nothing was measured"
    (source / "context.json").write_text(json.dumps(kept()))
    ways = {
        "whole": {"slices": [256], "seconds": [2.0], "measured_s": 2.0, "predicted_s": 1.9},
        "chosen": {
            "slices": [64, 128, 64],
            "seconds": [1.1],
            "measured_s": 1.1,
            "predicted_s": 1.0,
        },
    }
    tried = [{"slices": [64, 128, 64], "seconds": 1.2}, {"slices": [128, 128], "seconds": 1.3}]
    options = vars(bench_slices.parse(["--slower", "4", "--granule", "32"]))
    (source / "slices.json").write_text(
        json.dumps({"options": {**options, "out": None}, "stages": 4, "rows": ways, "tried": tried})
    )
    assert results.main(arguments) == 0
    text = (out / "context.md").read_text()
    assert "1 of 2 rows of the ring reach nine tenths" in text and "8 bits at 1024" in text
    assert "| chosen | 64, 128, 64 | 1000 | 1100 | 1.10 | - | - | 1 |" in text
    assert "| whole | 256 | 1900 | 2000 | 1.05 | 0.550 | 0.550 - 0.550 | 1 |" in text
    assert "3 slices of the program 1200 ms, uniform 2 1300 ms" in text
    assert "--slower 4 --out runs/context/slices.json" in text and str(tmp_path) not in text
    assert (out / "context.png").stat().st_size > 5_000


def test_rates_are_asked_for_over_a_socket(tmp_path: Path) -> None:
    asked: list[Rates] = []
    path = str(tmp_path / "links")
    environment = patch.dict("os.environ", {links.VARIABLE: path})
    with links.served(path, asked.append) as server, environment, links.Links() as rank:
        for rate in (1000, None):
            thread = threading.Thread(target=rank.shape, args=(rate,))
            thread.start()
            while thread.is_alive():
                server.serve(0.05)
    assert asked == [Rates(1000), Rates(None)]


def test_the_chosen_slices_are_compared_turn_by_turn() -> None:
    # the machine becomes twice as slow: medians of each would say nothing
    chosen = {"seconds": [0.9, 0.8, 1.9, 1.8, 1.8, 1.8, 1.8, 1.8, 1.9]}
    even = {"seconds": [1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]}
    found = slices_table.against({"chosen": chosen, "uniform 2": even}, "uniform 2")
    assert found == pytest.approx((0.9, 0.9, 0.95)), "of nine the second and the last but one"


def test_command_lines() -> None:
    with pytest.raises(SystemExit):
        bench_slices.parse(["--length", "100", "--granule", "64"])
    with pytest.raises(SystemExit):
        bench_context.parse(["--codecs", "8 bits"])
