"""Rotation of torch's own ring attention (``context_parallel``), dimension ``cp``.

The seam is ``_create_rotater``, which makes the object that sends a tensor to the next rank; the
attention around it, which computes blocks and sums, stays torch's. Keys and values are encoded once
in each pass and forwarded as bytes; sums of gradients, which torch sends round the ring in fp32,
are encoded at every hop. Torch's rotater sends messages that the block leaves native.

The module is private to torch: an untested release is accepted only if its ring attention has the
same code (``torch_versions.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from hybridcomp.dimensions import Direction
from hybridcomp.nn.context.rotation import Rotater
from hybridcomp.nn.context.traffic import RingTraffic
from hybridcomp.patches.torch import torch_versions
from hybridcomp.seams.patching import Seam
from hybridcomp.session.process import current

CREATE = Seam(
    requirement=torch_versions.RING,
    module="torch.distributed.tensor.experimental._context_parallel._attention",
    qualname="_create_rotater",
    parameters=("pg", "seq_dim", "method"),
    source=torch_versions.checked("context_parallel", torch_versions.RING),
)


def make_create(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make a rotater that sends through the channel; torch passes a method for gradients only."""

    @functools.wraps(original)
    def _create_rotater(pg: dist.ProcessGroup, seq_dim: int, method: Any = None) -> Any:
        channels, ranks = current(), dist.get_world_size(pg)
        if channels is None or ranks == 1:
            return original(pg, seq_dim, method)
        direction: Direction = "forward" if method is None else "backward"
        traffic = RingTraffic(channels, pg, dist.get_rank(pg), ranks)
        return Rotater(traffic, direction, lambda: original(pg, seq_dim, method))

    return _create_rotater


COVERS = ("cp",)
PATCHES = ((CREATE, make_create),)
