"""Keep what the last gather brought of all ranks' shares, as what the next one takes steps from.

Over several nodes of equally many ranks a rank keeps its slice of the node's copy (``KeptSlice``),
in other groups all shares (``KeptRows``). Before each gather the ranks compare digests of what they
keep: where these differ, or a rank keeps nothing, the shares are sent whole.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels.channel import Channel
from hybridcomp.channels.delta_references import alike, digest, is_exact
from hybridcomp.channels.node_copies import CopyGroups, gather_inside, renew, state_of
from hybridcomp.channels.p2p_and_gather import AllGather
from hybridcomp.channels.parameter_deltas import gather_steps
from hybridcomp.codecs.exact_steps import ExactSteps
from hybridcomp.codecs.expcode import ExpCode


class KeptSlice:
    """Gathers over all ranks of the job from this rank's slice of its node's copy.

    Attributes:
        slice: (N, n); None before the first gather.
        on_host: whether it lies in host memory between gathers.
    """

    def __init__(self, channel: Channel, groups: CopyGroups, on_host: bool = False) -> None:
        self._channel, self._groups, self.on_host = channel, groups, on_host
        self.slice: Tensor | None = None
        self._sent: int | None = None  # digest of this rank's share when it was sent last
        self._of = (-1, -1)  # generation of the channels and step, then

    @torch.no_grad()
    def gather(self, own: Tensor, native: tuple[int, torch.dtype]) -> Tensor:
        """Return all ranks' shares, (W, n); a collective of all ranks.

        Args:
            own: (n,) bf16, fp16 or uint8, this rank's share.
            native: elements of a share and their dtype, as the job would gather them natively.
        """
        channel, groups = self._channel, self._groups
        values = own.view(torch.bfloat16) if own.dtype == torch.uint8 else own
        now = int(digest(values))
        generation, step = self._of
        known = self.slice is not None and generation == channel.generation
        known = known and (step == channel.step or not is_exact(channel))
        held = None
        if known and self.slice is not None:
            held = self.slice.to(own.device)
        copies = None if held is None else [held.view(-1)]
        state = state_of(channel, groups, copies, own.device, now == self._sent)
        if state != "current":
            table = held if state == "steps" else None
            self.slice = None  # until it is complete
            held = renew(channel, groups, own, table, native)
            self._sent, self._of = now, (channel.generation, channel.step)
            self.slice = held.cpu() if self.on_host else held
        assert held is not None, "renewed"
        return gather_inside(channel, groups, held, native, state != "current")


class KeptRows:
    """Gathers over one group from all shares, which every rank of it keeps.

    Attributes:
        rows: (W, n); None before the first gather.
    """

    def __init__(
        self, channel: Channel, group: dist.ProcessGroup | None, on_host: bool = False
    ) -> None:
        self._channel, self._group, self.on_host = channel, group, on_host
        self.rows: Tensor | None = None
        self._generation = -1

    @torch.no_grad()
    def gather(self, own: Tensor) -> Tensor:
        """Return all ranks' shares, (W, n), which are not to be modified; a collective.

        ``own``: (n,) bf16 or fp16, this rank's share.
        """
        channel, group, rank = self._channel, self._group, dist.get_rank(self._group)
        held, self.rows = self.rows, None  # until they are complete
        ready = held is not None and self._generation == channel.generation
        rows = held.to(own.device) if ready and held is not None else None
        state = (rows is not None, 0 if rows is None else int(digest(rows.view(-1))))
        if alike(channel, state, own.device, group) and rows is not None:
            before = rows[rank].clone()
            rows[rank].copy_(own)
            gather_steps(channel, rows, before, ExactSteps(), group).wait()
        else:
            rows = own.new_empty(dist.get_world_size(group), own.numel())
            message = AllGather(
                numel=rows.numel(), dtype=own.dtype, group=group, shard=own, out=rows.view(-1)
            )
            message.send(channel, ExpCode()).wait()
        self._generation = channel.generation
        self.rows = rows.cpu() if self.on_host else rows
        return rows
