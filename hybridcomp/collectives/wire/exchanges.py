"""Exchange payloads between ranks: encode, all-to-all the bytes, return views of the payloads.

Long messages are cut into rounds, so that coding one overlaps with sending the others. A row is the
list of stretches that a rank sends or sums. The rows of all ranks are cut into equally many rounds,
each with its share of every row, so that all links stay busy. The cuts depend on the rows alone,
which all ranks know, and lie between blocks of the codec: values and residuals are those of the
whole message, and so are the bytes if the codec is of fixed size.

What does not depend on the values is planned (``exchange_plan``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch

from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.wire import payload_sizes, transport
from hybridcomp.collectives.wire.cuts import SEGMENT_ALIGN, Range, cut_rows
from hybridcomp.collectives.wire.encoding import (
    POOL,
    EncodeRequest,
    encode_job,
    encode_jobs,
    encode_sum,
    first,
    settle_job,
)
from hybridcomp.collectives.wire.exchange_plan import ExchangePlan, Payloads
from hybridcomp.collectives.wire.group import Group
from hybridcomp.collectives.wire.handle import UNDER_WAY, Meter, Steps
from hybridcomp.collectives.wire.varying import Varying, cut_payloads

#: Elements of the longest row in one round, and of half a row where that is less: one message
#: alone leaves the link idle between its hops, but every round costs half a millisecond.
#: (native time / byte ratio) / time of an all-reduce of fp32, two ranks at 1 Gb/s, load 1.5
#: (``scripts/bench/bench_netlab.py --rounds --megabytes N`` at commit fe690ca):
#:
#:                   64 Ki  128 Ki  256 Ki  512 Ki    1 Mi    2 Mi    4 Mi   whole
#:     64 MB  8 bits   0.86    0.89   0.93    0.96    0.96    0.95    0.94    0.85
#:            4 bits   0.48    0.78   0.81    0.90    0.91    0.96    0.86    0.76
#:     16 MB  8 bits   0.63    0.77   0.85    0.92    0.91                    0.80
#:            4 bits   0.34    0.50   0.74    0.78    0.78                    0.69
#:     4 MB   8 bits   0.52    0.69   0.69                                    0.74
#:            4 bits   0.33    0.34   0.59                                    0.56
ROUND, HALF = 1 << 20, 1 << 18


def round_count(longest: int, codecs: Sequence[Codec], device: torch.device, group: Group) -> int:
    """Return the number of rounds of a message; 1 for short ones, which are faster whole.

    ``longest``: elements of its longest row; ``codecs``: all that encode the rows. On GPUs messages
    stay whole, as a launch costs more than coding a round.
    """
    if longest < 2 * HALF or device.type != "cpu":
        return 1
    scale = max(codec.round_scale for codec in codecs)
    count = max(longest // (scale * ROUND), 2 if longest >= 2 * scale * HALF else 1)
    if count == 1:
        return 1
    return count if all(_may_be_cut(codec, device, group) for codec in codecs) else 1


def rounds(
    rows: Sequence[Sequence[Range]], codecs: Sequence[Codec], device: torch.device, group: Group
) -> list[list[list[Range]]]:
    """Cut ``rows`` into rounds, each with its share of every row; into one if that is faster."""
    longest = max(sum(stop - start for start, stop in row) for row in rows)
    return cut_rows(rows, round_count(longest, codecs, device, group))


def _may_be_cut(codec: Codec, device: torch.device, group: Group) -> bool:
    """Return whether rounds keep the result, and need no separate messages with their sizes."""
    if codec.fixed_size:
        return True
    return SEGMENT_ALIGN % codec.segment == 0 and payload_sizes.in_front(codec, device, group)


def exchange(
    plan: ExchangePlan, jobs: Sequence[EncodeRequest], group: Group, meter: Meter
) -> Steps[Payloads]:
    """Encode ``jobs``, those of ``plan``, and exchange their payloads in an all-to-all.

    Who is done with the payloads gives their ``buffers`` back to the pool.

    1 encode every job once, into slots that follow each other by destination
    2 variable-size codecs: exchange the sizes, where they do not stand in front of the payloads
    3 exchange the bytes; on a CPU decode this rank's jobs and settle residuals meanwhile
    """
    codec, clock = plan.codec, meter.clock
    # 1
    start = clock.begin()
    varying = None if codec.fixed_size else Varying(plan)
    sent = _encode(plan, jobs) if varying is None else varying.encode(jobs)
    clock.end(meter, "codec", start)
    # 2
    gives, takes, arriving = plan.gives, plan.takes, plan.arriving
    if varying is not None:
        gives, takes, arriving = yield from varying.exchange_sizes(sent, group, meter)
    # 3
    sent.buffers.append(POOL.take(takes.total, plan.device))
    wire, source = first(sent.buffers[-1], takes.total), first(sent.buffers[-2], gives.total)
    message = transport.all_to_all(wire, source, takes, gives, group, meter)
    if plan.device.type == "cpu":
        yield UNDER_WAY  # on every rank, whatever it sends, so that all keep the same order
    if sent.is_unsettled:
        start = clock.begin()
        for job, payload in zip(jobs, sent.encoded, strict=True):
            if job.residual is not None or job.decoded is not None:
                settle_job(codec, job, payload, plan.dtype)
        clock.end(meter, "codec", start)
    yield message
    if varying is not None:
        sent.received = cut_payloads(wire, takes.numels, plan.heads[1], arriving)
    else:
        flat = iter(torch.split(wire, plan.pieces))
        sent.received = [list(islice(flat, len(row))) for row in arriving]
    return sent


def _encode(plan: ExchangePlan, jobs: Sequence[EncodeRequest]) -> Payloads:
    """Encode each job as a payload of fixed size, and copy it for further destinations."""
    nbytes = plan.gives.total
    out = POOL.take(nbytes, plan.device)
    slots = torch.split(first(out, nbytes), plan.slots)
    encoded = [slots[place] for place in plan.places]
    each, later = plan.each if len(jobs) > 1 else None, plan.settles_later
    if each is not None and encode_jobs(each, jobs, encoded, plan.dtype):
        later = False
    else:
        encode = encode_sum if later else encode_job
        for job, slot in zip(jobs, encoded, strict=True):
            encode(plan.codec, job, slot, plan.dtype)
    for here, there in plan.copies:
        slots[there].copy_(slots[here])
    return Payloads(encoded, [out], later)
