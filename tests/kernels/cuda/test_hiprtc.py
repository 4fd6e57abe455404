"""Compile every kernel with AMD's compiler, without a GPU; options where torch uses ROCm.

Nightly. ``pytest -m nightly -s tests/kernels/cuda/test_hiprtc.py`` prints the table of
docs/results/gpu.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from hybridcomp.errors import CodecError
from hybridcomp.kernels.cuda import hip, images, launcher, setup
from hybridcomp.tools.commands import doctor
from tests.kernels.cuda.common import fake_cupy
from tests.kernels.cuda.hiprtc import (
    HipRtc,
    count,
    instructions,
    kernels_of,
    known_targets,
    library,
)
from tests.kernels.cuda.sources import FORMS
from tests.kernels.cuda.test_launch import own_extension

#: waves of 64 lanes, twice, and of 32
TARGETS = ("gfx90a", "gfx942", "gfx1030")
WAVES = {"gfx90a": 64, "gfx942": 64, "gfx1030": 32}
#: registers that let two waves of 64 lanes fit a SIMD of an MI200, and shared memory per block
MOST_REGISTERS, MOST_SHARED = 256, 64 << 10
Case = tuple[str, tuple[str, ...], str]


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that torch is built for ROCm 7."""
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")


def compiled(source: str, defines: tuple[str, ...], target: str) -> bytes:
    """Compile with the options of every run, without warnings."""
    with mock.patch.object(images, "_nvrtc", HipRtc):
        image, log = images.compiled(source, defines, target, "-Werror")
    assert not log.strip(), log
    return image


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> Iterator[dict[Case, Future[bytes]]]:
    """Build the image of every selected case, two at a time."""
    library()
    items: list[Any] = request.session.items
    chosen = [i.callspec.params for i in items if "built" in getattr(i, "fixturenames", ())]
    cases = [(p["source"], p["defines"], p["target"]) for p in chosen]
    with ThreadPoolExecutor(2) as threads:
        yield {
            case: threads.submit(compiled, *case) for case in cases if case[2] in known_targets()
        }


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("source", "defines"), FORMS, ids=lambda value: str(value))
def test_compiles_without_spills(
    source: str, defines: tuple[str, ...], target: str, built: dict[Case, Future[bytes]]
) -> None:
    """Reports registers, memory and floating-point modes of every kernel."""
    if target not in known_targets():
        pytest.skip(f"the hipRTC of this machine does not know {target}")
    image = built[source, defines, target].result()
    kernels = kernels_of(image)
    assert kernels
    for kernel in kernels:
        # per-lane memory: spills, indexed arrays, copied tables
        assert kernel.spills == kernel.scratch == 0 and kernel.wave == WAVES[target], kernel
        assert kernel.registers <= MOST_REGISTERS and kernel.shared <= MOST_SHARED, kernel
        assert kernel.rounding == 0 and kernel.subnormals == 0b11, kernel
    most, shared, held = (
        max(getattr(kernel, name) for kernel in kernels) for name in ("registers", "shared", "held")
    )
    image_of = " ".join((source, *defines))
    print(f"\n| `{image_of}` | {target} | {len(kernels)} | {most} | {held} | {shared} |")


@pytest.mark.nightly
def test_arithmetic_is_the_cpus(tmp_path: Path) -> None:
    """With the common options nothing is fused, and division rounds correctly."""
    library()
    kernel = 'extern "C" __global__ void k(float* o, float a, float b, float c) {{ *o = {}; }}'
    found = {}
    for value in ("a * b + c", "a / b", "__builtin_fmaf(a, b, c)"):
        image, _ = hip.compiled(HipRtc(), kernel.format(value), "one.cu", "gfx90a", ())
        found[value] = instructions(image, tmp_path)
    plain, division, fused = found.values()
    if plain is None or division is None or fused is None:
        pytest.skip("no llvm-objdump here")
    assert count("v_mul_f32", plain) == count("v_add_f32", plain) == 1
    assert not count("v_(fma|fmac|mad|mac|pk_fma)_f32", plain)
    assert count("v_(fma|fmac)_f32", fused) == 1
    assert count("v_div_scale_f32", division) == 2 and count("v_div_fixup_f32", division) == 1


@pytest.mark.nightly
def test_what_amds_compiler_says_is_told() -> None:
    library()
    told = r"(?s)hipRTC .* cannot compile casts.cu for gfx90a.*error"
    with pytest.raises(CodecError, match=told), mock.patch.object(images, "_nvrtc", HipRtc):
        images.compiled("casts.cu", ("HC_INLINE=oops", "WARP=4"), "gfx90a")


@pytest.mark.nightly
def test_amds_own_driver_answers(tmp_path: Path) -> None:
    """Without a GPU its functions are present, and its error is reported."""
    library()
    extension = own_extension(tmp_path)
    extension.open_driver("libamdhip64.so")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match=r"HIP error \d+ \(.*\)"):
        extension.current_context()


