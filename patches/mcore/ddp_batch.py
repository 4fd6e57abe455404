"""Launch the collectives of one coalescing manager of DistributedDataParallel; see ``ddp``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import NAME, AllReduce, ReduceScatter, Shards
from hybridcomp.channels.messages.parameter_deltas import GatherParameters
from hybridcomp.channels.residuals.pieces import Piece, cut
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Handle, ReduceScatterHandle
from hybridcomp.patches.common import early_engines
from hybridcomp.patches.common.collective_wrappers import flat
from hybridcomp.session.process import current

SUM, AVERAGE = dist.ReduceOp.SUM, dist.ReduceOp.AVG

Kind = Literal["all_reduce", "reduce_scatter", "all_gather"]


@dataclass
class CollectedCall:
    """A collective that upstream has called; ``op``: the reduction, for example a sum."""

    kind: Kind
    native: Callable[[], Any]
    out: Tensor
    values: Tensor
    op: Any

    def divide(self, group: dist.ProcessGroup | None) -> None:
        """Divide the values by the number of ranks if upstream averages."""
        if self.op == AVERAGE:
            self.values.div_(dist.get_world_size(group))


@dataclass
class BucketBatch:
    """The collectives of one coalescing manager; the batch is their handle.

    ``bucket_group``: the calling upstream object, if known; it knows the parameters in a buffer.
    """

    group: dist.ProcessGroup
    async_ops: bool
    bucket_group: Any = None
    calls: list[CollectedCall] = field(default_factory=list)
    waits: list[Callable[[], Any]] = field(default_factory=list)

    def launch(self, manager: Callable[..., Any], device: torch.device | None) -> None:
        """Start all collectives; without ``async_ops`` also finish them.

        1 start collectives with a codec, 2 have upstream start the rest in one batch.
        """
        native: list[Callable[[], Any]] = []
        for call in self.calls:
            self._start(call, native)  # 1
        if native:  # 2
            with manager(self.group, device, self.async_ops) as coalesced:
                for one in native:
                    one()
            if self.async_ops:
                self.waits.append(coalesced.wait)

    def _start(self, call: CollectedCall, native: list[Callable[[], Any]]) -> None:
        """Start ``call`` encoded, or add its native start to ``native``."""
        channels = current()
        assert channels is not None, "calls are collected for a block"
        later = partial(native.append, call.native)
        if dist.get_world_size(self.group) < 2 or call.op not in (SUM, AVERAGE):
            native.append(call.native)
        elif call.kind == "all_gather":
            channel = channels["zero"]
            gather = GatherParameters(
                numel=call.values.numel(), dtype=call.values.dtype, group=self.group,
                shard=flat(call.values), out=call.out.view(-1), buffer=call.out,
                async_op=self.async_ops,
            )  # fmt: skip

            def leave() -> None:
                gather.leave(channel)
                later()

            channel.run(gather, native=leave, encoded=lambda handle: self.waits.append(handle.wait))
        elif call.kind == "all_reduce":
            reduce = _Reduce(
                numel=call.values.numel(), dtype=call.values.dtype, group=self.group,
                values=call.values.view(-1), async_op=self.async_ops, call=call, batch=self,
                divides_first=channels["dp"].error_feedback,
            )  # fmt: skip
            channels["dp"].run(reduce, native=later, encoded=reduce.deliver)
        else:
            scatter = _Scatter(
                numel=call.values.numel(), dtype=call.values.dtype, group=self.group,
                shards=Shards(call.values.view(-1), call.out.numel()),
                async_op=self.async_ops, call=call, batch=self,
                divides_first=channels["dp"].error_feedback,
            )  # fmt: skip
            channels["dp"].run(scatter, native=later, encoded=scatter.deliver)

    def wait(self) -> None:
        """Finish all collectives, decoding included; harmless when called twice."""
        waits, self.waits = self.waits, []
        for wait in waits:
            wait()


@dataclass(eq=False, kw_only=True)
class _Reduce(AllReduce):
    """All-reduce of a stretch of a gradient buffer.

    ``divides_first``: average by dividing before the sum. Residuals then have the averaged
    gradient's units, on any number of ranks, also where instances of the optimizer are averaged
    one after the other.
    """

    call: CollectedCall
    batch: BucketBatch
    divides_first: bool

    def load(self, codec: Codec) -> Tensor:
        """Return the values, divided if upstream averages."""
        if self.divides_first:
            self.call.divide(self.group)
        return super().load(codec)

    def pieces(self) -> list[Piece] | None:
        """Return the parameters in the stretch."""
        return _pieces_of(self.call.values, self.batch.bucket_group)

    def deliver(self, handle: Handle) -> None:
        """Divide the sum if upstream averages."""

        if not self.divides_first:
            handle.then(partial(self.call.divide, self.group))
        self.batch.waits.append(handle.wait)


@dataclass(eq=False, kw_only=True)
class _Scatter(ReduceScatter):
    """Reduce-scatter of a gradient buffer; ``divides_first`` as in ``_Reduce``."""

    call: CollectedCall
    batch: BucketBatch
    divides_first: bool

    def load(self, codec: Codec) -> Sequence[Tensor]:
        """Return the shards, divided if upstream averages."""
        if self.divides_first:
            self.call.divide(self.group)
        return super().load(codec)

    def pieces(self) -> list[list[Piece]] | None:
        """Return the parameters in each rank's shard."""
        pieces = _pieces_of(self.call.values, self.batch.bucket_group)
        if pieces is None:
            return None
        numel = self.call.out.numel()
        return [cut(pieces, r * numel, (r + 1) * numel) for r in range(len(self.shards))]

    def deliver(self, handle: ReduceScatterHandle) -> None:
        """Write this rank's sum into upstream's output, divided if upstream averages."""
        call, divides_last = self.call, self.call.op == AVERAGE and not self.divides_first

        def write() -> None:
            total = handle.wait()
            call.out.copy_(total.div_(len(self.shards)) if divides_last else total)

        handle.then(write)
        self.batch.waits.append(handle.wait)


def _pieces_of(values: Tensor, bucket_group: Any) -> list[Piece] | None:
    """Return the parameters in a stretch of a gradient buffer; None outside of a bucket group."""
    for bucket in () if bucket_group is None else bucket_group.buckets:
        data = bucket.grad_data
        if data.untyped_storage().data_ptr() != values.untyped_storage().data_ptr():
            continue
        start = values.storage_offset() - data.storage_offset()
        if start >= 0 and start + values.numel() <= data.numel():
            return cut(_pieces(bucket), start, start + values.numel())
    return None


def _pieces(bucket: Any) -> list[Piece]:
    """Return the parameters of a bucket, in order, with the padding between them.

    It uses the gradients' offsets in the buffer: before 0.19 upstream's ``param_to_index`` leaves
    the padding out.
    """
    begin = bucket.grad_data.storage_offset()
    spans = []
    for parameter in bucket.params_list:
        view = getattr(parameter, "main_grad_copy_in_grad_buffer", None)
        view = parameter.main_grad if view is None else view
        name = getattr(parameter, NAME, None)
        if name is None:
            raise early_engines.too_late(early_engines.WRAPPER, "DistributedDataParallel")
        spans.append((view.storage_offset() - begin, view.numel(), name))
    pieces, position = [], 0
    for start, numel, name in sorted(spans):
        if start > position:
            pieces.append(Piece("", 0, start - position))
        pieces.append(Piece(name, 0, numel))
        position = start + numel
    if position < bucket.grad_data.numel():
        pieces.append(Piece("", 0, bucket.grad_data.numel() - position))
    return pieces
