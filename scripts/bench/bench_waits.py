#!/usr/bin/env python3
"""Time what training waits for meetings of islands that are jobs, over the links of a lab.

    python scripts/netlab.py --quiet --layout 3 --rate 100mbit -- \\
        python scripts/bench/bench_waits.py

The first node holds the rendezvous, and on each other node an island of one rank trains: it sleeps
--step seconds, as a device would compute. Each case of --cases is a fragment count and a delay in
steps. A row has the milliseconds that the first island waited for the meetings of all weights
(`meet_wait_ms`, encoding included), the median of --rounds, which share is hidden of what the first
case waits, and the digest of the weights, which must be alike on all islands.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from hybridcomp.channels import Channels
from hybridcomp.config import CompressionConfig
from hybridcomp.sync import JobMeetings, Masters

LIMIT_S = 600.0


def case(text: str) -> tuple[int, int]:
    """Read ``4:5`` as fragments and delay."""
    fragments, _, delay = text.partition(":")
    return int(fragments), int(delay or 0)


def meetings_of(
    args: argparse.Namespace, weights: torch.Tensor, port: int, fragments: int, delay: int
) -> JobMeetings:
    """Return the meetings of one case, at a rendezvous of its own."""
    where = {"rendezvous": f"tcp://{os.environ['MASTER_ADDR']}:{port}", "timeout_s": LIMIT_S}
    where["at_start"] = int(os.environ["WORLD_SIZE"]) - 1
    block: dict[str, Any] = {
        "preset": "diloco", "islands": where, "every": args.every, "fragments": fragments,
        "delay": delay,
    }  # fmt: skip
    block |= {"codec": "blockint", "bits": 4, "error_feedback": True} if args.four_bits else {}
    config = CompressionConfig.parse({"sync": block, "min_bytes": 0})
    masters = Masters([("w", weights.numel())], lambda: [weights], lambda: None, replicated=True)
    return JobMeetings(Channels(config)["sync"], lambda: masters, lambda told: None)


def trained(args: argparse.Namespace, port: int, fragments: int, delay: int) -> tuple[float, str]:
    """Train one case; return the median wait for a round of meetings in ms, and a digest."""
    rank = int(os.environ["RANK"])
    weights = torch.zeros(args.mbytes * 10**6 // 4)
    moves = torch.randn(weights.numel(), generator=torch.Generator().manual_seed(rank)) * 1e-3
    meetings, waits = meetings_of(args, weights, port, fragments, delay), []
    for step in range((args.rounds + 1) * args.every + delay):
        meetings.before_step()
        time.sleep(args.step)
        weights.add_(moves, alpha=1.0 if step % 2 else 0.5)
        meetings.after_step(step)
        if (step + 1) % args.every == delay % args.every and step + 1 > delay:
            row = meetings.row()
            waits.append(row["meet_wait_ms"] if row else 0.0)
    start = torch.cat([part.fragment.start for part in meetings.parts])
    digest = hashlib.sha256(start.numpy().tobytes()).hexdigest()[:12]
    meetings.close()
    return statistics.median(waits[1:]), digest  # the first round has the islands' start


def report(store: TCPStore, args: argparse.Namespace, world_size: int) -> None:
    """Print each case as soon as all islands have trained it, and return when they have ended."""
    first = 0.0
    for number, (fragments, delay) in enumerate(args.cases, 1):
        keys = [f"{rank}/{number}" for rank in range(1, world_size)]
        store.wait(keys, timedelta(seconds=LIMIT_S))
        rows = [store.get(key).decode().split() for key in keys]
        wait, digests = float(rows[0][0]), {digest for _, digest in rows}
        first = first or wait
        same = "the same bits on all" if len(digests) == 1 else "NOT ALIKE"
        print(
            f"{fragments} fragment(s), delay {delay}: waits {wait:.0f} ms a round, hidden "
            f"{100 * (1 - wait / first):.0f} %; {rows[0][1]}, {same}",
            flush=True,
        )
    store.wait([f"done {rank}" for rank in range(1, world_size)], timedelta(seconds=LIMIT_S))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print on the first island; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=case, nargs="+", metavar="FRAGMENTS:DELAY",
                        default=[(1, 0), (1, 5), (4, 0), (4, 5)])  # fmt: skip
    parser.add_argument("--mbytes", type=int, default=4, metavar="MB", help="fp32 weights")
    parser.add_argument("--every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--step", type=float, default=0.1, metavar="S")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--four-bits", action="store_true", help="in the place of fp32 messages")
    args = parser.parse_args(argv)
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    limit = timedelta(seconds=LIMIT_S)
    held = [
        TCPStore(
            os.environ["MASTER_ADDR"], port + number, is_master=rank == 0,
            wait_for_workers=False, timeout=limit,
        )
        for number in range(len(args.cases) + 1)
    ]  # fmt: skip
    if rank == 0:
        print(f"{args.mbytes} MB, every {args.every} steps of {args.step:g} s", flush=True)
        report(held[0], args, int(os.environ["WORLD_SIZE"]))
        return 0
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    for number, (fragments, delay) in enumerate(args.cases, 1):
        wait, digest = trained(args, port + number, fragments, delay)
        held[0].set(f"{rank}/{number}", f"{wait} {digest}")
    held[0].set(f"done {rank}", "")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
