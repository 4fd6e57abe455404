"""``hybridcomp doctor``: what it says of machines that have, lack or mix things."""

from __future__ import annotations

import pytest
import torch

from hybridcomp import cli, doctor
from hybridcomp.errors import CodecError
from hybridcomp.kernels.cuda import images, setup
from hybridcomp.kernels.cuda.setup import CudaSetup

H100, V100 = (("NVIDIA H100", 90),), (("Tesla V100", 70),)
CUDA_13 = CudaSetup(
    driver=(13, 0), torch=(13, 0), devices=H100, cupy=(("cupy-cuda13x", "14.2.0"),),
    nvrtc=(13, 0), architectures=(75, 80, 90, 100),
)  # fmt: skip
CUDA_12 = CudaSetup(
    driver=(12, 4), torch=(12, 4), devices=V100, cupy=(("cupy-cuda12x", "13.6.0"),),
    nvrtc=(12, 9), architectures=(50, 70, 90),
)  # fmt: skip


def changed(found: CudaSetup, **facts: object) -> CudaSetup:
    return CudaSetup(**{**found.__dict__, **facts})


def test_doctor_says_something_about_everything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_seams", lambda: iter([(doctor.OK, "3 of 3 DeepSpeed seams")]))
    status = cli.main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    for subject in ("python", "native kernels", "apex", "cupy", "wandb", "torch is", "seams"):
        assert subject in text
    assert status == (1 if any(line.startswith(doctor.FAIL) for line in lines) else 0)


class Impostor:
    version = "0.9.10.dev0"
    files = ("apex/__init__.py", "apex/models.py")


class Nvidia:
    version = "0.1"
    files = ("apex/__init__.py", "apex/optimizers/fused_adam.py")


@pytest.mark.parametrize(("apex", "mark"), [(Impostor, doctor.FAIL), (Nvidia, doctor.OK)])
def test_doctor_knows_the_apex_impostor(
    apex: type, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: apex())
    found, text = doctor._apex()
    assert found == mark
    assert ("uninstall" in text) == (mark == doctor.FAIL)


@pytest.mark.parametrize("found", [CUDA_13, CUDA_12, CudaSetup()], ids=["13", "12", "no GPU"])
def test_what_fits_is_no_misfit(found: CudaSetup) -> None:
    assert list(setup.misfits(found)) == []


@pytest.mark.parametrize(
    ("found", "fragments"),
    [
        (
            changed(CUDA_13, cupy=(), nvrtc=None, architectures=()),
            ["need CuPy, which is not installed", "hybridcomp[cuda13]"],
        ),
        (
            changed(CUDA_12, devices=H100, cupy=(), nvrtc=None, architectures=()),
            ["need CuPy, which is not installed", "hybridcomp[cuda12]"],
        ),
        (
            changed(CUDA_13, nvrtc=None, architectures=(), problem="RuntimeError: no libnvrtc"),
            ["does not find the compiler NVRTC (RuntimeError: no libnvrtc)", "hybridcomp[cuda13]"],
        ),
        (
            changed(CUDA_13, cupy=(("cupy-cuda12x", "14.2.0"), ("cupy-cuda13x", "14.2.0"))),
            ["overwrite each other", "pip uninstall cupy-cuda12x cupy-cuda13x, then"],
        ),
        (
            changed(CUDA_13, driver=(12, 8), torch=(12, 6)),
            ["the driver runs CUDA up to 12.8", "NVRTC 13.0", "hybridcomp[cuda12]"],
        ),
        (
            changed(CUDA_13, devices=V100),
            ["compiles for sm_75 and newer", "Tesla V100 is sm_70", "hybridcomp[cuda12]"],
        ),
    ],
)  # fmt: skip
def test_misfits_say_what_to_install(found: CudaSetup, fragments: list[str]) -> None:
    (line,) = setup.misfits(found)
    for fragment in fragments:
        assert fragment in line


def test_a_minor_version_that_the_driver_lacks_is_no_misfit() -> None:
    """Images of CUDA 12.9 run on a driver of 12.4."""
    assert list(setup.misfits(changed(CUDA_12, driver=(12, 0)))) == []


def test_the_extra_follows_the_oldest_gpu_then_torch_then_the_driver() -> None:
    assert setup.extra_of(changed(CUDA_13, devices=H100 + V100)) == "cuda12"
    assert setup.extra_of(changed(CUDA_13, torch=(12, 8))) == "cuda12"
    assert setup.extra_of(changed(CUDA_12, torch=None, devices=())) == "cuda12"
    assert setup.extra_of(CudaSetup()) == "cuda13"


def test_doctor_fails_for_a_misfit_and_prints_what_is_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = changed(CUDA_13, nvrtc=None, architectures=(), problem="gone")
    monkeypatch.setattr(setup, "setup", lambda: wrong)
    monkeypatch.setattr(doctor, "_seams", lambda: iter(()))
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "GPU 0: NVIDIA H100, sm_90" in out
    assert "the NVIDIA driver runs CUDA up to 13.0" in out
    assert f"{doctor.FAIL} CuPy does not find the compiler NVRTC (gone)" in out


def test_a_compiler_that_cannot_be_loaded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(images, "_nvrtc", broken)
    with pytest.raises(CodecError, match="OSError: libnvrtc.so.13"):
        images.compiler()
    found = setup.setup()
    assert found.nvrtc is None and "libnvrtc.so.13" in found.problem


def test_a_device_that_fails_is_told_in_a_line() -> None:
    mark, text = doctor._probe(torch.device("cuda", 99))
    assert mark == doctor.FAIL
    assert text.startswith("codecs on cuda:99: ") and "\n" not in text


@pytest.mark.gpu
def test_codecs_run_on_this_gpu() -> None:
    assert doctor._probe(torch.device("cuda", 0))[0] == doctor.OK
    assert list(setup.misfits(setup.setup())) == []
