"""Reading kernels without a GPU: what the compiler says, the image, a disassembly, the page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from bench import read_gpu_kernels
from bench.gpu_bench import kernel_page, machine_code
from bench.gpu_bench.machine_code import Kernel

LOG = """
ptxas info    : 80 bytes gmem
ptxas info    : Compiling entry function 'one_fp32' for 'sm_90'
ptxas info    : Function properties for one_fp32
ptxas         .     24 bytes stack frame, 20 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers, 32 bytes smem
ptxas info    : Compiling entry function 'two' for 'sm_90'
ptxas info    : Function properties for two
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""
SASS = """
//--------------------- .text.one_fp32 --------------------------
\t.section\t.text.one_fp32,"ax",@progbits
.text.one_fp32:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0020*/                   STL [R1+0x8], R4 ;
        /*0030*/                   MUFU.RCP R5, R4 ;
        /*0040*/             @!UP0 BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0050*/                   STG.E desc[UR4][R2.64], R5 ;
        /*0060*/                   NOP ;
.text.two:
        /*0000*/                   EXIT ;
"""


def test_what_the_compiler_says() -> None:
    assert list(machine_code.reported(LOG)) == [
        ("one_fp32", (48, 24, 20, 16, 32)), ("two", (32, 0, 0, 0, 0))
    ]  # fmt: skip


def test_instructions_are_counted_by_kind() -> None:
    assert dict(machine_code.instructions(SASS)) == {
        "one_fp32": {
            "instructions": 6, "global loads": 1, "16-byte": 1, "local": 1, "slow arithmetic": 1,
            "barriers": 1, "global stores": 1,
        },
        "two": {"instructions": 1},
    }  # fmt: skip


@pytest.mark.parametrize(
    "registers, shared, threads, architecture, share",
    [
        (48, 0, 256, 90, 5 / 8), (64, 0, 256, 75, 1.0), (32, 0, 256, 86, 1.0),
        (96, 0, 64, 90, 5 / 16), (96, 20736, 64, 90, 5 / 16), (32, 49152, 256, 80, 3 / 8),
    ],
)  # fmt: skip
def test_how_many_threads_fit(
    registers: int, shared: int, threads: int, architecture: int, share: float
) -> None:
    """As NVIDIA's occupancy calculator has it."""
    kernel = Kernel("one", registers, 0, 0, 0, shared, threads)
    assert kernel.occupancy(architecture) == share


def test_real_kernels_on_a_page(tmp_path: Path) -> None:
    """Compiled once; what is kept is not compiled again."""
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="needs hybridcomp[cuda13]")
    book, page = tmp_path / "kernels.json", tmp_path / "kernels.md"
    words = ["--architectures", "90", "--only", "mpc", "--check", "--json", str(book)]
    assert read_gpu_kernels.main([*words, "--md", str(page)]) == 0
    before = book.stat().st_mtime_ns
    assert read_gpu_kernels.main([*words, "--md", str(page)]) == 0
    assert book.stat().st_mtime_ns == before
    text = page.read_text()
    assert "| mpc_encode | " in text and "None of them spills" in text
    (row,) = (line for line in text.splitlines() if line.startswith("| mpc_encode | - | - | - | "))
    assert " | 256 | " in row


def test_a_spill_fails_the_check() -> None:
    rows = [(90, "a.cu", "8", Kernel("one_fp32", 48, 24, 20, 16, 0, 256, {"instructions": 9}))]
    (line,) = kernel_page.spilled(rows)
    assert "one_fp32 of a.cu 8 for sm_90: 24 bytes of stack, 20 spilled" in line
    assert line in kernel_page.document(rows, {"nvrtc": "13.0"})
