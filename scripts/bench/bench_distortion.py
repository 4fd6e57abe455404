#!/usr/bin/env python3
"""Bits per value at equal relative L2, on tensors captured from the example GPT on this machine.

    python scripts/bench/bench_distortion.py            # as bench_codecs.py --distortion
    python scripts/bench/bench_distortion.py --check    # exit 1 if a target is missed

Our codecs are measured on their real payloads; other people's formats are emulated in torch
(distortion/peers.py). Capturing trains the model for some steps, a second each on an idle core.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from bench.distortion import tables
from bench.distortion.capture import capture

#: values of this class are mostly zero; averages are over the others
SPARSE = "grad embed"
#: differences of fp32 weights end in zero bits, which mpc finds and expcode does not look for
DIFFERENCE = "delta"
DENSE_LOSSLESS = ("act", "param", "K", "V")


def missed_lossy(extra: dict[str, list[float]]) -> list[str]:
    """What radix promises against its peers."""
    targets = {"cuSZp fixed": 0.35, "zfp": 3.0}
    found = {name: tables.mean(extra[name]) for name in targets}
    return [
        f"radix saves {found[name]:.2f} bits against {name}, expected at least {target}"
        for name, target in targets.items()
        if not found[name] >= target
    ]


def missed_lossless(rows: dict[str, list[float]], names: list[str]) -> list[str]:
    """What expcode promises."""
    missed = []
    bf16 = dict(zip(names, rows["expcode bfloat16"], strict=True))
    for name in DENSE_LOSSLESS:
        if bf16[name] > 16 * 0.72:
            missed.append(f"expcode takes {bf16[name]:.2f} bits of bf16 {name}, expected 28% less")
    for dtype, bits in (("bfloat16", 16), ("float32", 32)):
        sparse = dict(zip(names, rows[f"expcode {dtype}"], strict=True))[SPARSE]
        if sparse * 3 > bits:
            missed.append(f"expcode takes {sparse:.2f} bits of {dtype} {SPARSE}, expected a third")
        pairs = zip(names, rows[f"expcode {dtype}"], rows[f"mpc {dtype}"], strict=True)
        missed += [
            f"expcode {ours:.2f} bits, mpc {theirs:.2f}: {dtype} {name}"
            for name, ours, theirs in pairs
            if ours >= theirs and name != DIFFERENCE
        ]
    return missed


def run(steps: int, seed: int, layers: int, width: int) -> list[str]:
    """Capture, print all tables; returns the targets that were missed."""
    tensors, loss = capture(steps, seed, layers, width)
    print(f"tensors of step {steps}, {layers=}, {width=}, loss {loss:.2f} nats, {seed=}")
    curves = {name: tables.curves_of(values) for name, values in tensors.items()}
    extra = tables.lossy_tables(curves, [name for name in tensors if name != SPARSE])
    tables.segment_table(curves)
    tables.variant_table(curves)
    rows = tables.lossless_table(tensors)
    return missed_lossy(extra) + missed_lossless(rows, list(tensors))


def report(arguments: argparse.Namespace) -> int:
    """Run on one thread, name what was missed; the exit status."""
    torch.set_num_threads(1)
    missed = run(arguments.steps, arguments.seed, arguments.layers, arguments.width)
    for line in missed:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if missed and arguments.check else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What bench_codecs.py takes as well."""
    parser.add_argument("--steps", type=int, default=60, help="before the capture (--distortion)")
    parser.add_argument("--seed", type=int, default=0, help="of model and data (--distortion)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (--distortion)")
    parser.add_argument("--width", type=int, default=256, help="of the model (--distortion)")


def main() -> int:
    """The exit status is 1 if --check found a missed target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    return report(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
