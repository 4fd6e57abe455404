#!/usr/bin/env python3
"""Time one gather of updated weights over slow links: native, 8 bits, deltas, stepcode, in turns.

    python scripts/bench/bench_gathers.py                        # as root: links are made
    python scripts/bench/bench_gathers.py --links 100mbit 1gbit --rates 1e-4

The weights are those of bench_deltas.py before and after a step at each learning rate. Two ranks on
two nodes of a netlab gather them as ZeRO 1 does: the buffer holds what the last gather left, each
rank's share is overwritten, the gather follows, digests of deltas included. Every gather is paired
with native's of the same turn. "bits" are the ledger's, for a value that a rank sends; "core ms"
the processor time of one rank beyond native's, which links do not change.

The last table is the one of docs/choosing.md: up to how many Gb/s of a rank's link stepcode is
faster than each of the others, where every rank has a core of its own. It is computed from "bits"
and "core ms" of the first link: a gather takes its core's time and its bytes over the link.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from bench.deltas_bench.traces import Size, traces
from hybridcomp.channels import Channels, delta_references
from hybridcomp.channels.parameter_deltas import GatherParameters
from hybridcomp.config import CompressionConfig
from lab.cluster import Lab
from lab.layout import Layout, Rates, parse_rate

#: the settings of "zero" that are compared; the first is the reference
ARMS: dict[str, Any] = {
    "native": "none",
    "blockint 8": {"codec": "blockint", "bits": 8},
    "blockint 4, delta": {"codec": "blockint", "bits": 4, "delta": True},
    "expcode": "expcode",
    "mpc, delta": {"codec": "mpc", "delta": True},
    "stepcode": "stepcode",
}
EXACT = ("native", "expcode", "mpc, delta", "stepcode")
LINKS = ["100mbit", "1gbit", "4gbit", "none"]

Row = dict[str, float]


class Gather:
    """One arm: a buffer with what the last gather left, and the gather of the step after it."""

    def __init__(self, zero: Any, before: Tensor) -> None:
        block = {"zero": zero, "min_bytes": 0, "hierarchy": "none"}
        self.channels = Channels(CompressionConfig.parse(block))
        self.channel, self.buffer = self.channels["zero"], before.clone()
        self.codec = self.channel.codec(before.numel(), before.dtype, None)
        self.own = self.buffer.view(dist.get_world_size(), -1)[dist.get_rank()]

    def run(self, before: Tensor, after: Tensor) -> tuple[float, float]:
        """Gather ``after``; return seconds, of the slower rank, and processor seconds."""
        self.buffer.copy_(before)
        if self.channel.delta:
            delta_references.keep(self.channel, self.buffer, None)
        self.own.copy_(after.view(dist.get_world_size(), -1)[dist.get_rank()])
        dist.barrier()
        start, used = time.perf_counter(), time.process_time()
        self._gather()
        found = torch.tensor([time.perf_counter() - start, time.process_time() - used])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found[0]), float(found[1])

    def _gather(self) -> None:
        message = GatherParameters(
            numel=self.buffer.numel(), dtype=self.buffer.dtype, group=None, shard=self.own,
            out=self.buffer, buffer=self.buffer,
        )  # fmt: skip

        def native() -> None:
            if self.codec is not None:
                raise AssertionError("ranks hold different weights")
            dist.all_gather_into_tensor(self.buffer, self.own)

        self.channel.run(message, native=native, encoded=lambda handle: handle.wait())

    def bits(self) -> float:
        """Return bits for a value that this rank sent, over all runs; 16 natively."""
        entry = self.channels.ledger.interval["zero", "forward"]
        return 16 * entry.wire_nbytes / entry.raw_nbytes if entry.raw_nbytes else 16.0


def rank(arguments: argparse.Namespace) -> None:
    """Time all arms on this rank; rank 0 writes the rows."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Row]] = {}
    for rate, (before, after) in torch.load(arguments.weights, weights_only=True).items():
        arms = {name: Gather(ARMS[name], before) for name in arguments.arms}
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
        for turn in range(arguments.turns + 1):
            for name, arm in arms.items():
                found = arm.run(before, after)
                if turn:  # the first one allocates
                    seconds[name].append(found)
                if name in EXACT and not torch.equal(arm.buffer, after):
                    raise AssertionError(f"{name} gathered other weights")
        rows[f"{rate:g}"] = {name: _row(seconds, name, arm.bits()) for name, arm in arms.items()}
    if dist.get_rank() == 0:
        arguments.rows.write_text(json.dumps(rows))
    dist.destroy_process_group()


