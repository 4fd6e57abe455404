#!/usr/bin/env python3
"""Benchmark stepcode, lossless deltas of bf16 weights, and other formats on training traces.

    python scripts/benchmarks/bench_deltas.py                        # tables: bits and speeds
    python scripts/benchmarks/bench_deltas.py --width 128 --layers 2 # a small model, in seconds
    python scripts/benchmarks/bench_deltas.py --check                # exit 1 if a target is missed

A byte-level GPT is pretrained on the text of this checkout in fp32 with AdamW at 1e-3. From there
it takes a few steps at each learning rate; the trace is all weights, cast to bf16, before and after
the last step. `entropy` is of the deltas, given the exponents; `gaps` and `xor` are other projects'
formats through a general compressor: zstd of the package zstandard (`pip install zstandard`;
hybridcomp does not need it) or of Python 3.14, otherwise zlib. Speeds are bytes of weights per
second on one core, for a trace repeated to `--mbytes`, by the clock of bench_codecs.py; `x copy` is
the best time of `Tensor.copy_` of as many bytes divided by the codec's best time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from benchmarks.bench_codecs import timed
from benchmarks.deltas_bench.bits import compressors, sent
from benchmarks.deltas_bench.traces import Size, Trace, traces
from benchmarks.shared import parser_of, table
from hybridcomp.codecs import StepCode

RATES = [1e-3, 3e-4, 1e-4, 1e-6]
OTHER = "int32 + bf16"
#: maximum bits per value by the trace's label; maximum bits over the entropy; minimum GB/s of
#: weights on one core where at most the share MOST_SPARSE of the weights changed
MOST_BITS = {"0.001": 4.4, "0.0003": 2.8, "0.0001": 1.9, "1e-06": 0.3}
MOST_OF_ENTROPY, MOST_SPARSE, LEAST_SPEED = 1.1, 0.05, 1.0
#: where 1 to 5 % of the weights changed: maximum bits per changed value, and maximum size relative
#: to zstd on positions and to zstd on gaps
MOST_CHANGED_BITS, MOST_OF_POSITIONS, MOST_OF_GAPS = 7.0, 1 / 6, 0.4

Row = dict[str, float]


def speeds(trace: Trace, mbytes: int, repeats: int) -> Row:
    """Return GB/s of encode, decode, decode in place and copy, and the ratios to the copy."""
    copies = -(-mbytes * 2**20 // (2 * trace.values.numel()))
    values, reference = trace.values.repeat(copies), trace.reference.repeat(copies)
    codec, target = StepCode(), torch.empty_like(values)
    room = torch.empty(codec.wire_nbytes(values.numel(), values.dtype), dtype=torch.uint8)
    payload = room[: codec.encode(values, reference, room)].clone()
    codec.decode(payload, reference, target)
    if not torch.equal(target.view(torch.int16), values.view(torch.int16)):
        raise AssertionError("decoded other values")
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: codec.encode(values, reference, room),
        "decode": lambda: codec.decode(payload, reference, target),
        "copy": lambda: target.copy_(values),
    }
    seconds = {name: min(timed(call) for _ in range(repeats)) for name, call in calls.items()}
    in_place = min(_in_place(codec, payload, reference, target) for _ in range(repeats))
    seconds["in place"] = in_place
    nbytes = 2 * values.numel() / 1e9
    found = {f"{name} GB/s": nbytes / best for name, best in seconds.items()}
    for name in ("encode", "decode", "in place"):
        found[f"{name} x copy"] = seconds["copy"] / seconds[name]
    return found


def _in_place(codec: StepCode, payload: Tensor, reference: Tensor, held: Tensor) -> float:
    held.copy_(reference)
    return timed(lambda: codec.decode(payload, held, held))


def missed_targets(rows: Mapping[str, Row]) -> list[str]:
    """Return a line for each target that this run missed; ``rows``: a row per trace label."""
    missed = []
    for label, row in rows.items():
        share, most = row["stepcode"] / row["entropy"], MOST_BITS.get(label, 16.0)
        if share > MOST_OF_ENTROPY:
            missed.append(f"{label}: {share:.3f} times the entropy, expected {MOST_OF_ENTROPY}")
        if row["stepcode"] > most:
            missed.append(f"{label}: {row['stepcode']:.2f} bits, expected {most}")
        if row["changed"] > MOST_SPARSE:
            continue
        for name in ("encode GB/s", "decode GB/s"):
            if row[name] < LEAST_SPEED:
                missed.append(f"{label}: {name} {row[name]:.2f}, expected {LEAST_SPEED}")
        if row["changed"] >= 0.01:
            missed += [f"{label}: {line}" for line in _missed_by_few(row)]
    return missed


def _missed_by_few(row: Row) -> list[str]:
    """Return the targets missed by a row whose trace changed 1 to 5 % of the weights."""
    gaps = min((bits for name, bits in row.items() if name.startswith("gaps, ")), default=None)
    found = [(row["stepcode"] / row["changed"], MOST_CHANGED_BITS, "bits a changed value")]
    if OTHER in row:
        found.append((row["stepcode"] / row[OTHER], MOST_OF_POSITIONS, f"of {OTHER}"))
    if gaps is not None:
        found.append((row["stepcode"] / gaps, MOST_OF_GAPS, "of gaps"))
    return [f"{is_:.2f} {what}, expected {most:.2g}" for is_, most, what in found if is_ > most]


def main() -> int:
    """Parse arguments, train, measure, print; the exit status is 1 if --check missed a target."""
    parser = parser_of(__doc__)
    parser.add_argument("--width", type=int, default=384, help="a multiple of 64 (default 384)")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=60, help="steps at 1e-3 before all traces")
    parser.add_argument("--settle", type=int, default=4, help="steps at a rate before its trace")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--mbytes", type=int, default=64, help="of weights, for speeds")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not any(name.startswith("zstd") for name in compressors()):
        print("zlib stands in for zstd: pip install zstandard")
    rows: dict[str, Row] = {}
    size = Size(arguments.width, arguments.layers)
    for trace in traces(size, arguments.rates, arguments.warmup, arguments.settle):
        row = sent(trace.reference, trace.values)
        row["of the entropy"] = row["stepcode"] / row["entropy"] if row["entropy"] else 1.0
        row["bits a changed value"] = row["stepcode"] / row["changed"] if row["changed"] else 0.0
        rows[trace.label] = row | speeds(trace, arguments.mbytes, arguments.repeats)
        print(
            f"{trace.label}: {row['stepcode']:.3f} bits a value, {row['entropy']:.3f} needed",
            flush=True,
        )
    names = list(next(iter(rows.values())))
    fast = [name for name in names if "GB/s" in name or "x copy" in name]
    for title, digits, chosen in (
        ("Bits a value", 3, [name for name in names if name not in fast]),
        ("Speed on one core", 2, fast),
    ):
        cells = ([name, *(f"{row[name]:.{digits}f}" for row in rows.values())] for name in chosen)
        print(f"\n{title}:", *table(["", *rows], cells), sep="\n")
    missed = missed_targets(rows) if arguments.check else []
    for line in missed:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
