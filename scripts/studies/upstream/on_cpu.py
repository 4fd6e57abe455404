"""What DeepSpeed's tests take for granted and a CPU has not, for their ranks.

The processor is asked for once: in every rank DeepSpeed's builders would, which takes seconds.
Tests hand the number of a device to DistributedDataParallel and to tensors; CPUs have none.
"""

from __future__ import annotations

from typing import Any

import cpuinfo  # type: ignore[import-untyped]
from deepspeed.accelerator import get_accelerator
from torch.nn.parallel import DistributedDataParallel
from unit import common  # type: ignore[import-not-found]

_known = cpuinfo.get_cpu_info()
cpuinfo.get_cpu_info = lambda: _known
_init = DistributedDataParallel.__init__


def _without_devices(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    if all(parameter.device.type == "cpu" for parameter in module.parameters()):
        kwargs |= {"device_ids": None, "output_device": None}
        args = ()
    _init(self, module, *args, **kwargs)


class _Named:
    """The accelerator, whose device has its name in place of the rank's number."""

    def __getattr__(self, name: str) -> Any:
        accelerator = get_accelerator()
        return getattr(accelerator, "current_device_name" if name == "current_device" else name)


DistributedDataParallel.__init__ = _without_devices  # type: ignore[method-assign]
common.get_accelerator = _Named
