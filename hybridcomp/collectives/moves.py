"""all_gather and all_to_all: values that are only moved, one quantization; words, none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_rank, get_world_size

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.buffers import POOL
from hybridcomp.collectives.wire.chunks import stretches
from hybridcomp.collectives.wire.encoding import Job, check_values, decode_all, encode_all
from hybridcomp.collectives.wire.exchange import exchange, gather, gather_room
from hybridcomp.collectives.wire.handle import Handle, Steps
from hybridcomp.collectives.wire.meter import Meter
from hybridcomp.collectives.wire.pipelining import Range, overlapped, segments
from hybridcomp.errors import CodecError


def all_gather(
    shard: Tensor,
    out: Tensor,
    codec: Codec,
    group: ProcessGroup | None,
    *,
    meter: Meter,
    cuts: Sequence[int] = (),
    async_op: bool = False,
) -> Handle:
    """Gather the shards of all ranks into ``out``, by group rank; the same bits on all ranks.

    This rank's own shard is decoded from the bytes that the others get, too.

    Args:
        shard: 1-D contiguous fp32/bf16/fp16, equally long on all ranks; may be its own place in
            ``out``. Read before the call returns.
        out: same dtype, ``world_size * shard.numel()`` elements; not to be touched before
            ``wait()``.
        cuts: ascending elements of ``shard`` where no codec block may reach across, equal on all
            ranks. What lies between two of them comes out as it would in a message of its own.
        codec, group, meter, async_op: as for ``all_reduce``.

    Raises CodecError on other tensors.
    """
    shard, out = shard.detach(), out.detach()
    check_values("shard", shard)
    check_values("out", out)
    world_size = get_world_size(group)
    if out.dtype != shard.dtype or out.numel() != world_size * shard.numel():
        raise CodecError(
            f"out: expected {world_size * shard.numel()} elements of {shard.dtype}, found "
            f"{out.numel()} of {out.dtype}"
        )
    return Handle(_all_gather(shard, out, codec, group, meter, cuts), meter, async_op)


def _all_gather(
    shard: Tensor,
    out: Tensor,
    codec: Codec,
    group: ProcessGroup | None,
    meter: Meter,
    cuts: Sequence[int],
) -> Steps[None]:
    """Cut into segments, then all of them side by side; all are encoded before the first wait."""
    world_size, numel = get_world_size(group), shard.numel()
    if world_size == 1 or numel == 0:
        out.copy_(shard)
        return
    (codec,) = codec.hops(1, 1, result=shard.dtype)
    meter.use(codec.spec)
    places = torch.split(out, numel)
    yield from overlapped(
        _gather_segment(shard, places, row, codec, group, meter)
        for (row,) in segments([stretches(0, numel, cuts)], (codec,), shard.device, group)
        if row
    )


def _gather_segment(
    shard: Tensor,
    places: Sequence[Tensor],
    row: Sequence[Range],
    codec: Codec,
    group: ProcessGroup | None,
    meter: Meter,
) -> Steps[None]:
    """1 encode stretches ``row`` of the shard, 2 all-gather, 3 decode to ``places``, by rank."""
    # 1
    dtype, lengths = shard.dtype, [stop - start for start, stop in row]
    numels = [lengths] * len(places)
    own = gather_room(codec, dtype, numels, shard.device, group)
    with meter.coding():
        encode_all(codec, [shard[start:stop] for start, stop in row], own, dtype)
    # 2
    payloads, gathered = yield from gather(codec, dtype, own, numels, group, meter)
    # 3
    with meter.coding():
        whole = lengths == [places[0].numel()]
        out = [p if whole else p[start:stop] for p in places for start, stop in row]
        decode_all(codec, list(chain(*payloads)), out)
    POOL.give(own.buffer, gathered)


def gather_words(words: Tensor, group: ProcessGroup | None, meter: Meter) -> list[list[int]]:
    """The int64 ``words`` (1-D, equally many) of all ranks, by group rank; waits for them."""
    world_size = get_world_size(group)
    out = words.new_empty(world_size * words.numel())
    meter.sent_around(words.numel() * words.itemsize, get_rank(group), world_size)
    Handle(transport.all_gather(out, words, group), meter, async_op=False)
    rows: list[list[int]] = out.view(world_size, -1).tolist()
    return rows


def all_to_all(
    out: Tensor,
    values: Tensor,
    codec: Codec,
    group: ProcessGroup | None,
    *,
    out_splits: Sequence[int] | None = None,
    in_splits: Sequence[int] | None = None,
    meter: Meter,
    async_op: bool = False,
) -> Handle:
    """Send the r-th part of ``values`` to group rank r and fill ``out`` with what comes.

    The part that stays on this rank is copied, not quantized.

    Args:
        out: 1-D contiguous fp32/bf16/fp16, apart from ``values``; not to be touched before
            ``wait()``.
        values: the same dtype. Not modified. Must not change before ``wait()``.
        out_splits, in_splits: elements from and to each group rank; None cuts evenly.
        codec, group, meter, async_op: as for ``all_reduce``.

    Raises CodecError on other tensors or splits that do not add up.
    """
    out, values = out.detach(), values.detach()
    check_values("out", out)
    check_values("values", values)
    if out.dtype != values.dtype:
        raise CodecError(f"out: expected {values.dtype} as in values, found {out.dtype}")
    world_size = get_world_size(group)
    takes = _splits("out_splits", out_splits, out.numel(), world_size)
    gives = _splits("in_splits", in_splits, values.numel(), world_size)
    me = get_rank(group)
    if takes[me] != gives[me]:
        raise CodecError(f"splits of rank {me} to itself: sends {gives[me]}, takes {takes[me]}")
    return Handle(_all_to_all(out, values, takes, gives, codec, group, meter), meter, async_op)


def _splits(name: str, splits: Sequence[int] | None, numel: int, world_size: int) -> list[int]:
    if splits is None:
        if numel % world_size:
            raise CodecError(
                f"{name}: {numel} elements cannot be cut evenly for {world_size} ranks"
            )
        return [numel // world_size] * world_size
    if len(splits) != world_size or min(splits) < 0 or sum(splits) != numel:
        raise CodecError(
            f"{name}: expected {world_size} lengths that add up to {numel}, found {list(splits)}"
        )
    return list(splits)


def _all_to_all(
    out: Tensor,
    values: Tensor,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
    codec: Codec,
    group: ProcessGroup | None,
    meter: Meter,
) -> Steps[None]:
    """1 encode and exchange, 2 decode."""
    me = get_rank(group)
    places = torch.split(out, list(out_splits))
    sources = torch.split(values, list(in_splits))
    places[me].copy_(sources[me])
    if len(places) == 1:
        return
    # 1
    (codec,) = codec.hops(1, 1, result=values.dtype)
    meter.use(codec.spec)
    payloads = yield from exchange(
        codec,
        values.dtype,
        [[Job(s)] if s.numel() and rank != me else [] for rank, s in enumerate(sources)],
        [[p.numel()] if p.numel() and rank != me else [] for rank, p in enumerate(places)],
        values.device,
        group,
        meter,
    )
    # 2
    with meter.coding():
        others = [place for place, row in zip(places, payloads.received, strict=True) if row]
        decode_all(codec, list(chain(*payloads.received)), others)
    payloads.release()
