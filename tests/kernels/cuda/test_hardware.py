"""hardware.h: no kernel bypasses it, and its variants agree, also in waves of 64."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hybridcomp.kernels.cuda import images
from tests.kernels.cuda import emulated as stand_in
from tests.paths import ROOT

HERE = Path(__file__).resolve().parent
#: names that are the same in CUDA and HIP
SHARED = {
    "__global__", "__device__", "__shared__", "__syncthreads", "__launch_bounds__", "__VA_ARGS__"
}  # fmt: skip
#: HIP interprets a second number differently
BOUNDS = re.compile(r"__launch_bounds__\([^()]*,")
#: names allowed only in the two hardware headers: intrinsics, instructions, architectures
RAW = re.compile(
    r"\b__\w+|\basm\b|\bHC_SM\b|\bHC_AMD\b|\bvolatile\b|\bwarpSize\b|\bgfx\d+|\bsm_\d+"
)
THREADS, ROWS = 256, 141


def raw_names(path: Path) -> list[str]:
    """Return a source's names that bypass ``hardware.h``, comments aside."""
    text = re.sub(r"//.*", "", path.read_text())
    return [name for name in RAW.findall(text) if name not in SHARED] + BOUNDS.findall(text)


def sources() -> list[Path]:
    """Return the kernels' sources but the two headers."""
    formats = [images.FORMATS / name for name in included()]
    kernels = [*images.FOLDER.glob("*.cu"), *images.FOLDER.glob("*.h")]
    return [path for path in (*kernels, *formats) if path.name not in ("hardware.h", "portable.h")]


def included() -> set[str]:
    """Return headers of formats that kernels include, directly or indirectly."""
    found: set[str] = set()
    waiting = [*images.FOLDER.glob("*.cu"), *images.FOLDER.glob("*.h")]
    while waiting:
        for name in re.findall(r'#include "(\w+\.h)"', waiting.pop().read_text()):
            if name not in found and (images.FORMATS / name).is_file():
                found.add(name)
                waiting.append(images.FORMATS / name)
    return found


def test_kernels_name_no_intrinsic_and_no_architecture() -> None:
    assert len(sources()) > 40 and "portable.h" in included()
    found = {path.name: names for path in sources() if (names := raw_names(path))}
    assert not found, f"put what these need of the hardware into hardware.h: {found}"


def test_what_is_raw_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "one.h"
    path.write_text(
        "__syncthreads();  // __clz\nx = __ballot_sync(m, y);\n#if HC_SM >= 800\n"
        "__launch_bounds__(256) __launch_bounds__(64, 8)\n"
    )
    assert raw_names(path) == ["__ballot_sync", "HC_SM", "__launch_bounds__(64,"]


def probed(wave: str | None, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Return rows of words, one per thread; ``wave``: AMD's variant."""
    if wave is None:
        monkeypatch.delenv(stand_in.WAVE, raising=False)
    else:
        monkeypatch.setenv(stand_in.WAVE, wave)
    random = np.random.default_rng(7)
    a, b = random.integers(0, 2**32, (2, THREADS), dtype=np.uint32)
    out = np.zeros((ROWS + 1, THREADS), dtype=np.uint32)
    out[-1] = 77
    states = np.zeros(THREADS, dtype=np.uint64)
    addresses = (a.ctypes.data, b.ctypes.data, out.ctypes.data, states.ctypes.data)
    stand_in.emulated.__wrapped__(str(HERE / "hardware_probe.cu")).launch(
        "hardware_probe", (1, 1), *addresses, threads=THREADS
    )
    assert (out[-1] == 77).all() and out[-2].any(), "ROWS are not those of the probe"
    return out[:-1]


@pytest.mark.parametrize("wave", ["64", "32"])
def test_amds_form_gives_the_same_words(wave: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, found = probed(None, monkeypatch), probed(wave, monkeypatch)
    assert [row for row in range(ROWS) if (found[row] != expected[row]).any()] == []


EMULATED = (
    "test_emulated.py", "test_warp_tiles.py", "test_radix_tiles.py", "test_stepcode.py",
    "test_kept.py", "test_planned.py", "test_table.py", "test_fused.py", "test_many_ranks.py",
    "test_parts.py", "test_cut_scatter.py", "test_pieces.py", "test_topk.py",
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("name", EMULATED)
def test_kernels_in_waves_of_64(name: str) -> None:
    """Repeat the day's tests of the emulated kernels as HIP would compile them."""
    environment = {**os.environ, stand_in.WAVE: "64", "HYBRIDCOMP_NIGHTLY": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    found = subprocess.run(
        [*command, str(HERE / name)], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout[-4000:]
    assert " passed" in found.stdout
