"""Counts of ``bench_deltas.py`` on deltas with known entropy, and on a short training."""

from __future__ import annotations

import math
import sys
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks import bench_deltas
from benchmarks.deltas_bench import bits, traces


def test_bits_of_known_steps() -> None:
    """Of 1024 values with one exponent a quarter moves up by one, a quarter down by one."""
    reference = torch.full((1024,), 1.5, dtype=torch.bfloat16)
    moves = torch.tensor([0, 0, 1, -1], dtype=torch.int16).repeat(256)
    values = (reference.view(torch.int16) + moves).view(torch.bfloat16)
    exponents, moved = bits.steps(reference, values)
    assert set(exponents.tolist()) == {127} and moved.tolist() == moves.tolist()
    assert bits.entropy_bits(exponents, moved) == pytest.approx(1.5 * 1024)
    found = bits.sent(reference, values)
    assert found["changed"] == 0.5 and found["int32 + bf16"] == 24.0 and found["raw"] == 16.0
    assert found["stepcode"] < 4.0


def test_a_step_across_zero_counts_both_sides() -> None:
    both = [torch.tensor([one], dtype=torch.bfloat16) for one in (2.0**-133, -(2.0**-133))]
    assert [int(one) for one in bits.steps(*both)[1]] == [-2]


def test_gaps_are_bytes_where_they_fit() -> None:
    reference = torch.zeros(1000, dtype=torch.bfloat16)
    values = reference.clone()
    values[[0, 255, 800]] = 1.0
    one = np.array([0x3F80], np.uint16).tobytes()
    gaps = bytes([0, 254, 255]) + np.array([544], np.uint32).tobytes()
    assert bits.gaps_and_values(reference, values) == gaps + 3 * one


def test_a_run_of_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench_deltas.py", "--width", "64", "--layers", "1", "--warmup", "2", "--settle"]
    command += ["1", "--rates", "1e-3", "--mbytes", "1", "--repeats", "1"]
    threads = torch.get_num_threads()
    try:
        with mock.patch.object(sys, "argv", command):
            assert bench_deltas.main() == 0
    finally:
        torch.set_num_threads(threads)
    shown = capsys.readouterr().out
    assert "| stepcode |" in shown and "| encode x copy |" in shown


def test_missed_targets_are_named() -> None:
    row = {"stepcode": 4.5, "entropy": 4.0, "changed": 0.8}
    sparse = {
        "stepcode": 0.2, "entropy": 0.19, "changed": 0.02, "encode GB/s": 0.5, "decode GB/s": 2.0,
    }  # fmt: skip
    missed = bench_deltas.missed_targets({"0.001": row, "1e-06": sparse})
    assert len(missed) == 4 and "1.125 times the entropy" in missed[0]
    assert "10.00 bits a changed value" in missed[3]
    few = {"stepcode": 0.2, "changed": 0.04, "int32 + bf16": 1.1, "gaps, zstd-1": 0.45}
    assert bench_deltas._missed_by_few(few | {"gaps, zstd-3": 0.6}) == [
        "0.18 of int32 + bf16, expected 0.17", "0.44 of gaps, expected 0.4",
    ]  # fmt: skip
    assert bench_deltas._missed_by_few({"stepcode": 0.2, "changed": 0.04}) == []


def test_a_trace_is_one_step() -> None:
    (trace,) = traces.traces(traces.Size(64, 1, batch=1), [1e-6], warmup=1, settle=1)
    assert trace.values.dtype == torch.bfloat16
    assert 0 < int((trace.values != trace.reference).sum()) < 0.2 * trace.values.numel()
    assert math.isfinite(float(trace.values.float().abs().max()))
