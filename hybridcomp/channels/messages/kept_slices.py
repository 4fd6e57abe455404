"""Keep all ranks' shares of the last gather as references for the deltas of the next gather.

With several nodes of the same size, each rank keeps its slice of the node's copy (``KeptSlice``);
in other groups, it keeps all shares (``KeptRows``). Before each gather the ranks compare digests of
their references. If these differ, or a rank has none, full shares are sent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels.channel import Channel
from hybridcomp.channels.messages.delta_references import alike, digest, is_exact
from hybridcomp.channels.messages.node_copies import CopyGroups, gather_inside, renew, state_of
from hybridcomp.channels.messages.p2p_and_gather import AllGather
from hybridcomp.channels.messages.parameter_deltas import gather_steps
from hybridcomp.codecs.exact_steps import ExactSteps
from hybridcomp.codecs.expcode import ExpCode
from hybridcomp.job.together import together


class KeptSlice:
    """Gather over all ranks of the job from this rank's slice of its node's copy.

    Attributes:
        slice: (N, n); None before the first gather.
        on_host: whether the slice lies in host memory between gathers.
    """

    def __init__(self, channel: Channel, groups: CopyGroups, on_host: bool = False) -> None:
        self._channel, self._groups, self.on_host = channel, groups, on_host
        self.slice: Tensor | None = None
        self._sent: int | None = None  # digest of this rank's share when it was last sent
        self._of = (-1, -1)  # generation of the channels and step of the last gather

    @torch.no_grad()
    def gather(
        self, own: Callable[[], Tensor], native: tuple[int, torch.dtype], device: torch.device
    ) -> Tensor:
        """Return all ranks' shares, (W, n), on ``device``; a collective of all ranks.

        Args:
            own: returns this rank's share, (n,) bf16, fp16 or uint8.
            native: elements and dtype of a share in the native gather, by which the ledger counts.
        """
        rows, held, was_renewed = self.renew(own, native, device)
        gather_inside(self._channel, self._groups, held, native, was_renewed, rows)
        return rows

    def renew(
        self, own: Callable[[], Tensor], native: tuple[int, torch.dtype], device: torch.device
    ) -> tuple[Tensor, Tensor, bool]:
        """Renew the slice if any rank's share has changed, on all ranks or on none.

        After a failure the next renewal sends whole shares. Returns an uninitialized tensor (W, n)
        for all shares, the slice on ``device``, and whether the slice was renewed.
        """
        channel, groups = self._channel, self._groups
        share: Tensor | None = None  # no tensor is made before the ranks learn of failures
        rows: Tensor | None = None
        held: Tensor | None = None
        now = 0

        def prepared() -> tuple[list[Tensor] | None, bool]:
            nonlocal share, rows, held, now
            share = own()
            rows = share.new_empty(groups.size, share.numel())
            now = int(digest(share.view(torch.bfloat16) if share.dtype == torch.uint8 else share))
            generation, step = self._of
            known = self.slice is not None and generation == channel.generation
            known = known and (step == channel.step or not is_exact(channel))
            if not known or self.slice is None:
                return None, False
            held = self.slice.to(device)
            return [held.view(-1)], now == self._sent

        state = state_of(channel, groups, prepared, device)
        assert share is not None and rows is not None, "prepared"
        if state == "current":
            assert held is not None, "a slice that is current"
            return rows, held, False
        with together("zero: renewing the copies of a node", self._forget, votes=True):
            self.slice = None  # None until the new slice is complete
            held = renew(channel, groups, share, held if state == "steps" else None, native)
            self.slice = held.cpu() if self.on_host else held
        self._sent, self._of = now, (channel.generation, channel.step)
        return rows, held, True

    def _forget(self) -> None:
        self.slice = None


class KeptRows:
    """Gather over one group, each rank of which keeps all ranks' shares of the last gather.

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
        held, self.rows = self.rows, None  # None until the new rows are complete
        rows: Tensor | None = None

        def state() -> tuple[bool, int]:
            nonlocal rows
            if held is not None and self._generation == channel.generation:
                rows = held.to(own.device)
            return rows is not None, 0 if rows is None else int(digest(rows.view(-1)))

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
