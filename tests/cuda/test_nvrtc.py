"""The CUDA compiler's word on every kernel, for every architecture, without a GPU."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from hybridcomp.kernels import cuda

nvrtc: Any = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="needs hybridcomp[gpu]")

NIGHTLY = os.environ.get("HYBRIDCOMP_NIGHTLY") == "1"
#: Turing, A100, H100, B200. V100 (sm_70) needs CUDA 12's NVRTC; nothing newer than sm_70 is used.
ARCHITECTURES = (75, 80, 90, 100)
WIDTHS = range(2, 9) if NIGHTLY else (4, 8)
SOURCES: list[tuple[str, tuple[str, ...]]] = [
    *(("blockint.cu", (f"HC_BITS={bits}",)) for bits in WIDTHS),
    ("blockint.cu", ("HC_BITS=4", "HC_ROTATE=1", "HC_GAUSSIAN=1")),
    *((path.name, ()) for path in sorted(cuda.FOLDER.glob("*.cu")) if path.name != "blockint.cu"),
]
#: registers of a thread with which two blocks of 256 fit a multiprocessor
MOST_REGISTERS = 128


def compiled(source: str, defines: tuple[str, ...], architecture: int) -> str:
    """The assembler's report. Fails with the compiler's log."""
    program = nvrtc.createProgram((cuda.FOLDER / source).read_text(), source, [], [])
    options = [*cuda.OPTIONS, f"-arch=sm_{architecture}", "--ptxas-options=-v"]
    try:
        nvrtc.compileProgram(program, (*options, *(f"-D{define}" for define in defines)))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    log: str = nvrtc.getProgramLog(program)
    assert len(nvrtc.getCUBIN(program)) > 1000
    nvrtc.destroyProgram(program)
    return log


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("source", "defines"), SOURCES, ids=lambda value: str(value))
def test_compiles_without_spills(source: str, defines: tuple[str, ...], architecture: int) -> None:
    log = compiled(source, defines, architecture)
    kernels = re.findall(r"Compiling entry function '(\w+)'", log)
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", log)]
    assert kernels and len(registers) == len(kernels) and len(spills) == 2 * len(kernels)
    assert max(spills) == 0, log
    assert max(registers) <= MOST_REGISTERS, log
