"""Provide to CPU ranks the GPU features that DeepSpeed's tests assume.

It queries the CPU model once; DeepSpeed's builders would do so in every rank, for seconds. Tests
pass device numbers to DistributedDataParallel, gather scalars, which gloo does not support, and
save the accelerator's random state, for which torch.cpu has no functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import cpuinfo  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
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


def _reduced(flag: bool, op: Callable[[Iterable[bool]], bool] = all) -> bool:
    flags = [flag] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(flags) > 1:
        dist.all_gather_object(flags, flag)
    return op(flags)


def _state(device: Any = "cpu") -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(state: torch.Tensor, device: Any = "cpu") -> None:
    torch.set_rng_state(state)


torch.cpu.get_rng_state = _state  # type: ignore[attr-defined]
torch.cpu.set_rng_state = _set_state  # type: ignore[attr-defined]
DistributedDataParallel.__init__ = _without_devices  # type: ignore[method-assign]
common.reduce_boolean_flags = _reduced
