"""The CUDA back end: launches kernels, with their grids and arguments.

The kernels are the ``.cu`` files of this folder. They use the same headers as the CPU kernels and
write the same bytes. ``<codec>.py`` launches the kernels of one codec, by its only class. A
``launcher.Launcher`` starts a kernel: ``CudaLauncher`` loads images compiled by NVRTC and launches
on torch's current stream; the tests have a launcher that runs the same sources on the host.
``fused`` launches kernels that handle all chunks of a reduction at once.

No function waits for the device, except encoders of variable size that return the size; given the
address of a word, they store the size there instead and do not wait.
"""

from __future__ import annotations

import importlib

from hybridcomp.errors import CodecError
from hybridcomp.kernels.cuda.functions import CudaFunctions, DamageFlag
from hybridcomp.kernels.cuda.launcher import Launcher


class CudaKernels:
    """``kernels.DeviceKernels`` on one device."""

    stores_sizes = True

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._functions: dict[str, CudaFunctions] = {}
        self.damage = DamageFlag(launcher)

    def functions(self, codec: str) -> CudaFunctions:
        """Return the launches of ``codec``: an object of the class in ``<codec>.py``.

        Raises CodecError where the codec has no kernels for GPUs.
        """
        if codec not in self._functions:
            self._functions[codec] = _class_of(codec)(self._launcher, self.damage)
        return self._functions[codec]

    def check(self) -> None:
        """Wait for the device; raise CodecError if a payload was damaged since the last check."""
        self.damage.check()

    def poll(self) -> None:
        """Raise as ``check``, but only for damage before the previous call; does not wait."""
        self.damage.poll()


def _class_of(codec: str) -> type[CudaFunctions]:
    name = f"{__name__}.{codec}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise CodecError(
            f"{codec} has no kernels for GPUs; choose another codec, or leave this dimension native"
        ) from None
    (only,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, CudaFunctions) and value.__module__ == name
    )
    return only
