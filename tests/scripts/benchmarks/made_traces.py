"""Hand-made Chrome traces in the format of torch's profiler; times in microseconds."""

from __future__ import annotations

import gzip
import json
from itertools import count
from pathlib import Path
from typing import Any

from hybridcomp.collectives.wire.profiler_ranges import PREFIX

MAIN = 11
BASE_NS = 1_700_000_000_000_000_000


class MadeTrace:
    """Events of one rank; names of marks without their prefix."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._numbers = count(1)

    def host(self, category: str, name: str, start: float, stop: float, **args: Any) -> None:
        """Add a span of the main thread."""
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": MAIN, "ts": start,
             "dur": stop - start, "args": args}
        )  # fmt: skip

    def mark(self, name: str, start: float, stop: float) -> None:
        self.host("user_annotation", PREFIX + name, start, stop)

    def call(self, name: str, start: float, stop: float) -> int:
        """Add a driver call; return its number, which other events refer to."""
        number = next(self._numbers)
        category = "cuda_driver" if name.startswith("cu") and name[2].isupper() else "cuda_runtime"
        self.host(category, name, start, stop, correlation=number)
        return number

    def kernel(
        self, name: str, stream: int, times: tuple[float, float], call: tuple[float, float],
        category: str = "kernel", **args: Any,
    ) -> None:  # fmt: skip
        """Add a kernel or copy and the call that queued it."""
        by = "cuLaunchKernel" if category == "kernel" else "cudaMemcpyAsync"
        number = self.call(by, *call)
        self._device(category, name, stream, *times, correlation=number, **args)

    def _device(
        self, category: str, name: str, stream: int, start: float, stop: float, **args: Any
    ) -> None:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": start,
             "dur": stop - start, "args": {"device": 0, "stream": stream, **args}}
        )  # fmt: skip

    def write(self, path: Path) -> Path:
        """Write the trace, compressed according to its name."""
        text = json.dumps({"baseTimeNanoseconds": BASE_NS, "traceEvents": self.events}).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path
