"""NVRTC compiles every kernel for every architecture, without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from hybridcomp.errors import install_hint
from hybridcomp.kernels.cuda import images
from tests.kernels.cuda.sources import SOURCES
from tests.selection import by_day

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason=install_hint("cuda13"))

#: Turing, A100, RTX 30, H100, B200. V100 (sm_70) needs CUDA 12's NVRTC; nothing newer is used.
ARCHITECTURES = (75, 80, 86, 90, 100)
#: registers per thread that let a multiprocessor hold two blocks of 256, or eight of 64
MOST_REGISTERS, MOST_OF_64 = 128, 128

Case = tuple[str, tuple[str, ...], int]
#: by day each architecture, with a source that takes a second: others take up to 30
DAY: list[Case] = [
    ("blockint.cu", ("HC_BITS=4", "HC_DTYPE=1"), 75), ("casts.cu", (), 80), ("pieces.cu", (), 86),
    ("residual.cu", ("HC_KEPT=8",), 90), ("mpc.cu", (), 100),
]  # fmt: skip
CASES = [DAY[0], *((*source, each) for source in SOURCES for each in ARCHITECTURES)]


def report_of(source: str, defines: tuple[str, ...], architecture: int) -> str:
    """Return the assembler's report."""
    found, log = images.compiled(source, defines, architecture, "--ptxas-options=-v")
    assert len(found) > 1000
    return log


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Iterator[dict[Case, Future[str]]]:
    """Return the report of every selected case, two at a time, as CuPy releases the GIL."""
    items: list[Any] = request.session.items
    chosen = [i.callspec.params for i in items if "reports" in getattr(i, "fixturenames", ())]
    with ThreadPoolExecutor(2) as threads:
        yield {
            case: threads.submit(report_of, *case)
            for case in ((p["source"], p["defines"], p["architecture"]) for p in chosen)
        }


@pytest.mark.parametrize(("source", "defines", "architecture"), by_day(CASES, DAY), ids=str)
def test_compiles_without_spills(
    source: str, defines: tuple[str, ...], architecture: int, reports: dict[Case, Future[str]]
) -> None:
    log = reports[source, defines, architecture].result()
    kernels = re.findall(r"Compiling entry function '(\w+)'", log)
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
    assert kernels and len(registers) == len(kernels) and len(spills) == 2 * len(kernels)
    assert max(spills) == 0, log
    most = MOST_OF_64 if source == "blockint_sum.cu" else MOST_REGISTERS
    assert max(registers) <= most, log
