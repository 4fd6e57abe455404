"""Add up gradients of several micro-batches under ZeRO-Offload, on the device or on the host.

Upstream adds up micro-batches on the device but keeps the sum on the host: each micro-batch fetches
the sum, adds to it, and copies it back, which with four micro-batches is three quarters of all
bytes. Here the sum stays on the device if there is room (``compression.offload.sums``), in
upstream's dtype, and is copied once per step, encoded; norm and overflow flag are computed as in
upstream. Without room each gradient is copied encoded, and the host adds them up in one pass over
the sum: in fp32, or with a lossless codec, which must give the same bits, in upstream's dtype. Norm
and overflow flag of such a sum are computed on the host as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridcomp.channels import Channels, Packed
from hybridcomp.codecs.base import Codec
from hybridcomp.log import say

#: attribute of an optimizer: its Sums
ATTRIBUTE = "_hybridcomp_sums"


@dataclass
class MicroBatchSums:
    """Sums of the gradients of one optimizer's micro-batches, with norms of those on the host."""

    #: whether the device adds up micro-batches; None: not decided yet
    on_device: bool | None = None
    # sums by parameter id, in upstream's dtype
    totals: dict[int, Tensor] = field(default_factory=dict)
    # sums that the host computes in fp32, by parameter id
    packed: dict[int, Packed] = field(default_factory=dict)
    #: functions that close sums left open since the last step, for want of a boundary
    open: dict[int, Callable[[], None]] = field(default_factory=dict)
    # norms of closed sums that were not passed to upstream yet
    norms: dict[int, Tensor] = field(default_factory=dict)

    def add(self, key: int, values: Tensor, dtype: torch.dtype, *, first: bool) -> Tensor:
        """Add ``values`` to the sum on the device, in upstream's ``dtype``; return the sum."""
        total = self.totals.get(key)
        if total is None:
            self.totals[key] = total = torch.empty_like(values, dtype=dtype)
            first = True
        if first:
            total.copy_(values)
        else:
            total.add_(values.to(dtype))
        return total

    def close(self, key: int, total: Tensor, out: Tensor, norm: Callable[[Tensor], Tensor]) -> None:
        """Copy a complete sum on the host to the optimizer's gradient, and compute its norm."""
        out.copy_(total)
        self.norms[key] = norm(total)

    def close_packed(self, key: int, packed: Packed) -> None:
        """Compute the norm of a complete sum accumulated in the optimizer's gradient."""
        assert packed.square is not None
        self.norms[key] = packed.square.sqrt()


def add_on_host(
    optimizer: Any,
    channels: Channels,
    key: int,
    values: Tensor,
    total: Callable[[], Tensor],
    out: Tensor,
    codec: Codec,
    norm: Callable[[Tensor], Tensor],
    *,
    raw_nbytes: int,
    first: bool,
    boundary: bool,
) -> None:
    """Copy one micro-batch's gradient to the host, encoded, for the host to add to the sum.

    ``total``: makes a tensor for the sum in upstream's dtype, if equal bits or fp16 need it.
    """
    sums, moves = sums_of(optimizer), channels.host
    close: Callable[[], None]
    if codec.lossless or values.dtype == torch.float16 or out.dtype != torch.float32:
        if key not in sums.totals:
            sums.totals[key] = total()
        held = sums.totals[key]
        finish = partial(sums.close, key, held, out, norm)
        moves.to_host(values, held, codec, raw_nbytes=raw_nbytes, add=not first)
        close = partial(moves.when_complete, finish, on=values.device)
    else:
        packed = sums.packed.get(key)
        if packed is None or first:
            sums.packed[key] = packed = Packed(out)
        moves.pack(values, packed, codec, raw_nbytes=raw_nbytes)
        finish = partial(sums.close_packed, key, packed)
        close = partial(moves.unpack, packed, on=values.device, then=finish)
    sums.open[key] = close
    if boundary:
        sums.open.pop(key)()


def adds_on_device(
    optimizer: Any, channels: Channels, like: Tensor, numel: int, device: torch.device
) -> bool:
    """Return whether this step's micro-batches are added up on the device, small ones too.

    ``like``: a tensor of the sums' dtype; ``numel``: elements of all gradients of this rank.
    """
    if channels.host.copy_codec(1 << 40, like.dtype, "backward") is None:
        return False
    sums = sums_of(optimizer)
    if sums.on_device is None:
        sums.on_device, note = _room(channels, device, numel * like.itemsize)
        say(note)
    return sums.on_device


def _room(channels: Channels, device: torch.device, nbytes: int) -> tuple[bool, str]:
    """Return whether the device has room for sums of ``nbytes``, and a message for the user.

    Called in the first backward pass, when activations take the most memory.
    """
    asked = channels.config.offload.sums
    size, key = f"{nbytes / 1e6:.0f} MB", f"(compression.offload.sums: {asked})"
    fits = True
    if asked == "auto" and device.type == "cuda":
        cuda: Any = torch.cuda
        free, whole = cuda.mem_get_info(device)
        free += cuda.memory_reserved(device) - cuda.memory_allocated(device)
        fits = free - nbytes >= whole / 10
    if asked == "device" or (asked == "auto" and fits):
        return True, f"offload: micro-batches are added up on the device, in {size} of it {key}"
    why = "" if asked == "host" else f", as {size} more would not leave a tenth of the device free"
    return False, f"offload: micro-batches are added up on the host{why} {key}"


def sums_of(optimizer: Any) -> MicroBatchSums:
    """Return the sums of an optimizer."""
    found: MicroBatchSums | None = getattr(optimizer, ATTRIBUTE, None)
    if found is None:
        found = MicroBatchSums()
        setattr(optimizer, ATTRIBUTE, found)
    return found


def forget(optimizer: Any) -> None:
    """Free the sums: the optimizer's gradients are native from now on."""
    if hasattr(optimizer, ATTRIBUTE):
        delattr(optimizer, ATTRIBUTE)
