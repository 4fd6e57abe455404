"""Launch the collectives of one coalescing manager of DistributedDataParallel; see ``ddp``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import NAME, parameter_deltas
from hybridcomp.channels.error_feedback import Piece, cut
from hybridcomp.patches.common import early_engines
from hybridcomp.patches.common.routes import Route, flat
from hybridcomp.session.process import current

Kind = Literal["all_reduce", "reduce_scatter", "all_gather"]


@dataclass
class Call:
    """One collective that upstream has called."""

    kind: Kind
    native: Callable[[], Any]
    out: Tensor
    values: Tensor
    average: bool
    route: Route | None


@dataclass
class BucketBatch:
    """Collectives of one coalescing manager, and their handle.

    ``bucket_group``: the upstream object that called, if known: it has the parameters of buffers.
    """

    group: dist.ProcessGroup
    async_ops: bool
    bucket_group: Any = None
    calls: list[Call] = field(default_factory=list)
    waits: list[Callable[[], Any]] = field(default_factory=list)

    def launch(self, manager: Callable[..., Any], device: torch.device | None) -> None:
        """Start all collectives; without ``async_ops`` also finish them."""
        for call in self.calls:
            if call.kind == "all_gather":
                _settle(call, self.group)
        native = [call for call in self.calls if call.route is None]
        if native:
            with manager(self.group, device, self.async_ops) as coalesced:
                for call in native:
                    call.native()
            if self.async_ops:
                self.waits.append(coalesced.wait)
        for call in self.calls:
            if call.route is not None:
                self.waits.append(_start(call, call.route, self))

    def wait(self) -> None:
        """Finish all collectives, decoding included; harmless when called twice."""
        waits, self.waits = self.waits, []
        for wait in waits:
            wait()


def _settle(call: Call, group: dist.ProcessGroup) -> None:
    """Leave a gather to upstream where deltas must not be sent; the same on all ranks."""
    way = call.route
    if way is None:
        channels = current()
        assert channels is not None, "calls are collected for a block"
        parameter_deltas.leave(channels["zero"], call.out, group)
    elif way.channel.delta and not parameter_deltas.agreed(way.channel, call.out, way.codec, group):
        parameter_deltas.keep(way.channel, call.out, group)
        way.channel.native(way.raw_nbytes)
        call.route = None


def _start(call: Call, way: Route, batch: BucketBatch) -> Callable[[], Any]:
    """Start an encoded collective; return the function that waits for it."""
    group, async_op = batch.group, batch.async_ops
    world_size = dist.get_world_size(group)
    wanted = way.channel.wants_pieces(way.codec)
    pieces = _pieces_of(call.values, batch.bucket_group) if wanted else None
    if call.kind == "all_gather" and way.channel.delta:
        return parameter_deltas.gather(
            way.channel,
            call.out,
            way.codec,
            group,
            raw_nbytes=way.raw_nbytes,
            async_op=async_op,
        ).wait
    if call.kind == "all_gather":
        return way.channel.all_gather(
            flat(call.values),
            call.out.view(-1),
            way.codec,
            group,
            raw_nbytes=way.raw_nbytes,
            async_op=async_op,
        ).wait
    if call.kind == "all_reduce":
        reduced = way.channel.all_reduce(
            call.values.view(-1),
            way.codec,
            group,
            raw_nbytes=way.raw_nbytes,
            pieces=pieces,
            async_op=async_op,
        )
        if call.average:
            reduced.then(lambda: _divide(call.values, world_size))
        return reduced.wait
    numel = call.out.numel()
    shards = torch.split(call.values.view(-1), numel)
    of_shards = None
    if pieces is not None:
        of_shards = [cut(pieces, r * numel, (r + 1) * numel) for r in range(world_size)]
    scattered = way.reduce_scatter(shards, group, pieces=of_shards, async_op=async_op)

    def deliver() -> None:
        total = scattered.wait()
        call.out.copy_(total.div_(world_size) if call.average else total)

    scattered.then(deliver)
    return scattered.wait


def _divide(values: Tensor, world_size: int) -> None:
    values.div_(world_size)


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

    From the gradients' offsets in the buffer: upstream's ``param_to_index`` leaves the padding out
    before 0.19.
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
