"""Gather the parameters of an FSDP2 group from a copy of them on each node.

The copy is that of ``channels/messages/node_copies.py``: the changes of an optimizer step cross
between nodes once, in the first gather of a forward or backward pass; all other gathers stay inside
the nodes. ``reshard_after_forward=N`` keeps a copy of its own between the two passes and gathers it
itself. Torch does not tell a slot when parameters change, so before each gather the ranks compare
digests of their shards with those of the last sent shards. This also detects changes outside of a
step, such as loaded weights.

With 8 bits the copy consists of bytes: blockint payloads of matrices, one for each shard, and
unencoded vectors (norms, biases).

Detaching the model frees its copies; checkpoints do not contain them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channel, Channels
from hybridcomp.channels.messages.kept_slices import KeptSlice
from hybridcomp.channels.messages.node_copies import CopyGroups, width_of
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.stepcode import STEP_DTYPES
from hybridcomp.collectives.topology import discover
from hybridcomp.patches.torch.fsdp2.members import Members


def groups_of(channels: Channels) -> CopyGroups | None:
    """Return the ranks by node if the block asks for copies; in that case a collective.

    Raises ConfigError, on all ranks, where nodes are not alike or have one rank.
    """
    config = channels.config
    if not config.zero.keeps_copy:
        return None
    nodes = discover("auto" if config.hierarchy == "none" else config.widths)
    return CopyGroups.of(width_of(nodes), nodes.source)


class NodeCopyGather:
    """All-gathers of one group's parameters, from the copy on this rank's node."""

    def __init__(self, members: Members, channel: Channel, groups: CopyGroups) -> None:
        self._members, self._channel, self._groups = members, channel, groups
        self.kept = KeptSlice(channel, groups)
        exact = channel.state.config.zero.secondary == "exact"
        self._codec: Codec | None = (
            None if exact else channel.state.policy.codecs["zero", "forward"]
        )

    def serves(self, group: dist.ProcessGroup, dtype: torch.dtype) -> bool:
        """Return whether a gather over ``group`` reads the copy."""
        return group.size() == self._groups.size and dtype in STEP_DTYPES

    @torch.no_grad()
    def gather(self, output: Tensor, share: Tensor) -> None:
        """Fill ``output`` (W n values) with every rank's ``share`` (n values); a collective."""
        rows = self.kept.gather(
            lambda: self._sent(share), (share.numel(), share.dtype), share.device
        )
        if self._codec is None:
            output.view(rows.shape).copy_(rows)
        else:
            self._decode(rows, output.view(len(rows), -1))

    def _sent(self, share: Tensor) -> Tensor:
        """Return this rank's shard as it is sent: values, or bytes if it is encoded."""
        return self._bytes_of(share) if self._codec is not None else share

    def _parts(self, ranks: int) -> Iterator[tuple[slice, bool]]:
        """Yield each parameter's range in a shard, and whether it is encoded."""
        start = 0
        for member in self._members.members:
            stop = start + member.chunk(ranks)
            yield slice(start, stop), member.numel > member.rows and stop > start
            start = stop

    def _bytes_of(self, share: Tensor) -> Tensor:
        assert self._codec is not None, "encoded copies"
        found = []
        for stretch, is_encoded in self._parts(self._groups.size):
            part = share[stretch].contiguous()
            if is_encoded:
                self._channel.sample(part, self._codec, "forward")
                nbytes = self._codec.wire_nbytes(part.numel(), part.dtype)
                found.append(part.new_zeros(nbytes, dtype=torch.uint8))
                self._codec.encode(part, found[-1])
            else:
                found.append(part.view(torch.uint8))
        return torch.cat(found)

    def _decode(self, rows: Tensor, out: Tensor) -> None:
        """Decode all ranks' shards, (W, bytes), into ``out`` (W, n)."""
        assert self._codec is not None, "encoded copies"
        place = 0
        for stretch, is_encoded in self._parts(len(rows)):
            numel = stretch.stop - stretch.start
            nbytes = numel * out.itemsize
            if is_encoded:
                nbytes = self._codec.wire_nbytes(numel, out.dtype)
            for row, values in zip(rows, out, strict=True):
                part = row[place : place + nbytes]
                if is_encoded:
                    decoded = values.new_empty(numel)
                    self._codec.decode(part.clone(), decoded)
                else:
                    decoded = part.clone().view(out.dtype)
                values[stretch].copy_(decoded)
            place += nbytes
