"""scripts/benchmarks/bench_gpu.py without a GPU: everything except times."""

from __future__ import annotations

import argparse
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

from tests.collectives.late import late
from tests.paths import SCRIPTS
from tests.scripts_on_ranks import run_python

CPU = torch.device("cpu")


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


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Import the script's modules as it does."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from benchmarks import bench_gpu
    from benchmarks.gpu_bench import (
        blocks,
        measure,
        ours,
        peers,
        prebuild,
        published,
        report,
        size_exchange,
        targets,
    )

    yield {
        "script": bench_gpu, "blocks": blocks, "measure": measure, "ours": ours, "peers": peers,
        "prebuild": prebuild, "published": published, "report": report,
        "size_exchange": size_exchange, "targets": targets,
    }  # fmt: skip


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    found = run_python(str(SCRIPTS / "benchmarks/bench_gpu.py"), "--check")
    assert found.returncode == 2
    assert found.stderr.startswith("no CUDA device: nothing was measured")
    assert not found.stdout


def points_of(modules: dict[str, Any], share: float) -> list[Any]:
    """Return a point for every target, all with the same share."""
    Point, MB = modules["measure"].Point, 2**20
    return [
        Point(target.subject, target.phase, dtype, size, 1e-4, 900.0, share, 8.0, "")
        for target in modules["targets"].TARGETS
        for dtype in target.dtypes
        for size in dict.fromkeys((MB // 16, 64 * MB, target.message_nbytes))
    ]


def test_targets_are_met_or_named(modules: dict[str, Any]) -> None:
    targets = modules["targets"]
    assert targets.missed(points_of(modules, 0.98)) == []
    lines = targets.missed(points_of(modules, 0.7))
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


def test_a_peer_of_the_same_kind_must_not_be_ahead(modules: dict[str, Any]) -> None:
    targets, Point = modules["targets"], modules["measure"].Point
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
    for size, expected in ((2**28, 2), (2**26, 0)):
        points = [Point(s, p, "bf16", size, 1e-4, 9.0, share, 8.0, "") for s, p, share in rows]
        assert len(targets.behind(points)) == expected
    assert targets.behind(
        [Point(s, p, "bf16", 2**28, 1e-4, 9.0, share, 8.0, "") for s, p, share in rows]
    ) == [
        "blockint 4 encode bf16, 256 MB: 0.95, Triton int4 0.99",
        "expcode decode bf16, 256 MB: 0.50, nvCOMP ANS 0.60",
    ]


def test_small_messages_must_not_wait_for_the_host(modules: dict[str, Any]) -> None:
    targets, Point = modules["targets"], modules["measure"].Point

    def points(share: float, host_us: float, size: int = 2**20) -> list[Any]:
        rows = (("all_reduce", share), ("all_reduce graph", 0.5), ("all_reduce path", 0.1))
        return [
            Point("blockint 8", phase, "bf16", size, 1e-4, 9.0, found, 8.0, "", host_us)
            for phase, found in rows
        ]

    assert targets.small(points(0.3, 59.0)) == []
    slow, held = targets.small(points(0.2, 61.0))
    assert slow.startswith("blockint 8 all_reduce bf16, 1 MB: 0.40 of what a graph")
    assert held == "blockint 8 all_reduce path bf16, 1 MB: 61 us of the host, at most 60"
    assert targets.small(points(0.2, 61.0, 2**24)) == []


def test_zfp_has_to_beat_the_published_figure_five_times(modules: dict[str, Any]) -> None:
    wanted = {t.phase: t.share for t in modules["targets"].TARGETS if t.subject == "zfp 8"}
    assert set(wanted) == {"encode", "decode"}
    for phase, share in wanted.items():
        assert share >= 5 * modules["published"].cuzfp_share(phase)


def test_our_codecs_are_measured_in_every_phase(modules: dict[str, Any]) -> None:
    """On the CPU: the runs are the codec's operations, with all bytes counted."""
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
    """On the emulator; the bytes of the three launches add up to the whole."""
    from hybridcomp.codecs import make_codec
    from hybridcomp.kernels.cuda import CudaKernels
    from tests.kernels.cuda.common import kernels_replaced
    from tests.kernels.cuda.emulated import EmulatedLauncher

    codec, values = make_codec("blockint", bits=4), torch.randn(20_000)
    with kernels_replaced(CudaKernels(EmulatedLauncher())):
        works = {}
        for work in modules["ours"].works(values, name="blockint 4", codec=codec):
            works[work.phase] = work
            work.run()
    assert not torch.distributed.is_initialized()
    for feedback in ("", " feedback"):
        parts = [f"chunks encode{feedback}", f"sum_encode{feedback}", "chunks decode"]
        whole = works[f"all_reduce{feedback}"].nbytes
        assert whole == sum(works[part].nbytes for part in parts)
        assert whole == works[f"all_reduce{feedback} path"].nbytes
    assert works["sum_encode"].nbytes == pytest.approx(2500 * 4 + 8 * 2500 * 4.28 / 8, rel=0.02)


def run_on_the_emulator(modules: dict[str, Any], dtype: torch.dtype) -> dict[Any, set[str]]:
    """Return the kernels launched by rows of one codec of each kind, by image."""
    from benchmarks.gpu_bench import feedback
    from hybridcomp.kernels.cuda import CudaKernels
    from tests.kernels.cuda.common import kernels_replaced
    from tests.kernels.cuda.emulated import EmulatedLauncher

    launched: dict[Any, set[str]] = {}

    class Launcher(EmulatedLauncher):
        def launch(self, source: str, defines: Any, kernel: str, *args: Any, **more: Any) -> None:
            launched.setdefault((source, *defines), set()).add(kernel)
            super().launch(source, defines, kernel, *args, **more)

    ours, values = modules["ours"], torch.randn(6000).to(dtype)
    others = ("blockint 8", "blockint 4, gaussian", "blockint 4, rotate", "zfp 16", "radix 1e-3")
    mine = [
        partial(ours.works, name=name, codec=codec)
        for name, codec in ours.codecs().items()
        if name not in others
    ]
    with kernels_replaced(CudaKernels(Launcher())):
        for source in (*mine, ours.steps, feedback.works):
            for work in source(values):
                work.run()
    return launched


@pytest.mark.nightly
def test_every_kernel_has_a_row_that_measures_it(modules: dict[str, Any]) -> None:
    """Checks names in the emulator's library: an unmeasured kernel would never be optimized."""
    from hybridcomp.kernels.cuda import images
    from tests.kernels.cuda.emulated import emulated

    launched: dict[Any, set[str]] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for image, kernels in run_on_the_emulator(modules, dtype).items():
            launched.setdefault(image, set()).update(kernels)
    for image, kernels in launched.items():
        library = emulated(*image)._library._name
        listed = subprocess.run(
            ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
        ).stdout
        named = {line.split()[-1] for line in listed.splitlines()}
        there = {name for name in named if not name.startswith("_") and name != "emulate"}
        assert kernels <= there
        assert not there - kernels, image
    assert {image[0] for image in launched} == {path.name for path in images.FOLDER.glob("*.cu")}


@pytest.mark.nightly
def test_kernels_of_feedback_are_measured(modules: dict[str, Any]) -> None:
    """Each exists by its launched name, accepts its arguments, and has a target."""
    from benchmarks.gpu_bench import feedback
    from hybridcomp.kernels.cuda import CudaKernels
    from tests.kernels.cuda.common import kernels_replaced
    from tests.kernels.cuda.emulated import EmulatedLauncher

    with kernels_replaced(CudaKernels(EmulatedLauncher())):
        works = {}
        for work in feedback.works(torch.randn(6000)):
            works[work.subject, work.phase] = work
            work.run()
    targets = {(target.subject, target.phase) for target in modules["targets"].TARGETS}
    named = {key for key in targets if re.search("feedback [0-9]+$", key[1])}
    named |= {key for key in targets if key[0] in ("pieces", "residual")}
    assert len(named) == 18 + 9 and named < works.keys()
    few = [works["blockint 4", f"chunks encode feedback {bits}"].nbytes for bits in (16, 8, 4)]
    assert few == sorted(few, reverse=True)


def test_it_is_tried_on_a_cpu_and_goes_on(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = modules["script"]
    words = ["bench_gpu.py", "--cpu", "--no-tests", "--resume", "--only", "fp8", "--sizes", "4K",
             "8K", "--dtypes", "bf16", "--repeats", "1", "--seconds"]  # fmt: skip
    for kind in ("md", "json", "png"):
        words[1:1] = [f"--{kind}", str(tmp_path / f"b.{kind}")]
    monkeypatch.setattr(sys, "argv", [*words, "0"])
    assert script.main() == script.TIME_IS_UP
    assert not script.earlier(tmp_path / "b.json")
    monkeypatch.setattr(sys, "argv", [*words, "600"])
    assert script.main() == 0
    found = script.earlier(tmp_path / "b.json")
    assert {point.message_nbytes for point in found} == {4096, 8192}
    monkeypatch.setattr(
        script,
        "measure",
        lambda bench, messages, *_: pytest.fail(str(messages)) if messages else None,
    )
    assert script.main() == 0
    assert script.earlier(tmp_path / "b.json") == found


def test_images_that_a_run_needs(modules: dict[str, Any]) -> None:
    """Determined without a launch; for every dtype of blockint, and for size-dependent images."""
    from hybridcomp import kernels

    sources = [
        partial(modules["ours"].works, name=name, codec=modules["ours"].codecs()[name])
        for name in ("blockint 8", "expcode")
    ]
    dtypes = [torch.bfloat16, torch.float32]
    found = modules["prebuild"].needed(sources, dtypes, CPU)
    assert not kernels._on_cuda
    for source in ("blockint.cu", "blockint_sum.cu", "blockint_table.cu"):
        for code in (0, 1):
            assert (source, ("HC_BITS=8", f"HC_DTYPE={code}")) in found
    assert "expcode.cu" in {source for source, _ in found}
    modules["prebuild"].compile_all([], 90)


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
    from benchmarks.gpu_bench import triton_blocks

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
        # the interpreter truncates where a GPU rounds to bf16
        assert torch.allclose(back, right, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6)


def test_table_json_and_picture(
    modules: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, Point = modules["script"], modules["measure"].Point
    found = script.Found(points_of(modules, 0.8), {"nvCOMP ANS": "ImportError: nvidia.nvcomp"})
    for dtype in ("fp32", "bf16", "fp16"):
        for size in (2**20, 2**28):
            point = Point("device copy", "copy", dtype, size, 1e-4, 4000.0, 1.0, 0.0, "the ceiling")
            found.points.append(point)
    arguments = argparse.Namespace(
        json=tmp_path / "b.json",
        png=tmp_path / "b.png",
        md=tmp_path / "b.md",
        check=True,
        only=(),
        cpu=False,
    )
    known = {"device": "made up", "versions": {"torch": "2"}, "tests_passed": True}
    Cost, Choice = modules["size_exchange"].Cost, modules["size_exchange"].Choice
    sizes = (Cost(1e-5, 2e-5), [Choice(0.1, "blockint(bits=5)", "radix()", 2.0, 1e-12)])
    assert script.conclude(found, sizes, known, arguments) == 1
    printed = capsys.readouterr()
    assert "cuSZp2" in printed.out
    assert "left out: nvCOMP ANS" in printed.out
    assert "take 10 us, with their exchange in a group of one rank (no link) 20 us" in printed.out
    # 20 us / (a quarter of a byte / link - 1 ps)
    assert "worth it at 50 GB/s from 5e+06 values, at 12.5 GB/s from 1.05e+06 values" in printed.out
    assert "auto takes it from 262144 values on" in printed.out
    assert "MISSED blockint 8 encode fp32, 256 MB: 0.80 of a copy, expected 0.95" in printed.err
    table = modules["report"].table(found.points)
    assert "256 MB of bf16" in table and "0.95 MISSED" in table and "0.65 met" in table
    written = json.loads((tmp_path / "b.json").read_text())
    assert len(written["points"]) == len(found.points) and written["missed"]
    assert {0.95, 0.85} <= {point["target"] for point in written["points"]}
    (row,) = written["size_exchange"]["choices"]
    assert row["break_even"]["50"] == pytest.approx(5e6)
    assert written["size_exchange"]["threshold_numel"] == 262144
    assert (tmp_path / "b.png").read_bytes()[:4] == b"\x89PNG"
    text = (tmp_path / "b.md").read_text()
    assert "| blockint 8 | encode | 0.95 | *0.80* | *0.80* | *0.80* |" in text
    assert "| radix | decode | 0.90 / 0.75 | *0.80* | 0.80 | 0.80 |" in text
    assert "| blockint 8 | encode | 0.85 | *0.80*, 100.0 / 0.0 |" in text
    assert "* left out: nvCOMP ANS: ImportError: nvidia.nvcomp" in text
    arguments.check = False
    assert script.conclude(found, None, known, arguments) == 0
    assert json.loads((tmp_path / "b.json").read_text())["size_exchange"] is None


def test_a_command_is_told_without_its_files(modules: dict[str, Any]) -> None:
    words = ["--only", "fp8", "--md", "/a/b.md", "--json=c", "--repeats", "3", "--png", "d"]
    assert modules["script"].without_files(words) == ["--only", "fp8", "--repeats", "3"]


def test_parts_of_names_choose_what_is_measured(modules: dict[str, Any]) -> None:
    sources = modules["script"].sources
    assert list(sources(("BLOCKINT 4", "triton"))) == [
        "blockint 4", "blockint 4, gaussian", "blockint 4, lloyd", "blockint 4, rotate",
        "Triton int8", "Triton int4"
    ]  # fmt: skip
    ours, others = modules["ours"].codecs(), modules["peers"].PEERS
    assert list(sources()) == [*ours, "stepcode", "feedback", *others]


def test_libraries_that_no_loader_finds_and_builders_that_cannot_read(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """nvCOMP's library beside its module; DeepSpeed's builder with architecture 9.0a."""
    peers = modules["peers"]
    library = tmp_path / "nvcomp" / "lib" / "libnvcomp.so.5"
    library.parent.mkdir(parents=True)
    library.touch()
    nvidia = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: nvidia)
    loaded: list[str] = []
    monkeypatch.setattr(peers.ctypes, "CDLL", lambda path, mode: loaded.append(path))
    builder = mock.Mock()
    builder.QuantizerBuilder().load = lambda: os.environ["TORCH_CUDA_ARCH_LIST"]

    def found(name: str) -> Any:
        if name.startswith("deepspeed"):
            return builder
        if not loaded:
            raise ImportError("libnvcomp.so.5: cannot open shared object file")
        return "nvcomp"

    monkeypatch.setattr(peers.importlib, "import_module", found)
    assert peers.nvcomp_library.__wrapped__() == "nvcomp" and loaded == [str(library)]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a")
    monkeypatch.setattr(peers.cuda, "get_device_capability", lambda: (9, 0))
    assert peers._build_deepspeed() == "9.0"
    with peers.prepared(["Triton int8"]):
        pass


def test_a_build_that_fails_is_tried_once(
    modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each of fifteen messages would wait a minute for the compiler."""
    peers, tries = modules["peers"], mock.Mock(side_effect=RuntimeError("Error building extension"))
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
