"""Exchange parts of any lengths in two GPU launches, by kernels that take a table of the parts.

The table is planned once for all messages whose parts have the same lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec, PlannedKernel
from hybridcomp.codecs.launches import StretchTable
from hybridcomp.collectives.fused import places_of, room_of
from hybridcomp.collectives.wire import chained_gather, transport
from hybridcomp.collectives.wire.chunking import stretches
from hybridcomp.collectives.wire.encoding import POOL
from hybridcomp.collectives.wire.group import Transfer
from hybridcomp.collectives.wire.handle import Steps
from hybridcomp.collectives.wire.splits import Splits

#: most plans of exchanges of unequal parts that are cached; a plan has a row for every rank
MOST_KNOWN = 64


@dataclass(frozen=True)
class _PartsPlan:
    """Sizes and places common to all messages whose parts have the same lengths."""

    sent: StretchTable  # table of the parts for other ranks and of their payloads
    received: StretchTable
    gives: Splits  # bytes to each rank
    takes: Splits
    places: tuple[int, ...]
    # slices, in the values and in the output, of the part that stays on this rank
    own: tuple[slice, slice]


@lru_cache(maxsize=MOST_KNOWN)
def _planned_parts(
    codec: Codec, dtype: torch.dtype, takes: Splits, gives: Splits, me: int, device: torch.device
) -> _PartsPlan:
    """Plan an exchange of parts of any lengths."""
    (sent, given, here), (received, taken, there) = (
        _parts_of(codec, dtype, each, me, device) for each in (gives, takes)
    )
    own = slice(here, here + gives[me]), slice(there, there + takes[me])
    return _PartsPlan(sent, received, given, taken, places_of(given.total, taken.total), own)


@lru_cache(maxsize=MOST_KNOWN)
def _parts_of(
    codec: Codec, dtype: torch.dtype, splits: Splits, me: int, device: torch.device
) -> tuple[StretchTable, Splits, int]:
    """Return the table of the other ranks' parts, the payload bytes of every rank, and the start
    of the part of rank ``me``.
    """
    nbytes = codec.wire_nbytes_of(splits.array, dtype)
    table, total, start = StretchTable.of_parts(splits.array, nbytes, me, device)
    return table, Splits(nbytes, total), start


@lru_cache(maxsize=1024)
def _planned_stretches(
    codec: Codec, dtype: torch.dtype, numel: int, cuts: tuple[int, ...], ranks: int
) -> tuple[StretchTable, int, tuple[int, ...]]:
    """Plan a gather of shards of ``numel`` elements with ``cuts``.

    Returns ``(table of a shard's slices, bytes of its payloads, places of the buffers)``.
    """
    edges = np.array(stretches(0, numel, cuts), dtype=np.int64)
    numels = edges[:, 1] - edges[:, 0]
    nbytes = codec.wire_nbytes_of(numels, dtype)
    slot = int(nbytes.sum())
    table = StretchTable(edges[:, 0], numels, nbytes.cumsum() - nbytes, edges[:, 0])
    return table, slot, places_of(slot, ranks * slot)


def parts_to_all(
    out: Tensor,
    values: Tensor,
    takes: Splits,
    gives: Splits,
    kernel: PlannedKernel,
    via: Transfer,
) -> Steps[None]:
    """Exchange parts of any lengths, by rank, with the bytes and results of ``all_to_all``.

    1 encode all parts but this rank's, which is copied, 2 all-to-all, 3 decode.
    """
    group, meter = via.group, via.meter
    of = values.dtype, takes, gives, group.rank, values.device
    plan = _planned_parts(via.codec, *of)
    room, (sent, received) = room_of(plan.places, values.device)
    # 1
    out[plan.own[1]].copy_(values[plan.own[0]])
    with meter.coding():
        kernel.encode(plan.sent, values, sent)
    # 2
    yield transport.all_to_all(received, sent, plan.takes, plan.gives, group, meter)
    # 3
    with meter.coding():
        kernel.decode(plan.received, received, out)
    POOL.give(room)


def gather_parts(shard: Tensor, out: Tensor, kernel: PlannedKernel, via: Transfer) -> Steps[None]:
    """Gather shards with cuts into ``out``, with the same bytes and results as ``all_gather``."""
    numel, ranks = shard.numel(), via.group.size
    parts, slot, places = _planned_stretches(via.codec, shard.dtype, numel, tuple(via.cuts), ranks)
    return gather_by_table(kernel, parts, parts, places, shard, out, via, ranks, slot)


def gather_by_table(
    kernel: PlannedKernel,
    sent: StretchTable,
    arriving: StretchTable,
    places: tuple[int, ...],
    values: Tensor,
    out: Tensor,
    via: Transfer,
    ranks: int = 1,
    slot: int = 0,
) -> Steps[None]:
    """1 encode the slices ``sent`` of ``values``, 2 all-gather, 3 decode the slices ``arriving``.

    ``places``: bytes, in one allocation, of this rank's payloads and of all ranks' payloads. With
    several ``ranks``, ``arriving`` applies to each rank's payloads, which lie ``slot`` bytes apart.
    """
    room, (payload, gathered) = room_of(places, values.device)
    # 1
    with via.meter.coding():
        kernel.encode(sent, values, payload)
    # 2
    yield chained_gather.all_gather(gathered, payload, via.group, via.meter)
    # 3
    with via.meter.coding():
        kernel.decode(arriving, gathered, out, ranks, slot)
    POOL.give(room)
