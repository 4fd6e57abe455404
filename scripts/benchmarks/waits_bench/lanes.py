"""Sort a rank's activity into lanes: computation, codec, wire and copies."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from benchmarks.waits_bench.intervals import Stretch, union, without
from benchmarks.waits_bench.traces import CALLS, DeviceSpan, HostSpan, RankTrace
from hybridcomp.collectives.wire.profiler_ranges import PREFIX

COMPUTATION, CODEC, WIRE, COPIES = "computation", "codec", "wire", "copies"
LANES = (COMPUTATION, CODEC, WIRE, COPIES)
#: kernels of hybridcomp/kernels/cuda/*.cu
OURS = re.compile(
    r"(blockint|cast|expcode|fp8|mpc|pieces|radix|residual|stepcode|topk|zfp)_[a-z0-9_]+$"
)
#: calls that wait for the device; so do copies from or to pageable memory
BLOCKING = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize",
            "cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize")  # fmt: skip
#: torch.distributed's operations on the host, which are not computation
TALK = ("c10d::", "gloo:", "nccl:", "record_param_comms")


class Inside:
    """Finds the innermost of some host spans around a moment of a thread."""

    def __init__(self, spans: Iterable[HostSpan]) -> None:
        self._of: dict[int, list[HostSpan]] = {}
        for span in sorted(spans, key=lambda span: (span.start, -span.stop)):
            self._of.setdefault(span.thread, []).append(span)
        self._starts = {thread: [s.start for s in own] for thread, own in self._of.items()}
        #: latest end among the spans up to each index
        self._over = {
            thread: list(accumulate((s.stop for s in own), max)) for thread, own in self._of.items()
        }

    def at(self, thread: int, moment: int) -> HostSpan | None:
        """Return the innermost span around ``moment``, or None."""
        own, over = self._of.get(thread, []), self._over.get(thread, [])
        place = bisect_right(self._starts.get(thread, []), moment) - 1
        while place >= 0 and over[place] > moment:
            if own[place].stop > moment:
                return own[place]
            place -= 1
        return None


@dataclass(eq=False)
class Lanes:
    """Activity of one rank, by lane.

    Attributes:
        times: busy intervals by lane.
        of: lane of each kernel and copy; empty on a CPU.
        blocked: when a host thread waited for the device.
        ours: when the host was inside a range marked by hybridcomp.
    """

    trace: RankTrace
    times: dict[str, list[Stretch]]
    of: dict[DeviceSpan, str] = field(default_factory=dict)
    blocked: list[Stretch] = field(default_factory=list)
    ours: list[Stretch] = field(default_factory=list)


def lanes_of(trace: RankTrace) -> Lanes:
    """Sort a rank's trace, by its kernels, or on a CPU by its operations."""
    found = _on_a_gpu(trace) if trace.device else _on_a_cpu(trace)
    found.blocked = union((s.start, s.stop) for s in blocking(trace))
    found.ours = union((s.start, s.stop) for s in trace.host if s.name.startswith(PREFIX)
                       and not s.name.startswith(f"{PREFIX}step"))  # fmt: skip
    return found


def blocking(trace: RankTrace) -> list[HostSpan]:
    """Return the calls in which the host waited for the device."""
    slow = {
        span.launch for span in trace.device
        if span.category == "gpu_memcpy" and "Pageable" in span.name and span.launch is not None
    }  # fmt: skip
    return [s for s in trace.host if s.category in CALLS and (s.name in BLOCKING or s in slow)]


def _on_a_gpu(trace: RankTrace) -> Lanes:
    coding, of = Inside(trace.marks("codec")), {}
    for span in trace.device:
        call = span.launch
        coded = call is not None and coding.at(call.thread, call.start) is not None
        of[span] = lane(span, coded)
    times = {
        name: union((s.start, s.stop) for s in trace.device if of[s] == name) for name in LANES
    }
    return Lanes(trace, times, of)


def lane(span: DeviceSpan, coded: bool) -> str:
    """Return the lane of a kernel or copy; ``coded``: launched to encode or decode."""
    if span.name.startswith("nccl"):
        return WIRE
    if coded or OURS.match(span.name.partition("(")[0]):
        return CODEC
    return COMPUTATION if span.category == "kernel" else COPIES


def _on_a_cpu(trace: RankTrace) -> Lanes:
    """Sort operations; those inside encoding or waiting are not computation."""
    codec = union((s.start, s.stop) for s in trace.marks("codec"))
    talk = [s for s in trace.host if s.name.startswith(TALK)]
    # gloo's spans are on its threads; meanwhile the rank waits for them or works
    wire = union([(s.start, s.stop) for s in talk if s.name.startswith("gloo:")]
                 + [(s.start, s.stop) for s in trace.marks("wait")])  # fmt: skip
    posting = union((s.start, s.stop) for s in talk if s.category == "cpu_op")
    ops = union(
        (s.start, s.stop) for s in trace.host
        if s.category == "cpu_op" and not s.name.startswith(TALK)
    )  # fmt: skip
    computation = without(without(ops, codec), posting)
    times = {COMPUTATION: computation, CODEC: codec, WIRE: without(wire, codec), COPIES: []}
    return Lanes(trace, times)
