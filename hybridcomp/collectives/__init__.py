"""Collectives that carry encoded payloads over torch.distributed, as ``uint8``.

A ``Transfer`` says how values are sent (codec, group, meter, cuts), a ``Reduction`` also how they
are summed. A ``Group`` has one or more levels, by which every collective chooses its steps.

Values are 1-D contiguous fp32, bf16 or fp16 tensors. Reductions only sum, in fp32 and in rank
order, and never divide: the caller divides as upstream does. Every call fills in a ``Meter``.
All ranks of a group must make their calls in one order and wait for asynchronous handles in one
order, as ``wait()`` may post a second message.
"""

from __future__ import annotations

from hybridcomp.collectives.all_gather_all_to_all import (
    all_gather,
    all_to_all,
    gather_payloads,
    gather_words,
)
from hybridcomp.collectives.all_reduce_plan import all_reduce_codecs
from hybridcomp.collectives.all_reduction import all_reduce
from hybridcomp.collectives.broadcast_reduce import (
    broadcast,
    broadcast_native,
    reduce,
    reduce_native,
)
from hybridcomp.collectives.owner_reduction import keep_to_owners, owner_hops, reduce_to_owners
from hybridcomp.collectives.scatter_reduction import Shards, keep_shards, reduce_scatter
from hybridcomp.collectives.send_recv import finish_sends, recv, send
from hybridcomp.collectives.wire.chunking import OwnedRange, chunk_ranges
from hybridcomp.collectives.wire.group import Group, Levels, Probe, Reduction, Transfer
from hybridcomp.collectives.wire.handle import Handle, Meter, ReduceScatterHandle
from hybridcomp.collectives.wire.headers import check_headers, poll_headers
from hybridcomp.collectives.wire.splits import Splits

__all__ = [
    "Group",
    "Handle",
    "Levels",
    "Meter",
    "OwnedRange",
    "Probe",
    "ReduceScatterHandle",
    "Reduction",
    "Splits",
    "Shards",
    "Transfer",
    "all_gather",
    "all_reduce",
    "all_reduce_codecs",
    "all_to_all",
    "broadcast",
    "broadcast_native",
    "check_headers",
    "chunk_ranges",
    "finish_sends",
    "gather_payloads",
    "gather_words",
    "keep_shards",
    "keep_to_owners",
    "owner_hops",
    "poll_headers",
    "recv",
    "reduce",
    "reduce_native",
    "reduce_scatter",
    "reduce_to_owners",
    "send",
]
