"""Stand-in for GPU launches: the CUDA kernels in the emulator, on device memory."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridcomp import kernels
from hybridcomp.kernels.cuda import CudaKernels
from hybridcomp.kernels.cuda.launcher import Words
from tests.kernels.cuda.emulated import EmulatedLauncher


class DeviceLauncher(EmulatedLauncher):
    """Launches in the emulator, with words on one device, which has to be current."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self._device = torch.device("cuda", index)

    def zeros(self, words: int) -> Tensor:
        """See ``launcher.Launcher``."""
        return torch.zeros(words, dtype=torch.int64, device=self._device)

    def empty(self, words: int) -> Tensor:
        """See ``launcher.Launcher``; fills with garbage."""
        return torch.empty(words, dtype=torch.int64, device=self._device)

    def words(self, values: Words) -> Tensor:
        """See ``launcher.Launcher``."""
        return torch.from_numpy(values.copy()).to(self._device)


def place(devices: int) -> None:
    """Provide kernels for so many devices in this process."""
    for index in range(devices):
        kernels._on_cuda[index] = CudaKernels(DeviceLauncher(index))
