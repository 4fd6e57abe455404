"""Collectives that carry encoded payloads over torch.distributed, as ``uint8``.

Values are 1-D contiguous fp32, bf16 or fp16 tensors. Reductions only sum, in fp32 and in rank
order, and never divide: whoever calls divides as upstream does. Every call fills in a ``Meter``.
``group=None`` is the default group. Calls, and the ``wait()`` of asynchronous ``all_reduce``
handles, must come in the same order on every rank of a group.
"""

from __future__ import annotations

from hybridcomp.collectives.hierarchical.node_grid import Levels
from hybridcomp.collectives.moves import all_gather, all_to_all, gather_words
from hybridcomp.collectives.owner_plan import OwnedRange, plan_reduction
from hybridcomp.collectives.owners import reduce_to_owners
from hybridcomp.collectives.quantizations import all_reduce_codecs
from hybridcomp.collectives.reductions import all_reduce, reduce_scatter
from hybridcomp.collectives.send_recv import recv, send
from hybridcomp.collectives.wire.chunks import chunk_ranges
from hybridcomp.collectives.wire.handle import Handle, ReduceScatterHandle
from hybridcomp.collectives.wire.headers import check_headers, poll_headers
from hybridcomp.collectives.wire.meter import Meter

__all__ = [
    "Handle",
    "Levels",
    "Meter",
    "OwnedRange",
    "ReduceScatterHandle",
    "all_gather",
    "all_reduce",
    "all_reduce_codecs",
    "all_to_all",
    "check_headers",
    "chunk_ranges",
    "gather_words",
    "plan_reduction",
    "poll_headers",
    "recv",
    "reduce_scatter",
    "reduce_to_owners",
    "send",
]
