"""Read a rank's trace by torch's profiler (Kineto): a Chrome trace, plain or compressed.

Times are converted to nanoseconds since the epoch, a common clock for ranks of one machine.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridcomp.collectives.wire.profiler_ranges import PREFIX

Event = dict[str, Any]
#: name of the range around each training step
STEP = f"{PREFIX}step "
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
#: categories of host spans that show the host's activity
HOST = ("cpu_op", "user_annotation", *CALLS)
#: what Kineto records with a message's kernel: its group, and the two ranks of a pair
GROUP, PAIR = ("Process Group Name", "Process Group Ranks"), ("Src Rank", "Dst Rank")
#: group of pairwise messages whose two ranks are unknown
UNTOLD = "?"


class TraceError(ValueError):
    """The file is no trace of a recorded training; the message is one line."""


@dataclass(frozen=True, eq=False)
class HostSpan:
    """A span of a host thread: an operation, a marked range, or a GPU driver call."""

    category: str
    name: str
    thread: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class DeviceSpan:
    """A kernel or copy; ``launch``: the call that queued it; ``group``: NCCL's, if recorded."""

    category: str
    name: str
    stream: int
    start: int
    stop: int
    launch: HostSpan | None
    group: str = ""


@dataclass(eq=False)
class RankTrace:
    """A rank's activity in the steps of a trace."""

    name: str
    steps: list[tuple[int, int]]
    host: list[HostSpan] = field(default_factory=list)
    device: list[DeviceSpan] = field(default_factory=list)

    @property
    def untold(self) -> str:
        """Describe the records that the profiler lacks for attributing waits; "": none."""
        alone = sum(span.launch is None for span in self.device)
        return f"the calls that launched {alone} of {len(self.device)} kernels" if alone else ""

    def marks(self, kind: str) -> Iterator[HostSpan]:
        """Yield hybridcomp's marked ranges of one kind, by start time."""
        head = f"{PREFIX}{kind} "
        return (span for span in self.host if span.name.startswith(head))


def read(path: Path) -> RankTrace:
    """Read a trace. Raises TraceError for a file that is damaged or from another program."""
    found = _json(path)
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list):
        raise TraceError(
            f"{path}: expected a Chrome trace with 'traceEvents', found "
            f"{sorted(found)[:5] if isinstance(found, dict) else type(found).__name__}; "
            "record it with bench_gpu_waits.py"
        )
    trace, calls, number = RankTrace(path.name, []), dict[int, HostSpan](), 0
    try:
        base = int(found.get("baseTimeNanoseconds", 0))
        for number, event in enumerate(events):  # noqa: B007
            if event.get("ph") == "X" and event.get("cat") in HOST:
                trace.host.append(_host(event, base))
                if event["cat"] in CALLS:
                    calls[int(event["args"]["correlation"])] = trace.host[-1]
        for number, event in enumerate(events):  # noqa: B007  # behind all calls
            if event.get("ph") == "X" and event.get("cat") in DEVICE:
                trace.device.append(_device(event, base, calls))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise TraceError(f"{path}: event {number} is damaged ({said}); record it again") from None
    trace.host.sort(key=lambda span: (span.start, -span.stop))
    trace.device.sort(key=lambda span: span.start)
    trace.steps = [(s.start, s.stop) for s in trace.host if s.name.startswith(STEP)]
    if not trace.steps:
        raise TraceError(
            f"{path}: expected steps marked '{STEP}N', found {len(events)} events without one; "
            "record it with bench_gpu_waits.py"
        )
    return trace


def _json(path: Path) -> Any:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return json.loads(data)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(f"{path}: cannot be read as a trace ({said}); record it again") from None


def _times(event: Event, base: int) -> tuple[int, int]:
    start = base + round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


def _host(event: Event, base: int) -> HostSpan:
    return HostSpan(event["cat"], event["name"], int(event["tid"]), *_times(event, base))


def _device(event: Event, base: int, calls: dict[int, HostSpan]) -> DeviceSpan:
    """Return a kernel or copy with the call that queued it."""
    told = event["args"]
    where = event["cat"], event["name"], int(told["stream"])
    call = calls.get(int(told["correlation"]))
    return DeviceSpan(*where, *_times(event, base), call, _group(event["name"], told))


def _group(name: str, told: Event) -> str:
    """Return the group of an NCCL message; for a pair, with its two ranks."""
    group = "/".join(str(told[key]) for key in GROUP if key in told)
    if told.get("Collective name") in ("send", "recv") or (not group and "SendRecv" in name):
        pair = [str(told[key]) for key in PAIR if key in told]
        return f"{group}/{'>'.join(pair)}" if len(pair) == 2 else UNTOLD
    return group
