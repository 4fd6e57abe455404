"""An all_reduce of three launches: the bits and the bytes of the one that goes step by step."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hybridcomp.codecs import VALUE_DTYPES, BlockInt, make_codec
from hybridcomp.collectives import Meter, all_reduce
from hybridcomp.kernels import cuda
from hybridcomp.kernels.cuda import CudaKernels
from tests.codecs import arrays
from tests.cuda.common import kernels_replaced
from tests.cuda.emulated import EmulatedLauncher, emulated
from tests.ranks import run_ranks


class Counting(EmulatedLauncher):
    """Remembers what was launched."""

    def __init__(self) -> None:
        self.kernels: list[str] = []

    def launch(
        self, source: str, defines: tuple[str, ...], kernel: str, grid: tuple[int, int], *words: int
    ) -> None:
        self.kernels.append(kernel)
        super().launch(source, defines, kernel, grid, *words)


def compare(
    numel: int, settings: dict[str, Any], kind: str, dtype: torch.dtype
) -> tuple[bool, Any, Any, Any]:
    """``(same bits, wire bytes step by step, wire bytes fused, kernels launched)``."""
    torch.set_num_threads(1)
    codec, rank = make_codec("blockint", **settings), dist.get_rank()
    values = arrays.make(kind, numel, rank, dtype)
    plain, fused = values.clone(), values.clone()
    first, second = Meter(), Meter()
    all_reduce(plain, codec, None, meter=first).wait()
    launcher = Counting()
    with kernels_replaced(CudaKernels(launcher)):
        all_reduce(fused, codec, None, meter=second).wait()
    same = torch.equal(arrays.bits_of(plain), arrays.bits_of(fused))
    return same, first.wire_nbytes, second.wire_nbytes, launcher.kernels


def many(
    cases: list[tuple[int, dict[str, Any], str, torch.dtype]],
) -> list[tuple[bool, Any, Any, Any]]:
    return [compare(*case) for case in cases]


def test_same_bits_and_bytes_with_three_launches() -> None:
    cases = [
        (numel, settings, kind, dtype)
        for numel, settings, kind in (
            (7000, {"bits": 8}, "normal"), (7000, {"bits": 4}, "outliers"),
            (40, {"bits": 4}, "normal"), (3, {"bits": 8}, "nonfinite"),
            (5000, {"bits": 8}, "near max"), (9001, {"bits": 4}, "nonfinite"),
            (7001, {"bits": 3, "rotate": True}, "outliers"),
            (7001, {"bits": 4, "levels": "gaussian"}, "normal"),
        )
        for dtype in VALUE_DTYPES
    ]  # fmt: skip
    for macros in {cuda._blockint(BlockInt(**case[1])._setting) for case in cases}:
        emulated("blockint.cu", *macros)  # built once, before the ranks want it
    for found in run_ranks(3, many, cases):
        for case, (same, plain, fused, kernels) in zip(cases, found, strict=True):
            assert same, case
            assert plain == fused, case
            assert len(kernels) <= 3, kernels
            if case[0] > 1000:
                assert [name.split("_")[1] for name in kernels] == ["encode", "reduce", "decode"]


def feedback(numel: int) -> bool:
    """With residuals the steps are taken one by one."""
    codec = make_codec("blockint", bits=4)
    with mock.patch("hybridcomp.collectives.reductions.fused_all_reduce") as fused:
        launcher = Counting()
        with kernels_replaced(CudaKernels(launcher)):
            values = arrays.make("normal", numel, dist.get_rank())
            all_reduce(values, codec, None, meter=Meter(), residual=torch.zeros(numel)).wait()
    return not fused.called and bool(launcher.kernels)


def test_error_feedback_goes_step_by_step() -> None:
    assert all(run_ranks(2, feedback, 3000))
