"""Gather only trained parameters after a step of ZeRO 1 and 2.

Each rank broadcasts the trained parts of its shard of the flat group. Frozen parts were gathered
once, losslessly, after freezing; every rank keeps them, and no lossy codec touches them. Before
each gather the ranks exchange one bit: whether a load or a user has changed the frozen part of any
shard. If so, the whole group is gathered once more, natively.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channel
from hybridcomp.channels.messages.broadcast_reduce import Broadcast
from hybridcomp.channels.messages.kept_weights import changed_anywhere, hashes_of
from hybridcomp.patches.ds.zero.parameter_gathers import TRAINED

#: attributes of the optimizers: flat groups that are gathered after a step, and parameters of these
GROUPS = (("bit16_groups_flat", "bit16_groups"), ("bf16_groups_flat", "bf16_groups"))
Stretch = tuple[int, int]


def follow(optimizer: Any) -> None:
    """Restrict the gather of each flat group to the parameters trained now."""
    for name, groups in GROUPS:
        flats = getattr(optimizer, name, ())
        for flat, params in zip(flats, getattr(optimizer, groups, ()), strict=True):
            vars(flat).pop(TRAINED, None)
            if any(not p.requires_grad for p in params):
                setattr(flat, TRAINED, TrainedGather(flat, params))


def stretches(flat: Tensor, params: Iterable[Any], trains: bool) -> list[Stretch]:
    """Return where trained (or untrained) parameters lie in ``flat``, joining neighbours."""
    found: list[Stretch] = []
    places = [((p.data_ptr() - flat.data_ptr()) // flat.itemsize, p) for p in params]
    for start, p in sorted(places, key=lambda place: place[0]):
        if p.requires_grad is not trains or not p.numel():
            continue
        stop = start + p.numel()
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return found


class TrainedGather:
    """Gather of a flat group in which some parameters are frozen."""

    def __init__(self, flat: Tensor, params: Iterable[Any]) -> None:
        params = list(params)
        self._trained = stretches(flat, params, trains=True)
        self._frozen = stretches(flat, params, trains=False)
        self._hashes: list[int] | None = None  # hashes of the frozen part of this rank's shard

    @torch.no_grad()
    def run(self, channel: Channel, flat: Tensor, group: Any, whole: Callable[[], object]) -> None:
        """Gather into ``flat``, 1-D; ``whole`` gathers the entire group."""
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if ranks == 1 or channel.delta:  # the deltas of frozen parts are zero
            whole()
            return
        share, flat = flat.numel() // ranks, flat.detach()
        now: list[int] = []

        def flags() -> list[bool]:
            frozen = _within(self._frozen, rank, share)
            now.extend(hashes_of([flat[start:stop] for start, stop in frozen]))
            return [now != self._hashes]

        if any(changed_anywhere(channel, flags, 1, flat.device, group)):
            with channel.suspended():
                whole()
            self._hashes = now
            return
        under_way = []
        for root in range(ranks):
            parts = [flat[start:stop] for start, stop in _within(self._trained, root, share)]
            if parts:
                under_way.append((parts, self._broadcast(channel, parts, group, root, rank)))
        for parts, (handle, values) in under_way:
            handle.wait()
            for part, got in zip(parts, values.split([p.numel() for p in parts]), strict=True):
                part.copy_(got)

    def _broadcast(
        self, channel: Channel, parts: list[Tensor], group: Any, root: int, rank: int
    ) -> Any:
        numel = sum(part.numel() for part in parts)
        values = torch.cat(parts) if root == rank else parts[0].new_empty(numel)
        message = Broadcast(
            numel=numel, dtype=values.dtype, group=group, values=values, root=root
        )  # fmt: skip
        known, meter = channel.group(group), channel.meter(values.device)
        return channel.run(
            message, native=lambda: message.native(known, meter), encoded=lambda sent: sent
        )


def _within(found: Iterable[Stretch], rank: int, share: int) -> list[Stretch]:
    """Return the parts of the ranges that lie in a rank's shard."""
    low, high = rank * share, (rank + 1) * share
    cut = ((max(start, low), min(stop, high)) for start, stop in found)
    return [(start, stop) for start, stop in cut if start < stop]
