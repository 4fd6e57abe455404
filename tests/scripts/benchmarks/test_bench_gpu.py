"""scripts/benchmarks/bench_gpu.py without a GPU: everything except times."""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import bench_gpu
from benchmarks.gpu_bench import blocks, feedback, measure, ours, peers, prebuild, targets
from benchmarks.gpu_bench import size_exchange as sizes
from benchmarks.gpu_bench.measure import Point, Work
from benchmarks.shared import TIME_IS_UP
from hybridcomp.codecs import make_codec
from hybridcomp.kernels.cuda import CudaKernels, images
from tests.collectives.late import late
from tests.kernels.cuda.common import kernels_replaced
from tests.kernels.cuda.emulated import EmulatedLauncher, emulated
from tests.paths import SCRIPTS
from tests.scripts_on_ranks import run_python

CPU, MB = torch.device("cpu"), 2**20


class FakeStopwatch:
    """Runs its work once; each call is a millisecond slower than the last."""

    def __init__(self) -> None:
        self.calls = 0

    def seconds(self, run: Callable[[], object]) -> float:
        run()
        self.calls += 1
        return self.calls * 1e-3

    def host_seconds(self, run: Callable[[], object]) -> float:
        return 5e-6


def point(subject: str, phase: str, dtype: str, size: int, share: float, us: float = 0.0) -> Point:
    return Point(subject, phase, dtype, size, 1e-4, 900.0, share, 8.0, "", us)


