"""all_gather and all_to_all of encoded values, with one quantization; a gather of plain words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from hybridcomp.collectives.fused import (
    fused_all_gather,
    fused_all_to_all,
    gather_parts,
    parts_to_all,
)
from hybridcomp.collectives.hierarchical.intra_node import place_columns
from hybridcomp.collectives.wire import (
    POOL,
    EncodeRequest,
    Group,
    Handle,
    Meter,
    Range,
    Splits,
    Steps,
    Transfer,
    check_values,
    decode_all,
    encode_all,
    exchange,
    gather,
    gather_room,
    given,
    overlapped,
    rounds,
    stretches,
    transfer,
    transport,
)
from hybridcomp.errors import CodecError


def all_gather(shard: Tensor, out: Tensor, via: Transfer, async_op: bool = False) -> Handle:
    """Gather the shards of all ranks into ``out``, by group rank; the same bits on all ranks.

    This rank also decodes its shard from the payload that the others get; a lossless codec would
    give back the shard, which is copied. In two levels ``wait()`` posts a second message, so
    handles must be waited for in one order on all ranks.

    Args:
        shard: 1-D contiguous fp32/bf16/fp16, equally long on all ranks; may be a view of its
            place in ``out``. Read before the call returns.
        out: same dtype, ``group.size * shard.numel()`` elements; not to be touched before
            ``wait()``. With a codec ``against`` earlier values it holds those of the other ranks.
        via: codec, group, meter and cuts: positions in ``shard``, equal on all ranks, between which
            values are encoded as in separate messages.
        async_op: as for ``all_reduce``.

    Raises CodecError on other tensors.
    """
    shard, out = shard.detach(), out.detach()
    check_values("shard", shard)
    check_values("out", out)
    expected = via.group.size * shard.numel()
    if out.dtype != shard.dtype or out.numel() != expected:
        raise CodecError(
            f"out: expected {expected} elements of {shard.dtype}, found "
            f"{out.numel()} of {out.dtype}"
        )
    steps = _all_gather if via.group.levels is None else _in_two_levels
    return Handle(steps(shard, out, via), via.meter, async_op)


def _in_two_levels(shard: Tensor, out: Tensor, via: Transfer) -> Steps[None]:
    """1 gather this rank's column of the grid between nodes, encoded, 2 gather columns inside.

    A ring over all ranks carries every payload into N nodes, these steps into N - 1, which saves
    1/N of the bytes between nodes. Every rank decodes N shards instead of N * L.
    """
    levels, numel = via.group.levels, shard.numel()
    assert levels is not None
    if not numel:
        return
    # 1
    column = shard.new_empty(levels.nodes * numel)
    if via.codec.references:  # decoding needs what this rank holds of the column
        held = levels.by_column(out.device)[levels.local * levels.nodes :][: levels.nodes]
        torch.index_select(out.view(-1, numel), 0, held, out=column.view(-1, numel))
    yield from _all_gather(shard, column, Transfer(via.codec, levels.outer, via.meter, via.cuts))
    # 2
    yield from place_columns(column, out, levels, via.meter)


def _all_gather(shard: Tensor, out: Tensor, via: Transfer) -> Steps[None]:
    """Gather on one level: in two launches, or in rounds that overlap.

    All values are encoded before the first wait.
    """
    group, numel = via.group, shard.numel()
    if group.size == 1 or numel == 0:
        out.copy_(shard)
        return given(None)
    (codec,) = via.codec.split_error_budget(1, 1, result=shard.dtype)
    via.meter.use(codec.spec)
    only = Transfer(codec, group, via.meter)
    fused = None if via.cuts else codec.fused(shard.device)
    if fused is not None:
        return fused_all_gather(shard, out, fused, only)
    planned = codec.planned(shard.device) if via.cuts else None
    if planned is not None:
        return gather_parts(shard, out, planned, Transfer(codec, group, via.meter, via.cuts))
    places = torch.split(out, numel)
    cut = rounds([stretches(0, numel, via.cuts)], (codec,), shard.device, group)
    return overlapped(_gather_round(shard, places, row, only) for (row,) in cut if row)


def _gather_round(
    shard: Tensor, places: Sequence[Tensor], row: Sequence[Range], via: Transfer
) -> Steps[None]:
    """1 encode stretches ``row`` of the shard, 2 all-gather, 3 decode into ``places``, by rank."""
    # 1
    codec, me = via.codec, via.group.rank
    dtype, lengths = shard.dtype, [stop - start for start, stop in row]
    numels = [lengths] * len(places)
    own = gather_room(numels, dtype, shard.device, via)
    with via.meter.coding():
        encode_all(codec, [shard[start:stop] for start, stop in row], own, dtype, row)
        if codec.lossless and places[me].data_ptr() != shard.data_ptr():
            for start, stop in row:
                places[me][start:stop].copy_(shard[start:stop])
    # 2
    payloads, gathered = yield from gather(own, numels, dtype, via)
    # 3
    with via.meter.coding():
        whole = lengths == [places[0].numel()]
        missing = [rank for rank in range(len(places)) if rank != me or not codec.lossless]
        out = [
            places[rank] if whole else places[rank][start:stop]
            for rank in missing
            for start, stop in row
        ]
        decode_all(codec, list(chain(*(payloads[rank] for rank in missing))), out)
    POOL.give(own.buffer, gathered)


def gather_words(words: Tensor, group: Group, meter: Meter) -> list[list[int]]:
    """Gather the int64 ``words`` (1-D, equally many) of all ranks, by group rank; blocking."""
    out = words.new_empty(group.size * words.numel())
    transfer(lambda: transport.all_gather(out, words, group, meter), meter)
    rows: list[list[int]] = out.view(group.size, -1).tolist()
    return rows


def all_to_all(
    out: Tensor,
    values: Tensor,
    via: Transfer,
    out_splits: Sequence[int] | Splits | None = None,
    in_splits: Sequence[int] | Splits | None = None,
    async_op: bool = False,
) -> Handle:
    """Send part r of ``values`` to group rank r; fill ``out`` with the parts of all ranks.

    The part that stays on this rank is copied, not quantized.

    Args:
        out: 1-D contiguous fp32/bf16/fp16, apart from ``values``; not to be touched before
            ``wait()``.
        values: the same dtype. Not modified. Must not change before ``wait()``.
        via: codec, group and meter.
        out_splits, in_splits: elements from and to each group rank; None cuts evenly. A list that
            comes back, or ``Splits``, is not read again.
        async_op: as for ``all_reduce``.

    Raises CodecError on other tensors or splits that do not add up.
    """
    out, values = out.detach(), values.detach()
    check_values("out", out)
    check_values("values", values)
    if out.dtype != values.dtype:
        raise CodecError(f"out: expected {values.dtype} as in values, found {out.dtype}")
    me, world_size = via.group.rank, via.group.size
    takes = _splits("out_splits", out_splits, out.numel(), world_size)
    gives = _splits("in_splits", in_splits, values.numel(), world_size)
    if takes[me] != gives[me]:
        raise CodecError(f"splits of rank {me} to itself: sends {gives[me]}, takes {takes[me]}")
    return Handle(_all_to_all(out, values, takes, gives, via), via.meter, async_op)


def _splits(
    name: str, splits: Sequence[int] | Splits | None, numel: int, world_size: int
) -> Splits:
    if splits is None:
        if numel % world_size:
            raise CodecError(
                f"{name}: {numel} elements cannot be cut evenly for {world_size} ranks"
            )
        return Splits.even(numel // world_size, world_size)
    found = Splits.of(splits)
    if len(found) != world_size or found.least < 0 or found.total != numel:
        raise CodecError(
            f"{name}: expected {world_size} lengths that add up to {numel}, found {found.numels}"
        )
    return found


def _all_to_all(
    out: Tensor, values: Tensor, takes: Splits, gives: Splits, via: Transfer
) -> Steps[None]:
    """Exchange in two launches where the codec has such kernels; else encode part by part."""
    (codec,) = via.codec.split_error_budget(1, 1, result=values.dtype)
    only = Transfer(codec, via.group, via.meter)
    if len(gives) == 1:
        out.copy_(values)
        return given(None)
    via.meter.use(codec.spec)
    fused = codec.fused(values.device) if takes.each == gives.each > 0 else None
    if fused is not None:
        return fused_all_to_all(out, values, fused, only)
    planned = codec.planned(values.device)
    if planned is not None:
        return parts_to_all(out, values, takes, gives, planned, only)
    return _parts_to_all(torch.split(out, takes.numels), torch.split(values, gives.numels), only)


def _parts_to_all(
    places: Sequence[Tensor], sources: Sequence[Tensor], via: Transfer
) -> Steps[None]:
    """1 encode and exchange, 2 decode; by group rank."""
    me, own = via.group.rank, sources[via.group.rank]
    places[me].copy_(own)
    # 1
    payloads = yield from exchange(
        [[EncodeRequest(s)] if s.numel() and rank != me else [] for rank, s in enumerate(sources)],
        [[p.numel()] if p.numel() and rank != me else [] for rank, p in enumerate(places)],
        own.dtype,
        own.device,
        via,
    )
    # 2
    with via.meter.coding():
        others = [place for place, row in zip(places, payloads.received, strict=True) if row]
        decode_all(via.codec, list(chain(*payloads.received)), others)
    payloads.release()
