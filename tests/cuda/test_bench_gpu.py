"""scripts/bench_gpu.py without a GPU: everything but the times."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.collectives.late import late

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
CPU = torch.device("cpu")


class FakeStopwatch:
    """Runs what it is given once; the next call is always a millisecond slower."""

    def __init__(self) -> None:
        self.calls = 0

    def seconds(self, run: Callable[[], object]) -> float:
        run()
        self.calls += 1
        return self.calls * 1e-3


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The modules of the script, found as it finds them."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_gpu
    from gpu_bench import (
        blocks,
        measure,
        ours,
        peers,
        published,
        report,
        size_exchange,
        targets,
    )

    yield {
        "script": bench_gpu, "blocks": blocks, "measure": measure, "ours": ours, "peers": peers,
        "published": published, "report": report, "size_exchange": size_exchange,
        "targets": targets,
    }  # fmt: skip


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    found = subprocess.run(
        [sys.executable, SCRIPTS / "bench_gpu.py", "--check"], capture_output=True, text=True
    )
    assert found.returncode == 2
    assert found.stderr.startswith("no CUDA device: nothing was measured")
    assert not found.stdout


def points_of(modules: dict[str, Any], share: float) -> list[Any]:
    """A point for everything that a target speaks of, all with the same share."""
    found = []
    for target in modules["targets"].TARGETS:
        for dtype in ("fp32", "bf16"):
            for size in (2**20, modules["targets"].MESSAGE_NBYTES):
                found.append(
                    modules["measure"].Point(
                        target.subject, target.phase, dtype, size, 1e-4, 900.0, share, 8.0, ""
                    )
                )
    return found


def test_targets_are_met_or_named(modules: dict[str, Any]) -> None:
    targets = modules["targets"]
    assert targets.missed(points_of(modules, 0.95)) == []
    lines = targets.missed(points_of(modules, 0.7))
    assert len([line for line in lines if line.startswith("blockint")]) == 12
    assert len([line for line in lines if line.startswith("expcode")]) == 4
    assert not [line for line in lines if line.startswith(("radix", "mpc"))]
    unmeasured = targets.missed([])
    assert len(unmeasured) == 2 * len(targets.TARGETS)
    assert all("not measured" in line for line in unmeasured)


def test_zfp_has_to_beat_the_published_figure_five_times(modules: dict[str, Any]) -> None:
    wanted = {t.phase: t.share for t in modules["targets"].TARGETS if t.subject == "zfp 8"}
    for phase, share in wanted.items():
        assert share >= 0.40 and share >= 5 * modules["published"].cuzfp_share(phase)


def test_our_codecs_are_measured_in_every_phase(modules: dict[str, Any]) -> None:
    """On the CPU: what is run is what a codec does, and bytes are counted in full."""
    bench, found = modules["measure"].Bench(FakeStopwatch(), CPU), modules["script"].Found()
    subjects = {
        name: partial(modules["ours"].works, name=name, codec=codec)
        for name, codec in modules["ours"].codecs().items()
    }
    modules["script"].measure(bench, [(2**16, "fp32"), (2**16, "bf16")], CPU, found, subjects)
    assert not found.left_out
    for dtype in ("fp32", "bf16"):
        for name in subjects:
            rows = {p.phase: p for p in found.points if (p.subject, p.dtype) == (name, dtype)}
            assert {"encode", "decode", "decode_add"} <= set(rows)
            row = rows["encode"]
            numel = 2**16 // (4 if dtype == "fp32" else 2)
            assert row.gbps * row.seconds * 1e9 == pytest.approx(2**16 + row.bits / 8 * numel)


def test_the_kernels_of_an_all_reduce_are_measured(modules: dict[str, Any]) -> None:
    """On the emulator; the sum of the three launches is what the whole moves."""
    from hybridcomp.codecs import make_codec
    from hybridcomp.kernels.cuda import CudaKernels
    from tests.cuda.common import kernels_replaced
    from tests.cuda.emulated import EmulatedLauncher

    codec, values = make_codec("blockint", bits=4), torch.randn(20_000)
    with kernels_replaced(CudaKernels(EmulatedLauncher())):
        works = {
            work.phase: work
            for work in modules["ours"].works(values, name="blockint 4", codec=codec)
        }
        for work in works.values():
            work.run()
    for feedback in ("", " feedback"):
        parts = [f"chunks encode{feedback}", f"sum_encode{feedback}", "chunks decode"]
        whole = works[f"all_reduce{feedback}"].nbytes
        assert whole == sum(works[part].nbytes for part in parts)
    assert works["sum_encode"].nbytes == pytest.approx(2500 * 4 + 8 * 2500 * 4.28 / 8, rel=0.02)


def test_a_peer_that_fails_is_named(modules: dict[str, Any]) -> None:
    def broken(values: torch.Tensor) -> Iterator[Any]:
        raise ImportError("no such\nlibrary")
        yield

    bench, found = modules["measure"].Bench(FakeStopwatch(), CPU), modules["script"].Found()
    modules["script"].measure(bench, [(4096, "fp32")], CPU, found, {"other": broken})
    assert found.left_out == {"other, 4 KB of fp32": "ImportError: no such library"}
    assert [point.subject for point in found.points] == ["device copy"]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_block_quantizer_in_torch_quantizes(
    modules: dict[str, Any], bits: int, dtype: torch.dtype
) -> None:
    values = torch.randn(4096).to(dtype)
    values[:32] = 0
    levels, scales = modules["blocks"].encode(values, bits)
    back = modules["blocks"].decode(levels, scales, bits, dtype)
    assert levels.nbytes == 4096 * bits // 8 and back.dtype == dtype
    error = (back.float() - values.float()).view(-1, 32).abs().amax(1)
    assert bool((error <= 0.51 * scales.view(-1) + 0.005 * values.float().abs().max()).all())
    assert not back[:32].any()


@pytest.mark.parametrize("bits", [8, 4])
def test_the_block_quantizer_in_triton_does_the_same(
    modules: dict[str, Any], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter; ties may round differently."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    from gpu_bench import triton_blocks

    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(12_000 // 32 * 32).to(dtype)
        levels, scales = triton_blocks.buffers(values, bits)
        triton_blocks.encode(values, levels, scales, bits)
        expected, tops = modules["blocks"].encode(values, bits)
        assert torch.allclose(scales, tops.view(-1))
        same = (levels.view(-1) == expected.reshape(-1)).float().mean()
        assert same > 0.99
        back = torch.empty_like(values)
        triton_blocks.decode(levels, scales, back, bits)
        right = modules["blocks"].decode(levels.view(expected.shape), tops, bits, dtype)
        # the interpreter cuts off where a GPU rounds to bf16
        assert torch.allclose(back, right, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6)


def test_table_json_and_picture(
    modules: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, Point = modules["script"], modules["measure"].Point
    found = script.Found(points_of(modules, 0.8), {"nvCOMP ANS": "ImportError: nvidia.nvcomp"})
    for dtype in ("fp32", "bf16"):
        for size in (2**20, 2**28):
            point = Point("device copy", "copy", dtype, size, 1e-4, 4000.0, 1.0, 0.0, "the ceiling")
            found.points.append(point)
    arguments = argparse.Namespace(json=tmp_path / "b.json", png=tmp_path / "b.png", check=True)
    known = {"device": "made up", "tests_passed": True}
    Cost, Choice = modules["size_exchange"].Cost, modules["size_exchange"].Choice
    sizes = (Cost(1e-5, 2e-5), [Choice(0.1, "blockint(bits=5)", "radix()", 2.0, 1e-12)])
    assert script.conclude(found, sizes, known, arguments) == 1
    printed = capsys.readouterr()
    assert "256 MB of bf16" in printed.out and "cuSZp2" in printed.out
    assert "0.90 MISSED" in printed.out and "0.75 met" in printed.out
    assert "left out: nvCOMP ANS" in printed.out
    assert "take 10 us, with their exchange in a group of one rank (no link) 20 us" in printed.out
    # 20 us / (a quarter of a byte / link - 1 ps)
    assert "worth it at 50 GB/s from 5e+06 values, at 12.5 GB/s from 1.05e+06 values" in printed.out
    assert "auto takes it from 262144 values on" in printed.out
    assert "MISSED blockint 8 encode fp32: 0.80 of a copy, expected 0.90" in printed.err
    written = json.loads((tmp_path / "b.json").read_text())
    assert len(written["points"]) == len(found.points) and written["missed"]
    assert written["points"][1]["target"] == 0.9
    (row,) = written["size_exchange"]["choices"]
    assert row["break_even"]["50"] == pytest.approx(5e6)
    assert written["size_exchange"]["threshold_numel"] == 262144
    assert (tmp_path / "b.png").read_bytes()[:4] == b"\x89PNG"
    arguments.check = False
    assert script.conclude(found, None, known, arguments) == 0
    assert json.loads((tmp_path / "b.json").read_text())["size_exchange"] is None


def test_slower_kernels_may_never_be_worth_it(modules: dict[str, Any]) -> None:
    sizes = modules["size_exchange"]
    choice = sizes.Choice(0.1, "blockint(bits=5)", "radix()", 1.0, 3e-12)
    assert choice.break_even(1e-5, 50.0) is None
    assert choice.break_even(1e-5, 12.5) == pytest.approx(1e-5 / (1e-11 - 3e-12))
    cost = sizes.Cost(1e-5, None, "nccl: RuntimeError: no NCCL")
    assert cost.seconds == 1e-5
    said = "\n".join(sizes.lines(cost, [choice]))
    assert "was not measured (nccl: RuntimeError: no NCCL)" in said
    assert "worth it at 50 GB/s never, at 12.5 GB/s from" in said


def test_what_an_exchange_of_sizes_costs(modules: dict[str, Any]) -> None:
    """On the CPU, over gloo, with sizes that arrive when they are waited for."""
    sizes, bench = modules["size_exchange"], modules["measure"].Bench(FakeStopwatch(), CPU)
    with late() as watched:
        cost = sizes.cost(CPU, repeats=3)
    assert not torch.distributed.is_initialized()
    assert watched.waits == 6 and cost.wait_s > 0 and not cost.left_out
    assert cost.exchange_s is not None and cost.exchange_s > 0
    found = sizes.choices(bench, CPU, numel=100_000)
    assert [choice.bound for choice in found][:2] == [0.2, 0.1]
    for choice in found:
        assert choice.fixed.startswith("blockint") and choice.variable.startswith("radix")
        assert 0 < choice.saved_bits < 4


def test_a_backend_that_does_not_start_is_named(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = modules["size_exchange"]
    monkeypatch.setattr(sizes.dist, "init_process_group", mock.Mock(side_effect=OSError("no\nway")))
    with late():
        assert sizes.cost(CPU, repeats=1).left_out == "gloo: OSError: no way"