def test_what_is_installed_where_torch_is_built_for_rocm(rocm: None) -> None:
    assert hip.version() == (7, 0) and hip.library() == "libamdhip64.so.7"
    assert hip.install() == "pip install cupy-rocm-7-0"
    assert setup.install_of(setup.setup()) == hip.install()
    with mock.patch.object(torch.version, "hip", "6.2.4"):
        assert "CuPy for ROCm 6.2" in hip.install() and hip.library() == "libamdhip64.so.6"


MI250 = setup.CudaSetup(
    rocm=(7, 0), devices=(("AMD Instinct MI250X", "gfx90a:sramecc+:xnack-"),),
    cupy=(("cupy-rocm-7-0", "14.2.0"),), nvrtc=(9, 0),
)  # fmt: skip


def test_the_doctor_says_that_nothing_ever_ran_there() -> None:
    lines = "\n".join(setup.lines(MI250))
    assert "GPU 0: AMD Instinct MI250X, gfx90a:sramecc+:xnack-" in lines
    assert "torch is built for ROCm 7.0: codecs were never run on an AMD GPU" in lines
    assert "hipRTC 9.0" in lines and "sm_" not in lines
    assert list(setup.misfits(MI250)) == []


@pytest.mark.parametrize(
    ("facts", "fragment"),
    [
        ({"cupy": (), "nvrtc": None}, "need CuPy, which is not installed: pip install cupy-rocm"),
        ({"cupy": (("cupy-cuda13x", "14.2.0"),)}, "ROCm, and cupy-cuda13x for CUDA: pip install"),
        ({"nvrtc": None, "problem": "no lib"}, "does not find the compiler hipRTC (no lib): pip"),
    ],
)
def test_misfits_of_amds(facts: dict[str, Any], fragment: str, rocm: None) -> None:
    (line,) = setup.misfits(setup.CudaSetup(**{**MI250.__dict__, **facts}))
    assert fragment in line


def test_a_compiler_without_a_gpu_compiles_for_one_of_amds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = mock.Mock()
    monkeypatch.setattr(images, "compiled", asked)
    ((mark, text),) = doctor._probes(setup.CudaSetup(rocm=(7, 0), nvrtc=(9, 0)))
    asked.assert_called_once_with("casts.cu", (), "gfx90a")
    assert mark == doctor.INFO and "compile for gfx90a; there is no GPU" in text


def test_a_launcher_on_an_amd_gpu(rocm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images for AMD's name of the device, AMD's runtime, and a warning."""
    real = launcher._extension.__wrapped__
    cupy, extension = fake_cupy(monkeypatch)
    cupy.cuda.runtime.is_hip = True
    extension.current_context.return_value = 1
    monkeypatch.setattr(importlib, "import_module", lambda name: extension)
    monkeypatch.setattr(launcher, "_extension", real)
    properties = SimpleNamespace(gcnArchName="gfx90a:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    with pytest.warns(UserWarning, match="never run on an AMD GPU"):
        found = launcher.CudaLauncher(torch.device("cuda", 1))
    extension.open_driver.assert_called_once_with("libamdhip64.so.7")
    with mock.patch.object(images, "image", return_value=b"image") as image:
        found.launch("mpc.cu", (), "mpc_encode", (3, 1), 5)
    image.assert_called_once_with("mpc.cu", (), "gfx90a:sramecc+:xnack-")
    extension.launch.assert_called_once_with(11, 1, 3, 1, 256, 1001, None, 5)
    cupy.cuda.runtime.is_hip = False
    with pytest.raises(CodecError, match="built for ROCm, and the CuPy that is installed for CUDA"):
        launcher.CudaLauncher(torch.device("cuda", 1))
    cupy.cuda.runtime.is_hip = True
    extension.open_driver.side_effect = OSError("libamdhip64.so.7: cannot open")
    with pytest.raises(CodecError, match="no ROCm driver was found .*install AMD's"):
        launcher.CudaLauncher(torch.device("cuda", 1))


def test_options_of_amds_compiler() -> None:
    """Nothing is fused or flushed, defines are passed, and the image keeps its last byte."""
    binding = mock.Mock(NVRTCError=RuntimeError)
    binding.getPTX.return_value, binding.getProgramLog.return_value = b"\x7fELF image", ""
    with mock.patch.object(images, "_nvrtc", lambda: binding):
        found, _ = images.compiled("mpc.cu", ("A=1",), "gfx1030")
    assert found == b"\x7fELF image\0"
    options = binding.compileProgram.call_args.args[1]
    wanted = {
        "-ffp-contract=off",
        "-fno-gpu-flush-denormals-to-zero",
        "--offload-arch=gfx1030",
        "-DA=1",
    }
    assert wanted <= set(options) and f"-I{images.FORMATS}" in options
    binding.destroyProgram.assert_called_once()
