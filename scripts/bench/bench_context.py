#!/usr/bin/env python3
"""Attention over ranks by sequence length: a ring, Ulysses and gathered keys, encoded and not.

One command, as root: ``python scripts/bench/bench_context.py --lengths 2048 4096 --ratio 4``. Nodes
of a netlab, one rank on each, compute one causal attention forward and backward: by the ring of
``hybridcomp.nn``, by all-to-all of heads for sequence (Ulysses), and with keys and values of all
ranks gathered. All three compute with the same blocks and send through the channel ``cp``. They
take turns, so that noise of the machine hits all of them; medians are printed.

*computing* is a pass over links that are not shaped. ``--ratio R`` chooses the rate at which the
native ring's bytes need R times as long as its computing does; ``--rate`` names one. *allowed* is
the longer of computing and of what the bytes need; *used* is that over what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from lab.cluster import Lab
from lab.layout import LabError, Layout, Rates, parse_rate, show_rate

#: name of a row's codec -> the setting of ``cp``
CODECS: dict[str, Any] = {
    "native": "none",
    "lossless": "expcode",
    "8 bits": {"codec": "blockint", "bits": 8},
    "4 bits": {"codec": "blockint", "bits": 4},
}
METHODS = ("ring", "Ulysses", "gather")


def rank_main(args: argparse.Namespace) -> None:
    """One rank: seconds and bytes of every method, printed as JSON by rank 0."""
    import torch
    import torch.distributed as dist

    from bench.context_bench import methods
    from hybridcomp import process
    from hybridcomp.channels import Channels
    from hybridcomp.config import CompressionConfig

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for length in args.lengths:
        size = methods.Size(length, args.heads, args.kept, args.width)
        tensors = methods.draw(size, getattr(torch, args.dtype))
        exact: dict[str, list[torch.Tensor]] = {}
        runs: list[tuple[str, str, Callable[[], list[torch.Tensor]]]] = []
        for method in METHODS:
            for codec in args.codecs:
                block = {"cp": CODECS[codec], "min_bytes": 0}
                block["ledger"] = {"every": 1_000_000, "sample_every": 0}
                channels = Channels(CompressionConfig.parse(block))
                runs.append((method, codec, methods.prepare(method, tensors, size, channels)))
                rows.append({"length": length, "method": method, "codec": codec, "seconds": []})
                rows[-1]["channels"] = channels
        own = rows[-len(runs) :]
        for turn in range(args.rounds + 1):
            for (method, codec, run), row in zip(runs, own, strict=True):
                process.use(row["channels"])
                row["channels"].ledger.restart()
                dist.barrier()
                start = time.perf_counter()
                found = run()
                dist.barrier()
                if turn:  # the first touches the buffers
                    row["seconds"].append(time.perf_counter() - start)
                    continue
                if codec == "native":
                    exact[method] = found
                row["nbytes"] = methods.sent(row["channels"])
                row["error"] = methods.distance(found, exact.get(method))
        for row in own:
            del row["channels"]
    process.use(None)
    if dist.get_rank() == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


def measure(args: argparse.Namespace, rate: int | None) -> list[dict[str, Any]]:
    """The rows of all lengths at one rate. Raises LabError where a rank fails."""
    root = Path(__file__).resolve().parents[1]
    path = f"{root}:{root.parent}:{os.environ.get('PYTHONPATH', '')}"
    with Lab(Layout.parse(args.layout), Rates(rate)) as lab:
        words = [sys.executable, __file__, "--rank", *sys.argv[1:]]
        result = lab.run(words, env={"PYTHONPATH": path}, timeout=3600, echo="none")
    if result.status:
        raise LabError("\n".join(result.outputs))
    rows: list[dict[str, Any]] = json.loads(result.outputs[0].splitlines()[-1])
    return rows


def rate_for(ratio: float, row: dict[str, Any]) -> int:
    """Bits a second at which the bytes of a row need ``ratio`` times its computing."""
    return int(8 * row["nbytes"] / (ratio * statistics.median(row["seconds"])))


def report(free: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], rate: int) -> str:
    """A Markdown table; ``free``: the same rows over links that are not shaped."""
    lines = [
        "| tokens | method | codec | MB a rank | of native | error | computing ms | allowed ms "
        "| measured ms | used |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    native = {
        (row["length"], row["method"]): row["nbytes"] for row in rows if row["codec"] == "native"
    }
    for alone, row in zip(free, rows, strict=True):
        computing, taken = (statistics.median(r["seconds"]) for r in (alone, row))
        allowed = max(computing, 8 * row["nbytes"] / rate)
        raw = native.get((row["length"], row["method"]))
        part = f"{row['nbytes'] / raw:.3f}" if raw else "-"
        error = "-" if row["error"] is None else f"{row['error']:.1e}"
        lines.append(
            f"| {row['length']} | {row['method']} | {row['codec']} | {row['nbytes'] / 1e6:.3f} "
            f"| {part} | {error} | {computing * 1e3:.0f} | {allowed * 1e3:.0f} "
            f"| {taken * 1e3:.0f} | {allowed / taken:.2f} |"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layout", default="4", help="NODES[xRANKS], as in netlab.py")
    add("--lengths", type=int, nargs="+", default=[1024, 2048, 4096], help="tokens in all")
    add("--heads", type=int, default=8)
    add("--kept", type=int, default=4, help="heads of keys and values")
    add("--width", type=int, default=64, help="of a head")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    add("--codecs", nargs="+", default=list(CODECS), choices=list(CODECS))
    add("--ratio", type=float, nargs="+", default=[1.0, 4.0], metavar="R")
    add("--rate", help="instead of --ratio, such as 200mbit")
    add("--rounds", type=int, default=5)
    add("--out", type=Path, metavar="FILE", help="all rows as JSON")
    add("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Run; the exit status."""
    args = parse()
    if args.rank:
        rank_main(args)
        return 0
    load = os.getloadavg()[0]
    free = measure(args, None)
    ring = next(row for row in free if (row["method"], row["codec"]) == ("ring", args.codecs[0]))
    rates = [rate_for(ratio, ring) for ratio in args.ratio]
    if args.rate:
        rates = [rate for rate in [parse_rate(args.rate)] if rate is not None]
    kept: list[dict[str, Any]] = []
    for rate in rates:
        rows = measure(args, rate)
        kept += [{**row, "rate": rate} for row in rows]
        print(
            f"\n{args.layout} nodes at {show_rate(rate)}; {args.heads} heads of {args.width}, "
            f"{args.kept} of keys, {args.dtype}, causal, forward and backward; median of "
            f"{args.rounds}; load of the machine before: {load:.2f}\n"
        )
        print(report(free, rows, rate))
    if args.out:
        args.out.write_text(json.dumps({"free": free, "shaped": kept}))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LabError as error:
        sys.exit(str(error))
