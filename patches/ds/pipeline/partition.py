"""Gathers of the pieces in which pipelines with tensor parallelism send, dimension ``tp``.

With tensor parallelism every tensor rank of a stage holds the same activation, so upstream sends
one piece of it per tensor rank (``pipe_partitioned``, ``grad_partitioned``: Megatron's
scatter/gather, SC21 section 4.1) and gathers the pieces on the other side. The piece travels as
``pp``. The gather runs inside the tensor-parallel group, over the same link as the layers'
all-reduces, so it belongs to ``tp``: forward for activations, backward for their gradients.

The seam is ``PartitionedTensor.full`` and not the ``all_gather_into_tensor`` below it, which the
ZeRO gathers share; it acts only in a running pipeline of an attached engine. Upstream gathers three
times per micro-batch and boundary: the activation on the receiver, its gradient on the sender, and
the activation once more on the sender, to restore the output's shape for autograd.

Pieces must be equally long: upstream fails on others, so those are left to it. A received tensor
was encoded twice, once per link, with the error of both codecs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor

from hybridcomp.channels import AllGather, channels_of
from hybridcomp.collectives import Handle
from hybridcomp.dimensions import Direction
from hybridcomp.patches.ds.pipeline.pipe import running
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam

FULL = Seam(REQUIREMENT, "deepspeed.runtime.utils", "PartitionedTensor.full", ("self", "device"))


@around
def make_full(original: Callable[..., Tensor], self: Any, device: Any = None) -> Tensor:
    """Gather encoded pieces; every tensor rank decodes all payloads, including its own."""
    engine = running()
    channels = None if engine is None else channels_of(engine)
    if channels is None or self.num_parts < 2:
        return original(self, device)
    channel, piece, numel = channels["tp"], self.local_data, prod(self.full_size())
    out = piece.new_empty(numel, device=self.orig_device if device is None else device)
    message = AllGather(
        numel=piece.numel(), dtype=piece.dtype, group=self.group,
        direction=direction(engine, piece), shard=piece.contiguous(), out=out,
    )  # fmt: skip
    native = functools.partial(original, self, device)
    if numel != piece.numel() * self.num_parts:
        return channel.run_native(message, native)

    def encoded(handle: Handle) -> Tensor:
        handle.wait()
        whole: Tensor = out.view(self.full_size())
        return whole

    return channel.run(message, native=native, encoded=encoded)


def direction(engine: Any, piece: Tensor) -> Direction:
    """Return ``backward`` if ``piece`` is in the engine's gradient buffer, else ``forward``.

    Activations are never there, although upstream takes both buffers from one pool: it clones them
    on arrival.
    """
    gradients = engine.grad_layer
    if isinstance(gradients, (list, tuple)) and len(gradients) > 1:
        return "backward" if gradients[1].data_ptr() == piece.data_ptr() else "forward"
    return "forward"


COVERS = ("tp",)
PATCHES = ((FULL, make_full),)
