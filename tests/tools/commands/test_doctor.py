"""``hybridcomp doctor``: reports on machines that have, lack or mix packages."""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from hybridcomp import kernels
from hybridcomp.channels import Channels, online_tuner
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import CodecError, ConfigError, install_hint
from hybridcomp.kernels.cuda import images, setup
from hybridcomp.kernels.cuda.setup import CudaSetup
from hybridcomp.seams import patching
from hybridcomp.tools.commands import cli, doctor

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
    seams = [(doctor.OK, "3 of 3 seams are as known")]
    monkeypatch.setattr(doctor, "_seams", lambda package, extra: iter(seams))
    status = cli.main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    for subject in (
        "python", "native kernels", "apex", "cupy", "wandb", "torch is", "seams", "transformers",
        "accelerate", "transformer-engine", "matplotlib",
    ):  # fmt: skip
        assert subject in text
    failed = any(line.startswith(doctor.FAIL) for line in lines)
    assert status == int(failed) and "`" not in text
    assert lines[-1] == (
        "what is marked FAIL does not fit" if failed else "what is installed fits together"
    )


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


def test_what_fits_is_no_misfit() -> None:
    """Neither are images of CUDA 12.9 on a driver of 12.0."""
    for found in (CUDA_13, CUDA_12, CudaSetup(), changed(CUDA_12, driver=(12, 0))):
        assert list(setup.misfits(found)) == []


@pytest.mark.parametrize(
    ("found", "fragments"),
    [
        (
            changed(CUDA_13, cupy=(), nvrtc=None, architectures=()),
            ["need CuPy, which is not installed", "pip install 'cupy-cuda13x"],
        ),
        (
            changed(CUDA_12, devices=H100, cupy=(), nvrtc=None, architectures=()),
            ["need CuPy, which is not installed", "pip install 'cupy-cuda12x"],
        ),
        (
            changed(CUDA_13, nvrtc=None, architectures=(), problem="RuntimeError: no libnvrtc"),
            ["does not find the compiler NVRTC (RuntimeError: no libnvrtc)", "'cupy-cuda13x"],
        ),
        (
            changed(CUDA_13, cupy=(("cupy-cuda12x", "14.2.0"), ("cupy-cuda13x", "14.2.0"))),
            ["overwrite each other", "pip uninstall cupy-cuda12x cupy-cuda13x, then"],
        ),
        (
            changed(CUDA_13, driver=(12, 8), torch=(12, 6)),
            ["the driver runs CUDA up to 12.8", "NVRTC 13.0", "pip install 'cupy-cuda12x"],
        ),
        (
            changed(CUDA_13, devices=V100),
            ["compiles for sm_75 and newer", "Tesla V100 is sm_70", "pip install 'cupy-cuda12x"],
        ),
    ],
)  # fmt: skip
def test_misfits_say_what_to_install(found: CudaSetup, fragments: list[str]) -> None:
    (line,) = setup.misfits(found)
    for fragment in fragments:
        assert fragment in line


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
    monkeypatch.setattr(doctor, "_seams", lambda package, extra: iter(()))
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


def test_equal_failures_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed 0.18.2 fails at every seam for the same reason."""
    monkeypatch.setattr(patching, "version", lambda name: "0.18.2")
    monkeypatch.setattr(doctor, "installed", lambda name: "0.18.2")
    found = list(doctor._seams("deepspeed", "deepspeed"))
    assert len(found) <= 3 and {mark for mark, _ in found} == {doctor.FAIL}  # by window, and all
    assert re.search(r"seam deepspeed\.\S+ and \d\d more: needs deepspeed >= 0.19", found[0][1])
    assert "found deepspeed 0.18.2" in found[0][1]
    assert re.fullmatch(r"deepspeed 0.18.2: 0 of \d\d seams are as known", found[-1][1])


def test_an_engine_that_is_not_there_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", lambda name: None)
    ((mark, text),) = doctor._seams("megatron.core", "megatron")
    assert mark == doctor.INFO and "pip install 'megatron-core" in text


def test_variables_that_the_launcher_does_not_hand_on_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("HYBRIDCOMP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert list(doctor._environment()) == []
    block = tmp_path / "block.json"
    block.write_text('{"dq": "bf16"}')
    monkeypatch.setenv("HYBRIDCOMP_CONFIG", str(block))
    (mark, text), (failed, why) = doctor._environment()
    assert mark == doctor.INFO and "only if ~/.deepspeed_env has it too" in text
    assert failed == doctor.FAIL and "compression.dq" in why
    (tmp_path / ".deepspeed_env").write_text(f"A=1\nHYBRIDCOMP_CONFIG={block}\n")
    block.write_text('{"dp": "bf16"}')
    ((mark, text),) = doctor._environment()
    assert text == f"HYBRIDCOMP_CONFIG={block}"


def test_missing_cupy_is_told_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A one-line configuration error, with the message of the first use."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(kernels, "_on_cuda", {})
    with pytest.raises(ConfigError, match="codecs on a GPU need CuPy .*pip install") as caught:
        kernels.require_kernels(torch.device("cuda", 0))
    assert "\n" not in str(caught.value)
    kernels.require_kernels(torch.device("cpu"))


def test_channels_ask_for_kernels_where_something_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(online_tuner, "require_kernels", asked.append)
    for world_size in (1, 2):
        monkeypatch.setattr("torch.distributed.get_world_size", lambda size=world_size: size)
        for block in ({"dp": "bf16"}, {"dp": {"codec": "powersgd", "rank": 2}}):
            channels = Channels(CompressionConfig.parse(block))
            channels.tuner.run_autotune(None, torch.float32, torch.device("cpu"))
    assert asked == [torch.device("cpu")]


def test_hints_to_install_an_extra_build_nothing_again() -> None:
    """``pip install -e '.[plot]'`` would compile all kernels for a picture."""
    assert install_hint() == "pip install -e . in the clone of hybridcomp"
    for text in metadata.metadata("hybridcomp").get_all("Provides-Extra") or ():
        hint = install_hint(text)
        assert hint.startswith("pip install ") and " -e " not in hint and "hybridcomp" not in hint
    assert install_hint("plot").startswith("pip install 'matplotlib>=")
    assert "cupy-cuda13x" in install_hint("gpu") and "deepspeed" in install_hint("neox")
