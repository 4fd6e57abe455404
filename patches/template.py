"""Gradients that toytrain averages over its ranks, dimension ``dp``.

``toytrain.gradients.average`` and not ``toytrain.step``: the step also clips, writes its log and
changes with every release; ``average`` is looked up in its module at every call.

This is the template of a seam: docs/contributing/seam.md says how to make another one of it. Its
four parts stand in the order that every seam has: why this symbol (above), the ``Seam``, the
replacement, ``COVERS`` and ``PATCHES``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import native_nbytes
from hybridcomp.patches.common.routes import flat, route
from hybridcomp.patching import Seam

#: the symbol, the versions of the package that are known, and the parameters that it has in them
AVERAGE = Seam(
    requirement="toytrain >= 1.0, < 2.0",
    module="toytrain.gradients",
    qualname="average",
    parameters=("gradient", "group"),
)


def make_average(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Send the sum encoded where the block asks for it; divide as upstream divides."""

    @functools.wraps(original)
    def average(gradient: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        world_size = dist.get_world_size(group)
        raw_nbytes = native_nbytes.all_reduce_nbytes(gradient.numel(), gradient.dtype, world_size)
        found = route("dp", gradient.numel(), gradient.dtype, group, raw_nbytes)
        if found is None:  # no block, one rank, or native: then it is written down already
            return original(gradient, group)
        values = flat(gradient)
        found.channel.all_reduce(values, found.codec, group, raw_nbytes=raw_nbytes)
        gradient.copy_(values.view_as(gradient))
        mean: Tensor = gradient.div_(world_size)
        return mean

    return average


#: the dimensions whose messages come through here, for the support matrix
COVERS = ("dp",)
PATCHES = ((AVERAGE, make_average),)
