#!/usr/bin/env python3
"""A compressed all-reduce over a slow link, against the native one and what its bytes would allow.

One command, as root: ``python scripts/bench/bench_netlab.py``. Two nodes of a netlab, one rank on
each, take turns with the variants, so that noise of the machine hits all of them; medians are
printed. *efficiency* is (native time / byte ratio) / time: 1 is a codec that costs nothing.
``--check`` exits with 1 when native does not reach 90 % of the link, or efficiency misses its
target. ``--rounds`` compares lengths of rounds instead.
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

#: of the link, by native; of native time / byte ratio, by codec
LINK, TARGETS = 0.90, {"blockint 8": 0.85, "blockint 4": 0.75}
#: elements of the longest row in one segment; the last: whole messages
SIZES = [1 << size for size in (16, 17, 18, 19, 20, 21, 22, 40)]


def variants(sizes: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Name to (bits, elements of a segment; 0: the constant)."""
    if not sizes:
        return {f"blockint {bits}": (bits, 0) for bits in (8, 4)}
    return {
        f"blockint {bits}, {'whole' if size > 1 << 30 else f'{size >> 10} Ki'}": (bits, size)
        for bits in (8, 4)
        for size in sizes
    }


def rank_main(megabytes: int, rounds: int, sizes: Sequence[int]) -> None:
    """One rank: seconds of every variant by round, printed as JSON by rank 0."""
    import torch
    import torch.distributed as dist

    from hybridcomp.codecs import make_codec
    from hybridcomp.collectives import Group, Meter, Reduction, all_reduce, native_nbytes
    from hybridcomp.collectives.wire import exchanges

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    values = torch.randn(megabytes * (1 << 20) // 4)
    wire = {
        "native": native_nbytes.all_reduce_nbytes(
            values.numel(), values.dtype, dist.get_world_size()
        )
    }
    group = Group.of(None)
    usual = exchanges.ROUND, exchanges.HALF
    runs: dict[str, Callable[[], object]] = {"native": lambda: dist.all_reduce(values)}

    def compressed(name: str, bits: int, size: int) -> None:
        meter = Meter()
        exchanges.ROUND, exchanges.HALF = (size, size) if size else usual
        all_reduce(values, Reduction(make_codec("blockint", bits=bits), group, meter))
        wire[name] = meter.wire_nbytes
        coding[name].append(meter.codec_s)

    coding: dict[str, list[float]] = {}
    for name, (bits, size) in variants(sizes).items():
        runs[name] = lambda name=name, bits=bits, size=size: compressed(name, bits, size)  # type: ignore[misc]
        coding[name] = []
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            values.normal_()
            dist.barrier()
            start = time.perf_counter()
            run()
            if turn:  # the first touches the buffers
                seconds[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds, "wire": wire, "coding": coding}))
    dist.destroy_process_group()


def report(found: dict[str, Any], rate: int | None, sizes: Sequence[int]) -> bool:
    """Print the table; whether the targets are met."""
    native_nbytes = statistics.median(found["seconds"]["native"])
    raw = found["wire"]["native"]
    fine = True
    print("| variant | ms | bytes | link used | efficiency | at least | coding ms |")
    print("|---|---|---|---|---|---|---|")
    for name, seconds in found["seconds"].items():
        median, ratio = statistics.median(seconds), raw / found["wire"][name]
        link = found["wire"][name] * 8 / rate / median if rate else float("nan")
        efficiency = native_nbytes / ratio / median
        target = LINK if name == "native" else None if sizes else TARGETS[name]
        met = target is None or (link if name == "native" else efficiency) >= target
        fine = fine and met
        coding = statistics.median(found["coding"][name]) * 1e3 if name != "native" else 0.0
        wanted = "" if target is None else f"{target:.2f}{'' if met else ', missed'}"
        print(
            f"| {name} | {median * 1e3:.1f} | 1/{ratio:.2f} | {link:.3f} | {efficiency:.3f} "
            f"| {wanted} | {coding:.1f} |"
        )
    return fine


def main() -> int:
    """Run; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--layout", default="2")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rounds", action="store_true", help="compare lengths of rounds")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = SIZES if args.rounds else []
    if args.rank:
        rank_main(args.megabytes, args.rounds, sizes)
        return 0
    rate = parse_rate(args.rate)
    load = os.getloadavg()[0]
    root = Path(__file__).resolve().parents[1]
    path = f"{root}:{os.environ.get('PYTHONPATH', '')}"
    with Lab(Layout.parse(args.layout), Rates(rate)) as lab:
        words = [sys.executable, __file__, "--rank", *sys.argv[1:]]
        result = lab.run(words, env={"PYTHONPATH": path}, timeout=600)
    if result.status:
        print("\n".join(result.outputs), file=sys.stderr)
        return result.status
    print(
        f"all-reduce of {args.megabytes} MB fp32, {args.layout} nodes at {show_rate(rate)}, median "
        f"of {args.rounds}; load of the machine before: {load:.2f}"
    )
    fine = report(json.loads(result.outputs[0].splitlines()[-1]), rate, sizes)
    return 1 if args.check and not fine else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LabError as error:
        sys.exit(str(error))
