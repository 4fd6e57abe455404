"""All-gather an FSDP2 group's parameters, encoded or as differences from the last gather.

A gather runs on the stream that FSDP has made current, and has completed there when the call
returns, unless FSDP calls it asynchronously.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from hybridcomp import channels
from hybridcomp.channels import Channel
from hybridcomp.channels.messages import parameter_deltas
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Handle
from hybridcomp.collectives.wire.steps import given
from hybridcomp.collectives.wire.transport import Works
from hybridcomp.log import say_once as say
from hybridcomp.patches.torch.attached import Attached
from hybridcomp.patches.torch.fsdp2.copies import NodeCopyGather
from hybridcomp.patches.torch.fsdp2.frozen import FrozenGather
from hybridcomp.patches.torch.fsdp2.kept import KeptGather
from hybridcomp.patches.torch.fsdp2.members import Members
from hybridcomp.patches.torch.fsdp2.slot import HandleWork

#: said where torch gathers bytes
BYTES = (
    "zero: a group whose parameters have several dtypes is gathered as bytes, natively; name one "
    "in MixedPrecisionPolicy(param_dtype=...), or call fully_shard on parameters of one dtype"
)


@dataclass(eq=False, kw_only=True)
class _ParameterGather(channels.AllGather):
    """All-gather of a group's parameters.

    Attributes:
        stays_exact: returns whether this gather must not be lossy.
        kept: prepares gathers of differences, if torch keeps the gathered parameters.
        held: this rank's values after the last gather, if all ranks send differences.
        copies: gathers from the nodes' copies, if the block asks for copies.
        places: indices of the gathered parameters in the group; None: all.
    """

    members: Members
    stays_exact: Callable[[], bool]
    kept: KeptGather
    held: Tensor | None = None
    copies: NodeCopyGather | None = None
    places: Sequence[int] | None = None

    def stays_native(self, channel: Channel, codec: Codec) -> bool:
        """Return whether the gather must be exact but its codec is lossy or lacks its reference."""
        if self.copies is not None:
            assert self.group is not None, "FSDP2 names its groups"
            if self.copies.serves(self.group, self.dtype):
                return False
            return codec.lossless or self.stays_exact()
        if codec.references:
            self.held = self.kept.prepare(self.out, self.group)
            return self.held is None
        return not codec.lossless and self.stays_exact()

    def send(self, channel: Channel, codec: Codec) -> Handle:
        """Gather encoded shards, or their changes since the last gather."""
        if self.copies is not None:
            self.copies.gather(self.out, self.shard)
            return Handle(given(None), channel.meter(self.shard.device), False)
        if self.held is None:
            return super().send(channel, codec)
        rows = self.out.view(-1, self.shard.numel())
        return parameter_deltas.gather_steps(channel, rows, self.held, codec, self.group)

    def cuts(self, codec: Codec) -> Sequence[int]:
        """Return the offsets in the shard where parameters begin; no lossy codec crosses these."""
        ranks = self.out.numel() // self.shard.numel()
        return () if codec.lossless else self.members.cuts(ranks, self.places)


class EncodedAllGather(AllGather):
    """All-gather of the parameters of one group, encoded where the policy says so."""

    def __init__(
        self,
        members: Members,
        attached: Attached,
        native: AllGather,
        copies: NodeCopyGather | None = None,
        frozen: FrozenGather | None = None,
    ) -> None:
        self._members, self._attached, self.native = members, attached, native
        self._channel: Channel = attached.channels["zero"]
        self._kept = KeptGather(members, self._channel)
        self._copies, self._frozen = copies, frozen

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate as torch's collective does."""
        return self.native.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather ``input_tensor``, here a view of ``output_tensor``, into ``output_tensor``."""
        if self._frozen is not None and self._frozen.serves(group, input_tensor):
            trained = functools.partial(self._gather, group=group, async_op=False)
            self._frozen.gather(output_tensor, input_tensor, group, trained, self.native)
            return Works([], None) if async_op else None
        return self._gather(output_tensor, input_tensor, None, group=group, async_op=async_op)

    def _gather(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        places: Sequence[int] | None,
        *,
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> dist.Work | None:
        """Gather shards of the parameters ``places`` (indices; None: all), as the block says."""
        if output_tensor.dtype == torch.uint8 and self._channel.active:
            say(BYTES)
        message = _ParameterGather(
            numel=output_tensor.numel(), dtype=output_tensor.dtype, group=group,
            shard=input_tensor.detach(), out=output_tensor.detach(), async_op=async_op,
            single_post=True, members=self._members, stays_exact=self._stays_exact,
            kept=self._kept, copies=self._copies, places=places,
        )  # fmt: skip
        return self._channel.run(
            message,
            native=lambda: self.native(output_tensor, input_tensor, group, async_op),
            encoded=lambda handle: HandleWork(handle) if async_op else None,
        )

    def _stays_exact(self) -> bool:
        """Return whether this gather must be exact: it repeats an earlier gather, or is outside of
        passes.
        """
        state = self._members.group
        if state.is_sharded_post_forward:
            say(
                "zero: backward gathers with reshard_after_forward=N stay native: they bring back "
                "what the forward pass has decoded"
            )
            return True
        if state._training_state == TrainingState.IDLE and not self._is_for_a_pass():
            say(
                "zero: unshard() outside of forward and backward passes gathers exact parameters, "
                "natively"
            )
            return True
        return False

    def _is_for_a_pass(self) -> bool:
        """Return whether an explicit ``unshard()`` serves several passes of a training step.

        Chunked losses (torchtitan) need this: they gather the output head between the passes of
        the layers, and keep it until all chunks are done. The first step's forward pass gathers the
        head encoded, so later steps must not use exact parameters instead.
        """
        group = self._members.group
        keeps = not (group.reduce_grads or group.reshard_after_backward)
        return keeps and self._attached.is_open
