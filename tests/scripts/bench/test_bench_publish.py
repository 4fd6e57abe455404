"""What ``bench_publish.py`` makes of its times, and a run of seconds."""

from __future__ import annotations

import contextlib
import io
import math
import sys
from unittest import mock

import pytest
import torch.distributed as dist

from bench import bench_publish
from tests.ranks import run_ranks


def test_beyond_the_break_even_link_dense_weights_arrive_earlier() -> None:
    coded = {"stepcode: publish_s": 0.3, "stepcode: update_s": 0.2, "stepcode: bits": 4.0}
    raw = {"raw: publish_s": 0.1, "raw: update_s": 0.1, "raw: bits": 13.0}
    found = bench_publish.waits({"weights": 1e9, **coded, **raw})
    assert found["1 Gb/s, coded"] == pytest.approx(4.5)
    assert found["1 Gb/s, raw"] == pytest.approx(13.2)
    assert found["1 Gb/s, dense"] == pytest.approx(16.0)
    link = found["pays against dense below, Gb/s"]
    assert link == pytest.approx(24.0)
    assert 0.5 + 4.0 / link == pytest.approx(16.0 / link)
    link = found["pays against raw below, Gb/s"]
    assert link == pytest.approx(30.0)
    assert 0.5 + 4.0 / link == pytest.approx(0.2 + 13.0 / link)
    always = bench_publish.waits({"weights": 1e9, **coded, **raw, "raw: update_s": 0.5})
    assert math.isinf(always["pays against raw below, Gb/s"])


def run(arguments: list[str]) -> tuple[int, str]:
    """The script in a rank, whose process group is its own; its status and what it prints."""
    dist.destroy_process_group()
    shown = io.StringIO()
    with mock.patch.object(sys, "argv", ["bench_publish.py", *arguments]):
        try:
            with contextlib.redirect_stdout(shown):
                status: int = bench_publish.main()
            return status, shown.getvalue()
        finally:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def test_a_run_of_seconds() -> None:
    small = ["--width", "64", "--layers", "1", "--warmup", "2", "--settle", "1", "--mbytes", "1"]
    ((status, shown),) = run_ranks(1, run, [*small, "--rates", "1e-3", "--repeats", "2"])
    assert status == 0
    assert "| bits | " in shown and "pays against raw below, Gb/s" in shown
    assert "compare, with checksum, x copy" in shown and "update(), GB/s" in shown
