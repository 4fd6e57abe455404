"""Gradients that toytrain averages over its ranks, dimension ``dp``.

The seam is ``toytrain.gradients.average``, which is looked up in its module at every call, and not
``toytrain.step``, which also clips, writes its log and changes with every release.

This is the template of a seam: docs/contributing/seam.md says how to make another one of it. Its
four parts stand in the order of every seam: the reason for this symbol (above), the ``Seam``, the
replacement, then ``COVERS`` and ``PATCHES``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import AllReduce
from hybridcomp.collectives import Handle
from hybridcomp.patches.common.collective_wrappers import flat
from hybridcomp.patches.common.routes import Layers
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam

#: the symbol, its parameters, and the versions of the package in which it has these
AVERAGE = Seam(
    requirement="toytrain >= 1.0, < 2.0",
    module="toytrain.gradients",
    qualname="average",
    parameters=("gradient", "group"),
)
#: the layers whose messages are sent, and the dimension of their groups
LAYERS = Layers(lambda group: "dp")


@around
def make_average(
    original: Callable[..., Tensor], gradient: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Send the sum encoded where the block asks for it; divide as upstream divides."""
    channel = LAYERS.channel(group)
    if channel is None:  # no block, or one rank
        return original(gradient, group)
    values, world_size = flat(gradient), dist.get_world_size(group)
    message = AllReduce(numel=gradient.numel(), dtype=gradient.dtype, group=group, values=values)

    def deliver(handle: Handle) -> Tensor:
        handle.wait()
        gradient.copy_(values.view_as(gradient))
        mean: Tensor = gradient.div_(world_size)
        return mean

    return channel.run(message, native=lambda: original(gradient, group), encoded=deliver)


#: the dimensions whose messages come through here, for the support matrix
COVERS = ("dp",)
PATCHES = ((AVERAGE, make_average),)
