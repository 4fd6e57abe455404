"""Weights of an FSDP2 group that are not trained, gathered once and kept encoded on every rank.

As ``patches/ds/frozen`` does at ZeRO 3. A gather of the group then sends the shards of its trained
parameters only; the others are decoded. Before each gather the ranks of the group tell each other,
in a bit for each weight, whose shard has changed since it was kept, or is trained from now on.
Gathers of ``reshard_after_forward=N`` in the backward pass bring back what the forward pass had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channel, native_nbytes
from hybridcomp.channels.kept_weights import KeptWeights, changed_anywhere, hashes_of
from hybridcomp.codecs.base import VALUE_DTYPES
from hybridcomp.config.parameter import FrozenConfig
from hybridcomp.patches.torch.fsdp2_members import Members


class FrozenGather:
    """Gathers of one group of which some parameters may be frozen."""

    def __init__(self, members: Members, channel: Channel, settings: FrozenConfig) -> None:
        self._members, self._channel, self._settings = members, channel, settings
        #: by place in the group: what is kept, and the hash of this rank's shard of it
        self._kept: dict[int, tuple[KeptWeights, int]] = {}

    @property
    def nbytes(self) -> int:
        """Return the bytes that this rank keeps."""
        return sum(kept.nbytes for kept, _ in self._kept.values())

    def serves(self, group: dist.ProcessGroup) -> bool:
        """Return whether a gather over ``group`` has frozen parameters, or had some."""
        whole = self._members.shards
        if whole is None or group.size() != whole.size():
            return False
        return bool(self._kept) or len(self._members.trained) < len(self._members.members)

    @torch.no_grad()
    def gather(
        self,
        output: Tensor,
        share: Tensor,
        group: dist.ProcessGroup,
        trained: Callable[[Tensor, Tensor, Sequence[int]], object],
        native: Callable[[Tensor, Tensor, dist.ProcessGroup, bool], Any],
    ) -> None:
        """Fill ``output``, the shards of all ranks, from what is kept and what is gathered.

        Args:
            share: this rank's shards of all parameters.
            trained: gathers shards of the parameters at these places, as the block says.
            native: gathers as torch does.
        """
        rows = output.view(group.size(), -1)
        own = share.clone()  # a view of output
        stretches = self._stretches(len(rows))
        self._drop_changed(own, stretches, group)
        moves = set(self._members.trained)
        if output.dtype not in VALUE_DTYPES:
            moves = set(range(len(stretches)))
        lacking = [p for p in range(len(stretches)) if p not in moves and p not in self._kept]
        for places, is_kept in ((sorted(moves), False), (lacking, True)):
            if not places:
                continue
            part = torch.cat([own[stretches[place]] for place in places])
            found = part.new_empty(len(rows) * part.numel())
            if is_kept:
                self._natively(found, part, group, native)
            else:
                trained(found, part, places)
            lengths = [stretches[place].stop - stretches[place].start for place in places]
            parts = torch.split(found.view(len(rows), -1), lengths, 1)
            for place, values in zip(places, parts, strict=True):
                rows[:, stretches[place]].copy_(values)
                if is_kept:
                    self._keep(place, values, own[stretches[place]])
        spared = 0
        for place, (kept, _) in self._kept.items():
            stretch = stretches[place]
            rows[:, stretch].copy_(kept.decoded().view(len(rows), -1))
            spared += (stretch.stop - stretch.start) * (place not in lacking)
        raw = native_nbytes.all_gather_nbytes(spared, output.dtype, len(rows))
        meter, ring = self._channel.meter(output.device), self._channel.group(group).ring
        self._channel.record(meter, raw, "forward", ring)

    def _natively(
        self, out: Tensor, part: Tensor, group: dist.ProcessGroup, native: Callable[..., Any]
    ) -> None:
        raw = native_nbytes.all_gather_nbytes(part.numel(), part.dtype, group.size())
        self._channel.count_native(raw)
        native(out, part, group, False)

    def _keep(self, place: int, values: Tensor, own: Tensor) -> None:
        member = self._members.members[place]
        is_vector = member.numel == member.rows
        kept = KeptWeights(values.reshape(-1), self._settings, is_vector)
        (own_hash,) = hashes_of([own])
        self._kept[place] = kept, own_hash

    def _drop_changed(
        self, own: Tensor, stretches: Sequence[slice], group: dist.ProcessGroup
    ) -> None:
        if not self._kept:
            return
        trained, places = set(self._members.trained), sorted(self._kept)
        now = hashes_of([own[stretches[place]] for place in places])
        flags = [
            place in trained or own_hash != self._kept[place][1]
            for place, own_hash in zip(places, now, strict=True)
        ]
        changed = changed_anywhere(self._channel, flags, own.device, group)
        for place, flag in zip(places, changed, strict=True):
            if flag:
                del self._kept[place]

    def _stretches(self, ranks: int) -> list[slice]:
        """Return where each parameter lies in a share."""
        edges = [0]
        for member in self._members.members:
            edges.append(edges[-1] + member.chunk(ranks))
        return [slice(edges[n], edges[n + 1]) for n in range(len(edges) - 1)]
