#!/usr/bin/env python3
"""Measure how long a receiver waits for a version of published weights over a link.

    python scripts/netlab.py --layout 2 --rate 1gbit -- python scripts/bench/bench_sync.py

Rank 0 publishes the traces of bench_deltas.py over a process group, rank 1 receives. A time is the
smallest of `--repeats` from the call of `publish` to the end of `update`, in turns of: stepcode,
raw (changed pieces as they are), and a broadcast of all weights, dense. Then `auto` publishes until
it has chosen: its link, what it expects of both ways, and 1 where it sends raw. `--traces FILE`
keeps the traces for the next link.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from bench.bench_deltas import parser_of, table
from bench.bench_publish import weights_of
from bench.deltas_bench.traces import Size, Trace, traces
from hybridcomp.patches.common.publishing_steps import destination_of
from hybridcomp.publishing import Publisher, VersionSummary, WeightReceiver
from hybridcomp.publishing.choosing import PATIENCE

CODECS = ("stepcode", "raw", "auto")
Row = dict[str, float]


class Sync:
    """One side of the link: publishes what it is given, or receives it."""

    def __init__(self, held: Tensor, codec: str) -> None:
        group: Any = dist.new_group([0, 1])
        self._held = held
        self._publisher: Publisher | None = None
        if dist.get_rank() == 0:
            weights = weights_of(held)
            to = destination_of(group, weights)
            self._publisher = Publisher(weights, to, anchor_every=10**9, codec=codec)
        else:
            self._receiver = WeightReceiver(group)

    def __call__(self) -> VersionSummary | None:
        """Send one version and wait until it is applied; returns what it was, on the sender."""
        summary = None
        if self._publisher is not None:
            summary = self._publisher.publish()
        elif self._receiver.update() is None:
            raise RuntimeError("expected a version, found none")
        dist.barrier()
        return summary


def seconds(call: Callable[[], object]) -> float:
    """Return the seconds of a call that ends on both ranks together."""
    dist.barrier()
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def measured(trace: Trace, mbytes: int, repeats: int) -> Row:
    """Return the best seconds of each way, and what auto has measured and chosen."""
    copies = -(-mbytes * 2**20 // (2 * trace.values.numel()))
    there, back = trace.values.repeat(copies), trace.reference.repeat(copies)
    held = back.clone()
    ways = {codec: Sync(held, codec) for codec in CODECS}
    for sync in ways.values():
        sync()
    best = dict.fromkeys(("stepcode", "raw", "dense"), float("inf"))
    for number in range(repeats):
        held.copy_(back if number % 2 else there)
        for codec in ("stepcode", "raw"):
            best[codec] = min(best[codec], seconds(ways[codec]))
        best["dense"] = min(best["dense"], seconds(lambda: _broadcast(held)))
    chosen: Row = {}
    for number in range(PATIENCE + 1):
        held.copy_(back if number % 2 else there)
        summary = ways["auto"]()
        if summary is not None and (found := summary.estimate) is not None:
            expected = {"coded": found.coded_s, "raw": found.raw_s, "link, Gb/s": found.gbps}
            chosen = {f"auto: {name}": value for name, value in expected.items()}
            chosen["auto sends raw"] = float(summary.raw)
    return {**best, **chosen}


def _broadcast(values: Tensor) -> None:
    dist.broadcast(values.view(torch.uint8), 0)
    dist.barrier()


def kept_traces(file: Path | None, size: Size, arguments: Any) -> list[Trace]:
    """Return the traces in ``file``, made and written by rank 0 where it is not there yet."""
    if dist.get_rank() == 0 and (file is None or not file.exists()):
        found = list(traces(size, arguments.rates, arguments.warmup, arguments.settle))
        rows = [tuple(vars(one).values()) for one in found]
        torch.save(rows, file := file or Path(f"traces.{os.getpid()}.pt"))
    names: list[Any] = [str(file)]
    dist.broadcast_object_list(names, 0)
    return [Trace(*row) for row in torch.load(names[0]) if row[0] in arguments.rates]


def main() -> int:
    """Parse arguments, train where there are no traces, measure, print."""
    parser = parser_of(__doc__, 64, "size of the published weights", 3)
    parser.add_argument("--traces", type=Path, help="keep the traces here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = Size(arguments.width, arguments.layers)
    rows: dict[float, Row] = {}
    for trace in kept_traces(arguments.traces, size, arguments):
        rows[trace.rate] = measured(trace, arguments.mbytes, arguments.repeats)
    if dist.get_rank() == 0:
        print(f"Seconds of a sync of {arguments.mbytes} MiB of weights, by learning rate:")
        print(table(rows, list(next(iter(rows.values()))), 3), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
