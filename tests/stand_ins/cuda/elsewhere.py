"""Run the tests' trainings, written for CPUs, on a stand-in device.

Tensors, modules and meshes that a test creates without a device go to the current stand-in device.
Tensors of hybridcomp and its upstreams stay where they create them, so that a CPU tensor in a
device operation is detected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

TESTS = tuple(str(Path(__file__).resolve().parents[3] / name) for name in ("tests", "scripts"))
MINE = str(Path(__file__).resolve().parents[1])
TORCH = str(Path(torch.__file__).resolve().parent)


def of_a_test() -> bool:
    """Return whether the innermost caller outside torch is a test, its trainer, or a script."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith((TORCH, "<")):
            return file.startswith(TESTS) and not file.startswith(MINE)
        frame = frame.f_back
    return False


class OnDevice(TorchFunctionMode):
    """Puts a test's new tensors on the device."""

    def __init__(self) -> None:
        super().__init__()
        self._makers = _device_constructors()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._makers and kwargs.get("device") is None and of_a_test():
            kwargs = {**kwargs, "device": "cuda"}
        return func(*args, **kwargs)


def _from_cpu(original: Callable[..., Any], place: int, name: str) -> Callable[..., Any]:
    """Wrap a function to which tests pass ``"cpu"`` as its argument ``place`` or ``name``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > place and args[place] == "cpu" and of_a_test():
            args = (*args[:place], "cuda", *args[place + 1 :])
        if kwargs.get(name) == "cpu" and of_a_test():
            kwargs[name] = "cuda"
        return original(*args, **kwargs)

    return call


def _from_numpy(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def from_numpy(values: Any) -> Tensor:
        made = original(values)
        return made.to("cuda") if of_a_test() else made

    return from_numpy


def _reduced(tensor: Tensor) -> Any:
    from torch.multiprocessing import reductions

    return cast("Any", reductions).reduce_tensor(
        tensor.detach().cpu() if tensor.is_cuda else tensor
    )


def _numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    def numpy(self: Tensor, *, force: bool = False) -> Any:
        own = self.cpu() if self.is_cuda and of_a_test() else self
        return original(own, force=force)

    return numpy


def place() -> None:
    """Install this in the process permanently."""
    from torch.distributed import device_mesh

    found: Any = device_mesh
    found.init_device_mesh = _from_cpu(found.init_device_mesh, 0, "device_type")
    mesh: Any = device_mesh.DeviceMesh
    mesh.from_group = staticmethod(_from_cpu(mesh.from_group, 1, "device_type"))
    tensor: Any = Tensor
    tensor.numpy = _numpy(tensor.numpy)
    maker: Any = torch
    maker.from_numpy = _from_numpy(torch.from_numpy)
    for kind in (Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _reduced)
    cast("Any", OnDevice()).__enter__()
