"""The fake CUDA and NCCL detect GPU errors, and the trainings pass on them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.nccl.pool import NcclPool
from tests.paths import ROOT
from tests.ranks import python_path
from tests.stand_ins.cuda import begin

HERE = ROOT / "tests" / "nccl"
#: files that train over NCCL; the others start whole jobs with a launcher, or time a device
FILES = ("test_features", "test_ring", "test_split", "test_torch", "test_zero")

pytestmark = [
    pytest.mark.skipif(bool(begin.why_not()), reason=begin.why_not()),
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[NcclPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(begin.ASKED, begin.STAND_IN)
        patch.setattr("tests.nccl.pool.AHEAD", {})
        with NcclPool(2) as found:
            yield found


def said(call: Callable[[], Any]) -> str:
    """Return a call's error."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _on_devices() -> dict[str, str]:
    here, other = torch.ones(4, device="cuda"), torch.ones(4, device="cuda:0")
    values = torch.ones(4)
    return {
        "sum": said(lambda: here + values),
        "concatenation": said(lambda: torch.cat([here, values])),
        "index": said(lambda: here.index_select(0, torch.tensor([1]))),
        "devices": said(lambda: here * other),
        "out": said(lambda: torch.add(here, here, out=values)),
        "copy": said(lambda: values.copy_(here)),
        "scalar": said(lambda: here * torch.tensor(2.0)),
        "place": said(lambda: here[torch.tensor([1])]),
    }


def test_tensors_of_two_devices_do_not_mix(pool: NcclPool) -> None:
    for found in pool.run(_on_devices, timeout=240):
        fine = {name for name, error in found.items() if error == "no error"}
        assert fine == {"copy", "scalar", "place"}, found


def _messages() -> dict[str, Any]:
    rank = dist.get_rank()
    values: Tensor = torch.arange(4.0, device="cuda")
    out = torch.zeros(4, device="cuda")
    found: dict[str, Any] = {}

    work: Any = dist.all_to_all_single(out, values, async_op=True)
    found["early"] = out.cpu()
    work.wait()
    found["late"] = out.cpu()
    work = dist.all_to_all_single(out, values, async_op=True)
    values.add_(1)
    found["changed"] = said(work.wait)
    work = dist.all_to_all_single(out, values, async_op=True)
    out.fill_(1)
    found["written"] = said(work.wait)
    found["cpu"] = said(lambda: dist.all_reduce(torch.ones(3)))
    found["device"] = said(lambda: dist.all_reduce(torch.ones(3, device="cuda:0")))
    found["gaps"] = said(lambda: dist.all_reduce(values[::2]))
    found["dtype"] = said(lambda: dist.all_reduce(values.to(torch.int16)))
    found["sizes"] = said(lambda: dist.all_reduce(torch.ones(3 + rank, device="cuda")))
    return found


def test_messages_that_a_gpu_would_not_bring(pool: NcclPool) -> None:
    for rank, found in enumerate(pool.run(_messages, timeout=240)):
        assert found["early"].isnan().all(), "a result is there only once somebody has waited"
        assert found["late"].tolist() == [2 * rank, 2 * rank + 1] * 2
        for name, words in {
            "changed": "input 0 was changed before anybody waited",
            "written": "an output was written before anybody waited",
            "cpu": "No backend type associated with device type cpu",
            "device": "a group of device 1 is given cuda:0",
            "gaps": "Tensors must be contiguous",
            "dtype": "NCCL has no torch.int16",
            "sizes": "NCCL would hang",
        }.items():
            assert words in found[name], (name, found[name])


@pytest.mark.parametrize("name", FILES)
def test_trainings_pass_on_it(name: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", f"{HERE / name}.py"],
        env={**os.environ, begin.ASKED: begin.STAND_IN, "PYTHONPATH": python_path()},
        cwd=ROOT, capture_output=True, text=True, timeout=1700,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
