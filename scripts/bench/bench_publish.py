#!/usr/bin/env python3
"""Measure a version of published weights: compare, encode, wire, check, apply, bits a weight.

    python scripts/bench/bench_publish.py                         # tables
    python scripts/bench/bench_publish.py --width 128 --layers 2  # a small model, in seconds
    python scripts/bench/bench_publish.py --json out.json

The traces are those of bench_deltas.py: weights in bf16 before and after a step at each learning
rate, repeated to `--mbytes`. One rank publishes them to a folder of this machine, a receiver in the
same process applies them; every version is compared bit for bit. A time is the smallest of
`--repeats` versions that go there and back. `wire` is this machine's disk cache.

The second table has the stages alone, on these weights: GB/s of weights, and their speed as a
share of that of `Tensor.copy_`; its last lines are the whole calls. `--instructions avx2` (or
`plain`) has the loops of processors without AVX-512, which write the same bytes. With `--threads 1`
its times are CPU time of that core: what waits for the disk or for other jobs is not in them.

The third table is what a receiver waits for a version over a link, in seconds: it is published
to a stream in memory, sent, and applied, one after the other, all on as many threads; coded by
stepcode, or raw, which compares and checks as well. Dense is two bytes a weight with nothing else.
Beyond the links in the last lines coding takes longer than raw versions, or than dense weights, on
so many cores.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from bench.bench_codecs import timed
from bench.bench_deltas import parser_of, table
from bench.deltas_bench.traces import Size, Trace, traces
from hybridcomp.codecs import StepCode
from hybridcomp.codecs.changes import change_kernels
from hybridcomp.kernels import KernelSet
from hybridcomp.publishing import (
    AppliedVersion,
    EngineWeights,
    Held,
    Publisher,
    WeightRange,
    WeightReceiver,
)
from hybridcomp.publishing.checksums import compare, digest_of, empty_mask
from hybridcomp.publishing.destinations import Destination, Folder
from hybridcomp.publishing.streams import Stream

#: Gb/s of the links that are looked at
LINKS = (0.1, 1.0, 10.0, 100.0)
#: values of a parameter of the published model
PARAMETER = 1 << 22
WAYS = ("stepcode", "raw")
TIMES = ("compare_s", "encode_s", "wire_s", "check_s", "apply_s")

Row = dict[str, float]
CODEC = StepCode()


def weights_of(values: Tensor) -> EngineWeights:
    """Return ``values`` as a model of one rank whose parameters have ``PARAMETER`` values."""
    parts = {f"layers.{n}.weight": part for n, part in enumerate(torch.split(values, PARAMETER))}
    held = [
        Held(WeightRange(name, 0, part.numel()), functools.partial(_same, part))
        for name, part in parts.items()
    ]
    shapes = {name: tuple(part.shape) for name, part in parts.items()}
    return EngineWeights(shapes, dict.fromkeys(parts, values.dtype), held, (0,))


def _same(values: Tensor) -> Tensor:
    return values


class Memory:
    """A stream in memory: what is written is read from the begin, and then forgotten."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._read = 0

    def write(self, data: memoryview | bytes) -> None:
        """Keep a copy of ``data``."""
        self._data += data

    def read(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        room = bytearray(nbytes)
        return bytes(room[: self.readinto(memoryview(room))])

    def readinto(self, room: memoryview) -> int:
        """Fill ``room`` with the next bytes; return how many there were."""
        found = min(len(room), len(self._data) - self._read)
        room[:found] = memoryview(self._data)[self._read : self._read + found]
        self._read += found
        if self._read == len(self._data):
            self._data, self._read = bytearray(), 0
        return found


def measured(trace: Trace, mbytes: int, repeats: int, folder: Path) -> Row:
    """Publish a trace to a folder, then through memory either way; return sizes and best times."""
    found = one_way(trace, mbytes, repeats, Folder(folder), folder, "stepcode")
    for codec in WAYS:
        stream = Memory()
        row = one_way(trace, mbytes, repeats, Stream(stream, (0,)), stream, codec)
        found |= {f"{codec}: {key}": row[key] for key in ("bits", "publish_s", "update_s")}
    return found


def one_way(
    trace: Trace, mbytes: int, repeats: int, to: Destination, source: object, codec: str
) -> Row:
    """Publish a trace there and back; return sizes, the best times, and the weights."""
    copies = -(-mbytes * 2**20 // (2 * trace.values.numel()))
    there, back = trace.values.repeat(copies), trace.reference.repeat(copies)
    held = back.clone()
    publisher = Publisher(weights_of(held), to, anchor_every=10**9, codec=codec)
    receiver = WeightReceiver(source)
    full = publisher.publish()
    _received(receiver, held)
    rows: list[Row] = []
    for number in range(repeats):
        held.copy_(back if number % 2 else there)
        called = timed(publisher.publish)
        assert publisher.summary is not None
        received = _received(receiver, held)
        rows.append({**vars(publisher.summary), "publish_s": called, **received})
    summary = publisher.summary
    assert summary is not None
    publisher.close()
    found = {key: min(row[key] for row in rows) for key in (*TIMES, "publish_s", "update_s")}
    sizes = {"weights": float(summary.weights), "full bits": full.bits_per_weight}
    sizes |= {"changed": rows[0]["changed"] / summary.weights}
    return {**sizes, "bits": 8 * rows[0]["nbytes"] / summary.weights, **found}


def _received(receiver: WeightReceiver, values: Tensor) -> Row:
    calls: list[AppliedVersion | None] = []
    called = timed(lambda: calls.append(receiver.update()))
    applied = calls[0]
    assert applied is not None
    parts = {int(name.split(".")[1]): tensor for name, tensor in receiver.tensors()}
    whole = torch.cat([parts[number] for number in sorted(parts)])
    if not torch.equal(whole.view(torch.int16), values.view(torch.int16)):
        raise AssertionError("the receiver has other values")
    return {"check_s": applied.check_s, "apply_s": applied.apply_s, "update_s": called}


def stages(trace: Trace, repeats: int) -> Row:
    """Return GB/s of each stage alone on a parameter's weights, and its share of a copy's speed."""
    copies = -(-PARAMETER // trace.values.numel())
    values, old = (one.repeat(copies)[:PARAMETER] for one in (trace.values, trace.reference))
    room = torch.empty(CODEC.wire_nbytes(PARAMETER, values.dtype), dtype=torch.uint8)
    payload = room[: CODEC.encode(values, old, room)].clone()
    target, mask = torch.empty_like(values), empty_mask(PARAMETER)
    picked = torch.empty(compare(values, old, mask)[0], dtype=values.dtype)
    bits, numbers = mask.data_ptr(), change_kernels()
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(values),
        "checksum": lambda: digest_of(values),
        "compare, with checksum": lambda: compare(values, old),
        "encode": lambda: CODEC.encode(values, old, room),
        "decode": lambda: CODEC.decode(payload, old, target),
        "compare, with a mask": lambda: compare(values, old, mask),
        "pick": lambda: numbers.pick(values.data_ptr(), bits, PARAMETER, picked.data_ptr()),
        "put": lambda: numbers.put(picked.data_ptr(), bits, PARAMETER, target.data_ptr()),
    }
    best = {name: min(timed(call) for _ in range(repeats)) for name, call in calls.items()}
    found = {f"{name}, GB/s": values.nbytes / seconds / 1e9 for name, seconds in best.items()}
    return found | {
        f"{name}, x copy": best["copy"] / best[name] for name in calls if name != "copy"
    }


def waits(row: Row) -> Row:
    """Return seconds of a version over each link either way, and up to which links coding pays."""
    coded, raw = (row[f"{way}: publish_s"] + row[f"{way}: update_s"] for way in WAYS)
    bits, raw_bits = (row[f"{way}: bits"] for way in WAYS)
    found: Row = {}
    for link in LINKS:
        found[f"{link:g} Gb/s, coded"] = coded + bits * row["weights"] / link / 1e9
        found[f"{link:g} Gb/s, raw"] = raw + raw_bits * row["weights"] / link / 1e9
        found[f"{link:g} Gb/s, dense"] = 16 * row["weights"] / link / 1e9
    saved = (raw_bits - bits) * row["weights"] / 1e9
    found["pays against raw below, Gb/s"] = saved / (coded - raw) if coded > raw else math.inf
    found["pays against dense below, Gb/s"] = (16 - bits) * row["weights"] / coded / 1e9
    return found


def main() -> int:
    """Parse arguments, train, measure, print."""
    parser = parser_of(__doc__, 256, "size of the published weights", 4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--instructions", choices=("avx512", "avx2", "plain"), default="avx512")
    arguments = parser.parse_args()
    instructions: Any = KernelSet[Any]("instructions").on(torch.device("cpu"))
    used = instructions.limit(arguments.instructions)
    rows: dict[float, Row] = {}
    alone: dict[float, Row] = {}
    size = Size(arguments.width, arguments.layers)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        try:
            for trace in traces(size, arguments.rates, arguments.warmup, arguments.settle):
                place = Path(folder, f"{trace.rate:g}")
                torch.set_num_threads(arguments.threads)
                alone[trace.rate] = stages(trace, 5 * arguments.repeats)
                rows[trace.rate] = measured(trace, arguments.mbytes, arguments.repeats, place)
        finally:
            dist.destroy_process_group()
    print(f"One version, on {torch.get_num_threads()} thread(s) with {used}, by learning rate:")
    print(table(rows, list(next(iter(rows.values()))), 4))
    for rate, row in rows.items():
        for call in ("publish", "update"):
            alone[rate][f"{call}(), GB/s"] = 2 * row["weights"] / row[f"{call}_s"] / 1e9
    print("\nStages alone:")
    print(table(alone, list(next(iter(alone.values()))), 2))
    links = {rate: waits(row) for rate, row in rows.items()}
    print("\nSeconds until a receiver has it:")
    print(table(links, list(next(iter(links.values()))), 3))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
