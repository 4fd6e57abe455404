"""Gather the frozen weights of an FSDP2 group once, and keep them encoded on every rank.

``patches/ds/zero/frozen`` does the same at ZeRO 3. A gather of the group then sends only the shards
of its trained parameters; the others are decoded. Before each gather the ranks of the group
exchange one bit per weight: whether its shard has changed since it was kept, or trains from now on.
Backward gathers of ``reshard_after_forward=N`` return the values that the forward pass used.

Torch gathers a group of several dtypes, such as bf16 weights and fp32 adapters, as bytes; here each
parameter is kept, and the trained ones are sent, in their own dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channel, native_nbytes
from hybridcomp.channels.messages.kept_weights import KeptWeights, changed_anywhere, hashes_of
from hybridcomp.codecs.base import VALUE_DTYPES
from hybridcomp.config.parameter import FrozenConfig
from hybridcomp.job.gates import gate
from hybridcomp.job.together import together
from hybridcomp.patches.torch.fsdp2.members import Members
from hybridcomp.patches.torch.fsdp2.rules import dtype_of

#: the operation, for messages
WHAT = "zero: gathering frozen weights to keep them"


class FrozenGather:
    """All-gathers of one group's parameters, some of which may be frozen."""

    def __init__(self, members: Members, channel: Channel, settings: FrozenConfig) -> None:
        self._members, self._channel, self._settings = members, channel, settings
        #: by the parameter's index in the group: the kept weight, and the hash of this rank's shard
        self._kept: dict[int, tuple[KeptWeights, int]] = {}

    @property
    def nbytes(self) -> int:
        """Return the bytes that this rank keeps."""
        return sum(kept.nbytes for kept, _ in self._kept.values())

    def serves(self, group: dist.ProcessGroup, share: Tensor) -> bool:
        """Return whether ``group`` has frozen parameters, or had some at the last gather.

        ``share``: this rank's shards; extensions of torch may send others than the parameters.
        """
        whole = self._members.shards
        if whole is None or group.size() != whole.size():
            return False
        dtypes = self._dtypes(share.dtype)
        if self._stretches(group.size(), dtypes, share.dtype)[-1].stop != share.numel():
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
        """Fill ``output``, the shards of all ranks, from kept weights and a gather of the rest.

        Args:
            share: this rank's shards of all parameters.
            trained: function that gathers the parameters at given indices, as the block says.
            native: function that gathers as torch does.
        """
        rows = output.view(group.size(), -1)
        dtypes = self._dtypes(output.dtype)
        stretches = self._stretches(len(rows), dtypes, output.dtype)
        plain = {place for place, dtype in enumerate(dtypes) if dtype not in VALUE_DTYPES}
        moves = sorted({*self._members.trained, *plain})
        kinds = {dtypes[place] for place in moves}
        kind = kinds.pop() if len(kinds) == 1 else output.dtype
        own: list[Tensor] = []  # ``share`` by parameter, copied since it is a view of ``output``
        message: list[Tensor] = []  # output and input of the gather of trained parameters

        def shards() -> list[Tensor]:
            if not own:
                copied = share.clone()
                if moves:
                    part = torch.cat([copied[stretches[place]] for place in moves]).view(kind)
                    message.extend((part.new_empty(len(rows) * part.numel()), part))
                both = zip(stretches, dtypes, strict=True)
                own.extend(_typed(copied[stretch], dtype) for stretch, dtype in both)
            return own

        self._drop_changed(shards, output.device, group)
        lacking = [p for p in range(len(stretches)) if p not in moves and p not in self._kept]
        if lacking:
            with together(WHAT, lambda: self._forget(lacking), votes=True, group=group):
                part = torch.cat([shards()[place].view(rows.dtype) for place in lacking])
                found = part.new_empty(len(rows) * part.numel())
                self._natively(found, part, group, native)
                for place, values in self._apart(found, rows, lacking, stretches):
                    self._keep(
                        place, values.reshape(-1).contiguous().view(dtypes[place]), own[place]
                    )
        if moves:
            shards()
            trained(message[0], message[1], moves)
        self._put(rows, stretches, lacking, group)
        if moves:
            self._take(message[0].view(rows.dtype), rows, moves, stretches)

    def _take(
        self, found: Tensor, rows: Tensor, places: Sequence[int], stretches: Sequence[slice]
    ) -> None:
        """Write the gathered values of some parameters into ``rows``."""
        for place, values in self._apart(found, rows, places, stretches):
            rows[:, stretches[place]].copy_(values)

    def _apart(
        self, found: Tensor, rows: Tensor, places: Sequence[int], stretches: Sequence[slice]
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the gathered values of each parameter, (ranks, chunk)."""
        lengths = [stretches[place].stop - stretches[place].start for place in places]
        yield from zip(places, torch.split(found.view(len(rows), -1), lengths, 1), strict=True)

    def _put(
        self,
        rows: Tensor,
        stretches: Sequence[slice],
        lacking: Sequence[int],
        group: dist.ProcessGroup,
    ) -> None:
        """Decode the kept weights into ``rows``; count the bytes that were not gathered."""
        spared = 0
        for place, (kept, _) in self._kept.items():
            stretch = stretches[place]
            rows[:, stretch].copy_(kept.decoded().view(rows.dtype).view(len(rows), -1))
            spared += (stretch.stop - stretch.start) * (place not in lacking)
        raw = native_nbytes.all_gather_nbytes(spared, rows.dtype, len(rows))
        meter, ring = self._channel.meter(rows.device), self._channel.group(group).ring
        self._channel.record(meter, raw, "forward", ring)

    def _natively(
        self,
        out: Tensor,
        part: Tensor,
        group: dist.ProcessGroup,
        native: Callable[[Tensor, Tensor, dist.ProcessGroup, bool], Any],
    ) -> None:
        raw = native_nbytes.all_gather_nbytes(part.numel(), part.dtype, group.size())
        self._channel.count_native(raw)
        gate()
        native(out, part, group, False)

    def _forget(self, places: Sequence[int]) -> None:
        for place in places:
            self._kept.pop(place, None)

    def _keep(self, place: int, values: Tensor, own: Tensor) -> None:
        member = self._members.members[place]
        is_vector = member.numel == member.rows
        kept = KeptWeights(values, self._settings, is_vector)
        (own_hash,) = hashes_of([own])
        self._kept[place] = kept, own_hash

    def _drop_changed(
        self, shards: Callable[[], list[Tensor]], device: torch.device, group: dist.ProcessGroup
    ) -> None:
        """Drop outdated kept weights; ``shards``: this rank's shards, by parameter index."""
        if not self._kept:
            return
        trained, places = set(self._members.trained), sorted(self._kept)

        def flags() -> list[bool]:
            own = shards()
            now = hashes_of([own[place] for place in places])
            return [
                place in trained or own_hash != self._kept[place][1]
                for place, own_hash in zip(places, now, strict=True)
            ]

        changed = changed_anywhere(self._channel, flags, len(places), device, group)
        for place, flag in zip(places, changed, strict=True):
            if flag:
                del self._kept[place]

    def _dtypes(self, sent: torch.dtype) -> list[torch.dtype]:
        """Return each parameter's dtype in a gather of dtype ``sent``: uint8 if they differ."""
        every = self._members.group.fsdp_params
        if sent != torch.uint8:
            return [sent] * len(every)
        return list(map(dtype_of, every))

    def _stretches(
        self, ranks: int, dtypes: Sequence[torch.dtype], sent: torch.dtype
    ) -> list[slice]:
        """Return the range of each parameter, of its dtype, in a shard of dtype ``sent``."""
        edges = [0]
        for member, dtype in zip(self._members.members, dtypes, strict=True):
            width = dtype.itemsize // sent.itemsize
            edges.append(edges[-1] + member.chunk(ranks) * width)
        return [slice(edges[n], edges[n + 1]) for n in range(len(edges) - 1)]


def _typed(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``values``, or their bytes as values of ``dtype``, which need memory of their own."""
    return values if values.dtype == dtype else values.clone().view(dtype)