def _row(seconds: Mapping[str, list[tuple[float, float]]], name: str, bits: float) -> Row:
    """Return medians and the least of the milliseconds; processor ms are those beyond native's."""
    pairs = list(zip(seconds["native"], seconds[name], strict=True))
    return {
        "bits": bits,
        "ms": 1e3 * statistics.median(mine for _, (mine, _) in pairs),
        "least ms": 1e3 * min(mine for mine, _ in seconds[name]),
        "x native": statistics.median(native / mine for (native, _), (mine, _) in pairs),
        "core ms": 1e3 * statistics.median(mine - native for (_, native), (_, mine) in pairs),
    }


def prepare(arguments: argparse.Namespace, path: Path) -> int:
    """Train, write the weights before and after each step; return their number."""
    size, numel = Size(arguments.width, arguments.layers), 0
    found: dict[float, tuple[Tensor, Tensor]] = {}
    for trace in traces(size, arguments.rates, arguments.warmup, arguments.settle):
        numel = trace.values.numel() // 2 * 2
        found[trace.rate] = (trace.reference[:numel].clone(), trace.values[:numel].clone())
    torch.save(found, path)
    return numel


def table(rows: Mapping[str, Row]) -> str:
    """Return a line for each arm, in Markdown."""
    names = ["bits", "ms", "least ms", "x native", "core ms"]
    lines = ["| | bits a value | ms | least | native's time over it | core ms |", "|---" * 6 + "|"]
    for arm, row in rows.items():
        lines.append(f"| {arm} | " + " | ".join(f"{row[name]:.4g}" for name in names) + " |")
    return "\n".join(lines)


def pays_until(bits: float, core_ms: float, other_bits: float, other_ms: float) -> float:
    """Return the Gb/s up to which a gather of a million values is faster than another one.

    Args:
        bits, other_bits: for each value.
        core_ms, other_ms: of a core, for these values.

    0 where it never is, infinity where it always is.
    """
    saved, more = 1e6 * (other_bits - bits), (core_ms - other_ms) / 1e3
    if more <= 0:
        return math.inf if saved > 0 else 0.0
    return max(0.0, saved / more / 1e9)


def limits(rows: Mapping[str, Mapping[str, Row]], numel: int) -> str:
    """Return up to how many Gb/s stepcode beats each other arm, by learning rate, in Markdown.

    ``rows``: of one link, by learning rate and arm; ``numel``: weights that two ranks gather.
    """
    sent = numel / 2e6  # millions of values that a rank sends
    others = [arm for arm in next(iter(rows.values())) if arm != "stepcode"]
    lines = ["| | " + " | ".join(rows) + " |", "|---" * (len(rows) + 1) + "|"]
    for other in others:
        cells = []
        for arms in rows.values():
            mine, theirs = arms["stepcode"], arms[other]
            found = pays_until(
                mine["bits"], mine["core ms"] / sent, theirs["bits"], theirs["core ms"] / sent
            )
            cells.append(f"{found:.2g}")
        lines.append(f"| {other} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, dict[str, dict[str, Row]]]:
    """Run the ranks at every link; return rows by link, learning rate and arm."""
    weights, rows = folder / "weights.pt", folder / "rows.json"
    numel = prepare(arguments, weights)
    print(f"{numel / 1e6:.1f} M weights, two ranks, one thread each, {arguments.turns} turns")
    command = [sys.executable, str(Path(__file__).resolve()), "--turns", str(arguments.turns)]
    command += ["--arms", *arguments.arms, "--weights", str(weights), "--rows", str(rows)]
    found = {}
    for link in arguments.links:
        with Lab(Layout.parse("2"), Rates(parse_rate(link))) as lab:
            result = lab.run(command)
        if result.status:
            raise SystemExit("a rank failed:\n" + "\n".join(t[-2000:] for t in result.outputs))
        found[link] = json.loads(rows.read_text())
        for learning, arms in found[link].items():
            print(f"\n{link}, learning rate {learning}:\n\n{table(arms)}", flush=True)
    if "stepcode" in arguments.arms:
        first = found[arguments.links[0]]
        print(f"\nstepcode is faster, with a core each, up to Gb/s:\n\n{limits(first, numel)}")
    return found


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; --weights is that of a rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--links", nargs="+", default=LINKS, help="rates of a node's link; none: not shaped")
    add("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    add("--rates", type=float, nargs="+", default=[1e-3, 1e-4, 1e-6], help="learning rates")
    add("--width", type=int, default=384, help="a multiple of 64 (default 384)")
    add("--layers", type=int, default=6)
    add("--warmup", type=int, default=15, help="steps at 1e-3 before all traces")
    add("--settle", type=int, default=2, help="steps at a rate before its trace")
    add("--turns", type=int, default=15)
    add("--json", type=Path, help="write the rows to this file")
    add("--weights", type=Path, help=argparse.SUPPRESS)
    add("--rows", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main() -> int:
    """Returns the exit status."""
    arguments = parse()
    if arguments.weights is not None and "RANK" in os.environ:
        rank(arguments)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments, Path(folder))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
