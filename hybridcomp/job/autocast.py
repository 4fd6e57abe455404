"""Follow ``torch.autocast`` in operations that are functions of autograd of their own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available


def cast(*tensors: Tensor) -> list[Tensor]:
    """Cast ``tensors`` to the dtype of ``torch.autocast``, if it is on.

    Autograd sees the casts, as in ``F.linear``, so gradients have the dtype of the parameters.
    Integers and fp64 are not cast, as in torch.
    """
    kind = tensors[0].device.type
    if not (is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    ]


def off(like: Tensor) -> AbstractContextManager[object]:
    """Return a context in which operations keep their dtypes on the device of ``like``."""
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if is_autocast_available(kind) else nullcontext()
