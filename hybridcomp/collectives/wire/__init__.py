"""Wire: the layer between codecs and torch.distributed that all collectives use.

group           the ranks of a message, how values travel between them and how they are summed
handle          steps of a collective, the handle that drives them, the meter of bytes and seconds
steps           steps without a message, or of a single one
chunking        chunks of ranks, slices between parameters, rounds
encoding        encoding, decoding, error feedback, buffers
exchange_plan   plans of all-to-alls of payloads, and of sums that use them
exchanges       all-to-all of payloads, and sums at owners
message_rounds  cutting long messages, so that coding overlaps with sending
varying         payloads of variable size
batched_kernels all payloads in few launches, on a GPU
gathers         all-gather of payloads
chained_gather  all-gather over several groups, one after the other
payload_sizes   sizes of payloads of variable size
splits          lengths of the parts of an all-to-all
transport       bytes between ranks; only this calls torch.distributed for messages
staging         pinned host memory for GPU tensors over gloo
device_clock    GPU time of encoding and waiting
profiler_ranges spans of each message in a trace of torch's profiler

Operations above import from here, not from its parts.
"""

from __future__ import annotations

from hybridcomp.collectives.wire import chained_gather, payload_sizes, profiler_ranges, transport
from hybridcomp.collectives.wire.chunking import (
    OwnedRange,
    Range,
    chunk_ranges,
    cut_rows,
    stretches,
)
from hybridcomp.collectives.wire.encoding import (
    POOL,
    EncodeRequest,
    add_values,
    check_residual,
    check_values,
    encode_sum,
    settle,
)
from hybridcomp.collectives.wire.exchange_plan import (
    ExchangePlan,
    SummedPart,
    SumPlan,
    plan_exchange,
    plan_sum,
    sent_dtype,
)
from hybridcomp.collectives.wire.exchanges import (
    accumulator,
    decode_fp32_all,
    exchange,
    show_overflow,
    sum_parts,
)
from hybridcomp.collectives.wire.gathers import (
    GatherPlan,
    decode_all,
    encode_all,
    gather,
    gather_slices,
    gather_values,
    plan_gather,
)
from hybridcomp.collectives.wire.group import Group, Levels, Probe, Reduction, Transfer
from hybridcomp.collectives.wire.handle import (
    HOST,
    Clock,
    Handle,
    Meter,
    Pending,
    ReduceScatterHandle,
    Steps,
    overlapped,
)
from hybridcomp.collectives.wire.headers import (
    HEADER_NBYTES,
    UNREAD,
    Header,
    check_headers,
    check_match,
    poll_headers,
    spec_digest,
)
from hybridcomp.collectives.wire.message_rounds import round_count, rounds
from hybridcomp.collectives.wire.splits import Splits
from hybridcomp.collectives.wire.steps import add_alone, given, transfer

__all__ = [
    "Clock",
    "ExchangePlan",
    "GatherPlan",
    "Group",
    "HEADER_NBYTES",
    "HOST",
    "Handle",
    "Header",
    "EncodeRequest",
    "Levels",
    "Meter",
    "OwnedRange",
    "POOL",
    "Pending",
    "Probe",
    "Range",
    "ReduceScatterHandle",
    "Reduction",
    "Splits",
    "Steps",
    "SumPlan",
    "SummedPart",
    "Transfer",
    "UNREAD",
    "accumulator",
    "add_alone",
    "add_values",
    "check_headers",
    "check_match",
    "check_residual",
    "check_values",
    "chunk_ranges",
    "cut_rows",
    "decode_all",
    "decode_fp32_all",
    "encode_all",
    "encode_sum",
    "exchange",
    "gather",
    "gather_slices",
    "gather_values",
    "given",
    "profiler_ranges",
    "overlapped",
    "payload_sizes",
    "plan_exchange",
    "plan_gather",
    "plan_sum",
    "poll_headers",
    "round_count",
    "chained_gather",
    "rounds",
    "sent_dtype",
    "settle",
    "show_overflow",
    "spec_digest",
    "stretches",
    "sum_parts",
    "transfer",
    "transport",
]
