"""Gather parameter deltas when FSDP2 keeps unsharded parameters, as torch 2.15 can.

``set_keep_unsharded_storage`` keeps the values of the last gather, this rank's chunk included, in
the storage of a parameter until the next gather is copied out. ``stepcode`` uses these values as
its reference, without another copy of the parameters. Before each gather the ranks compare digests
of their references, as always.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channel
from hybridcomp.channels.messages import delta_references
from hybridcomp.patches.torch.fsdp2.members import Members


def keeps(parameter: Any) -> bool:
    """Return whether torch keeps the storage of this ``FSDPParam`` after resharding."""
    return bool(getattr(parameter, "keep_unsharded_storage", False))


class KeptGather:
    """Gathers of one group that send only changes to the parameters that torch keeps."""

    def __init__(self, members: Members, channel: Channel) -> None:
        self._members, self._channel = members, channel
        self._generation = -1  # channel.generation at the last gather; ``resync`` changes it

    @torch.no_grad()
    def prepare(self, output: Tensor, group: dist.ProcessGroup | None) -> Tensor | None:
        """Write the other ranks' values of the last gather into the rows of ``output``.

        Returns this rank's values of the last gather, (n,). Returns None if all ranks leave the
        gather to torch, which is exact. A collective.
        """
        channel, rank = self._channel, dist.get_rank(group)
        rows = output.view(dist.get_world_size(group), -1)
        generation, self._generation = self._generation, channel.generation
        if delta_references.is_exact(channel):
            return None
        held: list[Tensor] | None = None

        def state() -> tuple[bool, int]:
            nonlocal held
            held = self._held(rows)
            ready = held is not None and generation == channel.generation
            return ready, _digest(held) if ready and held is not None else 0

        if not delta_references.alike(channel, state, output.device, group) or held is None:
            return None
        start = 0
        for table in held:
            stop = start + table.shape[1]
            for other in range(len(rows)):
                if other != rank:
                    rows[other, start:stop].copy_(table[other])
            start = stop
        return torch.cat([table[rank] for table in held])

    def _held(self, rows: Tensor) -> list[Tensor] | None:
        """Return torch's kept values of each parameter, (ranks, chunk); None if one is missing."""
        found = [_table(p, rows.shape[0], rows.dtype) for p in self._members.group.fsdp_params]
        whole = [table for table in found if table is not None]
        fits = sum(table.shape[1] for table in whole) == rows.shape[1]
        return whole if len(whole) == len(found) and fits else None


def _table(parameter: Any, world_size: int, dtype: torch.dtype) -> Tensor | None:
    """Return all ranks' kept chunks of a parameter, (ranks, chunk); None if there are none."""
    outputs = parameter.all_gather_outputs
    if not keeps(parameter) or len(outputs) != 1:
        return None
    (whole,) = outputs
    if whole.dtype != dtype or not whole.untyped_storage().size() or whole.numel() % world_size:
        return None
    dim, whole = parameter.fsdp_placement.dim, whole.detach()
    if dim == 0:
        return whole.view(world_size, -1)  # type: ignore[no-any-return]
    size = list(parameter.padded_sharded_param_size)
    size[dim] *= world_size
    parts = whole.view(size).chunk(world_size, dim)
    return torch.stack([part.reshape(-1) for part in parts])


def _digest(held: list[Tensor]) -> int:
    """Return a sum of the bits of all chunks, weighted by position, as a signed 64-bit number."""
    total = torch.zeros((), dtype=torch.int64, device=held[0].device)
    for place, row in enumerate(row for table in held for row in table):
        total += (2 * place + 1) * delta_references.digest(row)
    return int(total)