def points_of(share: float) -> list[Point]:
    """Return a point for every target, all with the same share."""
    return [
        point(target.subject, target.phase, dtype, size, share)
        for target in targets.TARGETS
        for dtype in target.dtypes
        for size in dict.fromkeys((MB // 16, 64 * MB, target.message_nbytes))
    ]


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    found = run_python(str(SCRIPTS / "benchmarks/bench_gpu.py"), "--check")
    assert found.returncode == 2 and not found.stdout
    assert found.stderr.startswith("no CUDA device: nothing was measured")


def test_targets_are_met_or_named() -> None:
    assert targets.missed(points_of(0.98)) == []
    lines = targets.missed(points_of(0.7))
    assert "blockint 8 encode fp16, 256 MB: 0.70 of a copy, expected 0.95" in lines
    assert "blockint 8 encode fp16, 64 MB: 0.70 of a copy, expected 0.85" in lines
    assert "blockint 4 decode bf16, 1 MB: 0.70 of a copy, expected 0.90" in lines
    assert "radix decode bf16, 256 MB: 0.70 of a copy, expected 0.75" in lines
    assert not [line for line in lines if line.startswith("blockint 4 sum_encode bf16")]
    assert not [line for line in lines if line.startswith("mpc") or " 0 MB" in line]
    unmeasured = targets.missed([])
    assert len(unmeasured) == sum(len(target.dtypes) for target in targets.TARGETS)
    assert all("not measured" in line for line in unmeasured)
    assert targets.missed([], all_of_them=False) == []


def test_a_peer_of_the_same_kind_must_not_be_ahead() -> None:
    rows = [
        ("blockint 8", "encode", 0.95),
        ("Triton int8", "encode", 0.96),
        ("blockint 4", "encode", 0.95),
        ("Triton int4", "encode", 0.99),
        ("Triton int4", "decode", 0.99),
        ("expcode", "decode", 0.5),
        ("nvCOMP ANS", "decode", 0.6),
        ("bitsandbytes nf4", "encode", 0.1),
    ]
    found = [[point(s, p, "bf16", n * MB, share) for s, p, share in rows] for n in (256, 64)]
    assert [targets.behind(points) for points in found] == [
        [
            "blockint 4 encode bf16, 256 MB: 0.95, Triton int4 0.99",
            "expcode decode bf16, 256 MB: 0.50, nvCOMP ANS 0.60",
        ],
        [],
    ]


def test_small_messages_must_not_wait_for_the_host() -> None:
    def lines(share: float, us: float, size: int = MB) -> list[str]:
        rows = (("all_reduce", share), ("all_reduce graph", 0.5), ("all_reduce path", 0.1))
        return targets.small([point("blockint 8", p, "bf16", size, s, us) for p, s in rows])

    assert lines(0.3, 59.0) == [] == lines(0.2, 61.0, 16 * MB)
    slow, held = lines(0.2, 61.0)
    assert slow.startswith("blockint 8 all_reduce bf16, 1 MB: 0.40 of what a graph")
    assert held == "blockint 8 all_reduce path bf16, 1 MB: 61 us of the host, at most 60"


def sources(*names: str) -> dict[str, Callable[[torch.Tensor], Iterator[Work]]]:
    """Return our codecs' works by the names of their rows; without names, all."""
    every = ours.codecs()
    return {n: partial(ours.works, name=n, codec=every[n]) for n in names or every}


def test_our_codecs_are_measured_in_every_phase(tmp_path: Path) -> None:
    """On the CPU: the runs are the codec's operations, with all bytes counted.

    Every message is kept, for a call after one that was killed.
    """
    bench, found = measure.Bench(FakeStopwatch(), CPU), bench_gpu.Found()
    messages, file, kept = [(2**16, "fp32"), (2**16, "bf16")], tmp_path / "points.json", list[int]()

    def then() -> None:
        bench_gpu.keep(found, {}, file)
        kept.append(len(bench_gpu.earlier(file)))

    bench_gpu.measure(bench, messages, CPU, found, sources(), then=then)
    assert not found.left_out and 0 < kept[0] < kept[1]
    assert bench_gpu.earlier(file) == found.points
    for dtype, numel in (("fp32", 2**14), ("bf16", 2**15)):
        for name in sources():
            rows = {p.phase: p for p in found.points if (p.subject, p.dtype) == (name, dtype)}
            assert {"encode", "decode", "decode_add"} <= set(rows)
            row = rows["encode"]
            assert row.gbps * row.seconds * 1e9 == pytest.approx(2**16 + row.bits / 8 * numel)


def test_the_kernels_of_an_all_reduce_are_measured() -> None:
    """On the emulator; the bytes of the three launches add up to the whole."""
    codec, values, works = make_codec("blockint", bits=4), torch.randn(20_000), {}
    with kernels_replaced(CudaKernels(EmulatedLauncher())):
        for work in ours.works(values, name="blockint 4", codec=codec):
            works[work.phase] = work
            work.run()
    assert not torch.distributed.is_initialized()
    for kind in ("", " feedback"):
        parts = [f"chunks encode{kind}", f"sum_encode{kind}", "chunks decode"]
        whole = works[f"all_reduce{kind}"].nbytes
        assert whole == sum(works[part].nbytes for part in parts)
        assert whole == works[f"all_reduce{kind} path"].nbytes
    assert works["sum_encode"].nbytes == pytest.approx(2500 * 4 + 8 * 2500 * 4.28 / 8, rel=0.02)


class NotingLauncher(EmulatedLauncher):
    """Notes the kernels that are launched, by image."""

    def __init__(self, launched: dict[Any, set[str]]) -> None:
        super().__init__()
        self.launched = launched

    def launch(self, source: str, defines: Any, kernel: str, *args: Any, **more: Any) -> None:
        self.launched.setdefault((source, *defines), set()).add(kernel)
        super().launch(source, defines, kernel, *args, **more)


@pytest.mark.nightly
def test_every_kernel_has_a_row_that_measures_it() -> None:
    """Checks names in the emulator's library: an unmeasured kernel would never be optimized."""
    launched: dict[Any, set[str]] = {}
    others = {"blockint 8", "zfp 16", "radix 1e-3"}
    others |= {f"blockint 4, {kind}" for kind in ("gaussian", "lloyd", "rotate")}
    mine = sources(*(name for name in ours.codecs() if name not in others))
    with kernels_replaced(CudaKernels(NotingLauncher(launched))):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for source in (*mine.values(), ours.steps, feedback.works):
                for work in source(torch.randn(6000).to(dtype)):
                    work.run()
    for image, kernels in launched.items():
        library = emulated(*image)._library._name
        listed = subprocess.run(
            ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
        ).stdout
        named = {line.split()[-1] for line in listed.splitlines()}
        there = {name for name in named if not name.startswith("_") and name != "emulate"}
        assert kernels == there, image
    assert {image[0] for image in launched} == {path.name for path in images.FOLDER.glob("*.cu")}


@pytest.mark.nightly
def test_kernels_of_feedback_are_measured() -> None:
    """Each exists by its launched name, accepts its arguments, and has a target."""
    works = {}
    with kernels_replaced(CudaKernels(EmulatedLauncher())):
        for work in feedback.works(torch.randn(6000)):
            works[work.subject, work.phase] = work
            work.run()
    known = {(target.subject, target.phase) for target in targets.TARGETS}
    named = {key for key in known if re.search("feedback [0-9]+$", key[1])}
    named |= {key for key in known if key[0] in ("pieces", "residual")}
    assert len(named) == 18 + 9 and named < works.keys()
    few = [works["blockint 4", f"chunks encode feedback {bits}"].nbytes for bits in (16, 8, 4)]
    assert few == sorted(few, reverse=True)


def test_it_is_tried_on_a_cpu_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    json_file = tmp_path / "b.json"
    words = ["bench_gpu.py", "--md", str(tmp_path / "b.md"), "--json", str(json_file), "--cpu",
             "--no-tests", "--resume", "--only", "fp8", "--sizes", "4K", "8K", "--dtypes", "bf16",
             "--repeats", "1", "--seconds"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", [*words, "0"])
    assert bench_gpu.main() == TIME_IS_UP and not bench_gpu.earlier(json_file)
    monkeypatch.setattr(sys, "argv", [*words, "600"])
    assert bench_gpu.main() == 0
    found = bench_gpu.earlier(json_file)
    assert {point.message_nbytes for point in found} == {4096, 8192}
    with mock.patch.object(bench_gpu, "measure") as again:
        assert bench_gpu.main() == 0
    assert again.call_args[0][1] == [] and bench_gpu.earlier(json_file) == found


def test_images_that_a_run_needs() -> None:
    """Determined without a launch; for every dtype of blockint, and for size-dependent images."""
    mine = [*sources("blockint 8", "expcode").values()]
    found = prebuild.needed(mine, [torch.bfloat16, torch.float32], CPU)
    for source in ("blockint.cu", "blockint_sum.cu", "blockint_table.cu"):
        for code in (0, 1):
            assert (source, ("HC_BITS=8", f"HC_DTYPE={code}")) in found
    assert "expcode.cu" in {source for source, _ in found}
    prebuild.compile_all([], 90)


def test_a_peer_that_fails_is_named() -> None:
    def broken(values: torch.Tensor) -> Iterator[Work]:
        raise RuntimeError("no\ncompiler")

    bench, found = measure.Bench(FakeStopwatch(), CPU), bench_gpu.Found()
    bench_gpu.measure(bench, [(2**16, "fp32")], CPU, found, {"broken": broken})
    assert found.left_out == {"broken, 64 KB of fp32": "RuntimeError: no compiler"}
    assert [p.subject for p in found.points] == ["device copy"]


@pytest.mark.parametrize("bits", [8, 4])
def test_the_block_quantizers_of_torch_and_triton(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton in its interpreter; ties may round differently."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.randn(12_000).to(dtype)
        values[:32] = 0
        levels, scales = blocks.encode(values, bits)
        back = blocks.decode(levels, scales, bits, dtype)
        assert levels.nbytes == 12_000 * bits // 8 and back.dtype == dtype and not back[:32].any()
        error = (back.float() - values.float()).view(-1, 32).abs().amax(1)
        assert bool((error <= 0.51 * scales.view(-1) + 0.005 * values.float().abs().max()).all())
        pytest.importorskip("triton")
        from benchmarks.gpu_bench import triton_blocks

        own, tops = triton_blocks.buffers(values, bits)
        triton_blocks.encode(values, own, tops, bits)
        assert torch.allclose(tops, scales.view(-1))
        assert (own.view(-1) == levels.reshape(-1)).float().mean() > 0.99
        out = torch.empty_like(values)
        triton_blocks.decode(own, tops, out, bits)
        right = blocks.decode(own.view(levels.shape), scales, bits, dtype)
        # the interpreter truncates where a GPU rounds to bf16
        assert torch.allclose(out, right, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6)


def test_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench_gpu.Found(points_of(0.8), {"nvCOMP ANS": "ImportError: nvidia.nvcomp"})
    for dtype in ("fp32", "bf16", "fp16"):
        found.points += [point("device copy", "copy", dtype, size, 1.0) for size in (MB, 256 * MB)]
    asked = argparse.Namespace(
        json=tmp_path / "b.json", md=tmp_path / "b.md", check=True, only=(), cpu=False
    )
    known = {"device": "made up", "versions": {"torch": "2"}, "tests_passed": True}
    exchange = 2e-5, [sizes.Choice(0.1, "blockint(bits=5)", "radix()", 2.0, 1e-12)]
    assert bench_gpu.conclude(found, exchange, known, asked) == 1
    printed = capsys.readouterr()
    assert "left out: nvCOMP ANS" in printed.out
    assert "an exchange of sizes in a group of one rank (no link) takes 20 us" in printed.out
    # 20 us / (a quarter of a byte / link - 1 ps)
    assert "worth it at 50 GB/s from 5e+06 values, at 12.5 GB/s from 1.05e+06 values" in printed.out
    assert "MISSED blockint 8 encode fp32, 256 MB: 0.80 of a copy, expected 0.95" in printed.err
    written = json.loads((tmp_path / "b.json").read_text())
    assert len(written["points"]) == len(found.points) and written["missed"]
    assert {0.95, 0.85} <= {point["target"] for point in written["points"]}
    assert written["size_exchange"]["threshold_numel"] == 262144
    text = (tmp_path / "b.md").read_text()
    assert "| blockint 8 | encode | 0.95 | *0.80* | *0.80* | *0.80* |" in text
    assert "| radix | decode | 0.90 / 0.75 | *0.80* | 0.80 | 0.80 |" in text
    assert "| blockint 8 | encode | 0.85 | *0.80*, 100.0 / 0.0 |" in text
    assert "* left out: nvCOMP ANS: ImportError: nvidia.nvcomp" in text
    asked.check = False
    assert bench_gpu.conclude(found, None, known, asked) == 0


def test_parts_of_names_choose_what_is_measured() -> None:
    assert list(bench_gpu.sources(("BLOCKINT 4", "triton"))) == [
        "blockint 4", "blockint 4, gaussian", "blockint 4, lloyd", "blockint 4, rotate",
        "Triton int8", "Triton int4"
    ]  # fmt: skip
    assert list(bench_gpu.sources()) == [*ours.codecs(), "stepcode", "feedback", *peers.PEERS]


def test_libraries_that_no_loader_finds_and_builders_that_cannot_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """nvCOMP's library beside its module; DeepSpeed's builder with architecture 9.0a."""
    library = tmp_path / "nvcomp" / "lib" / "libnvcomp.so.5"
    library.parent.mkdir(parents=True)
    library.touch()
    nvidia = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: nvidia)
    loaded: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: loaded.append(path))
    builder = mock.Mock()
    builder.QuantizerBuilder().load = lambda: os.environ["TORCH_CUDA_ARCH_LIST"]

    def found(name: str) -> Any:
        if name.startswith("deepspeed"):
            return builder
        if not loaded:
            raise ImportError("libnvcomp.so.5: cannot open shared object file")
        return "nvcomp"

    monkeypatch.setattr(importlib, "import_module", found)
    assert peers.nvcomp_library.__wrapped__() == "nvcomp" and loaded == [str(library)]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert peers._build_deepspeed() == "9.0"


def test_a_build_that_fails_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each of fifteen messages would wait a minute for the compiler."""
    tries = mock.Mock(side_effect=RuntimeError("Error building extension"))
    monkeypatch.setattr(peers, "_build_deepspeed", tries)
    peers._deepspeed_built.cache_clear()
    try:
        with peers.prepared(["DeepSpeed"]):
            pass
        for _ in range(3):
            with pytest.raises(RuntimeError, match="Error building"):
                list(peers.deepspeed(torch.zeros(4096)))
    finally:
        peers._deepspeed_built.cache_clear()
    assert tries.call_count == 1


def test_what_an_exchange_of_sizes_costs() -> None:
    """On the CPU, over gloo, with sizes that arrive when they are waited for."""
    with late() as watched:
        assert sizes.cost(CPU, repeats=3) > 0
    assert watched.waits == 3 and not torch.distributed.is_initialized()
    found = sizes.choices(measure.Bench(FakeStopwatch(), CPU), CPU, numel=100_000)
    assert [choice.bound for choice in found][:2] == [0.2, 0.1]
    for choice in found:
        assert choice.fixed.startswith("blockint") and choice.variable.startswith("radix")
        assert 0 < choice.saved_bits < 4
    slower = sizes.Choice(0.1, "blockint(bits=5)", "radix()", 1.0, 3e-12)
    assert slower.break_even(1e-5, 12.5) == pytest.approx(1e-5 / (1e-11 - 3e-12))
    assert "worth it at 50 GB/s never, at 12.5 GB/s from" in sizes.lines(1e-5, [slower])[1]
