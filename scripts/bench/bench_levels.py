#!/usr/bin/env python3
"""Time sums and gathers in one, two and three levels over switches with slow uplinks, in turns.

    python scripts/bench/bench_levels.py                        # as root: links are made
    python scripts/bench/bench_levels.py --rate 2gbit --uplink 200mbit --megabytes 16

Two sites of two nodes of two ranks (``netlab.py --layout 2+2x2``): ranks of a node talk through
its loopback, nodes over links of ``--rate``, sites over uplinks of ``--uplink``. Every message is
an fp32 tensor of ``--megabytes``, a sum of gradients (all-reduce) or a gather of parameters, with
the same codec in every arm but native. "uplink MB" are those that left the first site, by the
kernel's counter of its uplink, with packets' headers and the acknowledgements of what came in;
"planned" are the payloads that the plan of the message sends there. "of the bound" is the largest
error of an element over what ``error_bound`` allows it, or where the nodes of a site encode their
sums for each other (8 bits, which no error_bound counts) over what three quantizations allow.
Ratios are medians of those within a turn, of the slowest rank's seconds.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from hybridcomp.channels import AllGather, AllReduce, Channels
from hybridcomp.codecs import LOSSLESS, Codec
from hybridcomp.config import CompressionConfig
from hybridcomp.policy import Dimension
from lab import namespaces
from lab.cluster import Lab
from lab.layout import Layout, Rates, parse_rate

LAYOUT, RANKS = "2+2x2", 8
#: arms and their ``hierarchy``; None: native. The ratios are those to REFERENCE
ARMS: dict[str, Any] = {
    "native": None,
    "one level": "none",
    "two levels: nodes": 2,
    "two levels: sites": 4,
    "three levels": [2, 2],
    "three levels, 8 bits inside": [2, {"size": 2, "codec": "blockint", "bits": 8}],
}
REFERENCE = "two levels: nodes"
KINDS = ("sum", "gather")
#: as in the block
SEGMENT = 4096
#: values of the same sums that are encoded one after the other where a level has a codec
QUANTIZED = 3

Row = dict[str, float]


class Arm:
    """Sums and gathers of one ``hierarchy``, on this rank of a job whose group is the default."""

    def __init__(self, hierarchy: Any, codec: dict[str, Any], values: Tensor) -> None:
        self.values, self.out, self.channels = values, torch.empty_like(values), None
        share = values.numel() // dist.get_world_size()
        self.shard = self.out[dist.get_rank() * share :][:share]
        self.inner = isinstance(hierarchy, list) and not all(map(_is_number, hierarchy))
        if hierarchy is not None:
            if self.inner:  # no error_bound counts what a level leaves out
                codec = {key: value for key, value in codec.items() if key != "error_bound"}
            block = {"dp": codec, "zero": codec, "min_bytes": 0, "hierarchy": hierarchy}
            self.channels = Channels(CompressionConfig.parse({**block, "when": "always"}))
            self.channels.place([tuple(range(dist.get_world_size()))])

    def run(self, kind: str) -> tuple[Tensor, float]:
        """Sum or gather the values; return the result, and the seconds of the slowest rank."""
        self.out.copy_(self.values)
        dist.barrier()
        start = time.perf_counter()
        self._sum() if kind == "sum" else self._gather()
        found = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return self.out, float(found)

    def codec(self, kind: str) -> Codec:
        """Return the codec of a message of this kind; of native ones, any."""
        if self.channels is None:
            return LOSSLESS
        name: Dimension = "dp" if kind == "sum" else "zero"
        numel = self.out.numel() if kind == "sum" else self.shard.numel()
        found = self.channels[name].codec(numel, self.out.dtype, None)
        assert found is not None, "the block has one for every message"
        return found

    def bound(self, kind: str, asked: float) -> float:
        """Return what an element may be off by, over the sum of the ranks' magnitudes.

        ``asked``: the error_bound. With a codec inside, which has none: what each quantization may
        leave out of values that are at most that sum.
        """
        if not self.inner:
            return asked
        one = self.codec(kind).element_bound(1.0, torch.float32)
        return QUANTIZED * one if kind == "sum" else one

    def _sum(self) -> None:
        if self.channels is None:
            dist.all_reduce(self.out)
            return
        message = AllReduce(values=self.out, **self._about())
        message.send(self.channels["dp"], self.codec("sum")).wait()

    def _gather(self) -> None:
        if self.channels is None:
            dist.all_gather_into_tensor(self.out, self.shard.clone())
            return
        message = AllGather(shard=self.shard, out=self.out, **self._about())
        message.send(self.channels["zero"], self.codec("gather")).wait()

    def _about(self) -> dict[str, Any]:
        return {"numel": self.out.numel(), "dtype": self.out.dtype, "group": None}


def _is_number(level: Any) -> bool:
    return isinstance(level, int)


def of_bound(result: Tensor, exact: Tensor, magnitudes: Tensor, bound: float) -> float:
    """Return the largest error over what is allowed: ``bound`` times a segment's ``magnitudes``."""
    worst = (result - exact).abs().view(-1, SEGMENT).amax(1)
    return float((worst / (bound * magnitudes)).max())


def rank(asked: argparse.Namespace) -> None:
    """Time all arms on this rank; rank 0 writes the rows."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    numel = int(asked.megabytes * 1e6 / 4) // (RANKS * SEGMENT) * (RANKS * SEGMENT)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    codec = {"codec": asked.codec, "error_bound": asked.bound}
    if asked.bits:
        codec["bits"] = asked.bits
    arms = {name: Arm(ARMS[name], codec, values) for name in asked.arms}
    largest = values.view(-1, SEGMENT).abs().amax(1)
    magnitudes = {"sum": largest.clone(), "gather": torch.empty_like(largest)}
    dist.all_reduce(magnitudes["sum"])
    share = largest.numel() // dist.get_world_size()
    dist.all_gather_into_tensor(magnitudes["gather"], largest[dist.get_rank() * share :][:share])
    rows: dict[str, dict[str, Row]] = {}
    for kind in KINDS:
        exact = arms["native"].run(kind)[0].clone()
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        sent: dict[str, list[int]] = {name: [] for name in arms}
        errors = {}
        for turn in range(asked.turns + 1):
            for name, arm in arms.items():
                before = _uplink(asked)
                result, took = arm.run(kind)
                if turn:  # the first one allocates and connects
                    seconds[name].append(took)
                    sent[name].append(_uplink(asked) - before)
                else:
                    errors[name] = of_bound(
                        result, exact, magnitudes[kind], arm.bound(kind, asked.bound)
                    )
        rows[kind] = {
            name: row(
                seconds, name, statistics.median(sent[name]),
                planned(kind, ARMS[name], numel, arm.codec(kind)), errors[name],
            )
            for name, arm in arms.items()
        }  # fmt: skip
    if dist.get_rank() == 0:
        asked.rows.write_text(json.dumps({"numel": numel, "rows": rows}))
    dist.destroy_process_group()


def _uplink(asked: argparse.Namespace) -> int:
    """Return the bytes that have left the first site; 0 on all ranks but the first."""
    dist.barrier()
    if dist.get_rank():
        return 0
    return namespaces.counters(asked.switch, "up0").sent


def planned(kind: str, hierarchy: Any, numel: int, codec: Codec) -> float:
    """Return the bytes of the payloads that leave a site; NaN: native, which no plan of ours sends.

    Over gloo a payload goes to each of its receivers by itself. A site has half of the ranks.
    """
    if hierarchy is None:
        return float("nan")
    levels = hierarchy if isinstance(hierarchy, list) else [hierarchy]
    sizes = [level["size"] if isinstance(level, dict) else level for level in levels]
    width = math.prod(sizes) if len(sizes) > 1 else sizes[0]
    width = 1 if width == "none" else width
    units, half = RANKS // width, RANKS // 2
    if kind == "sum" and units == 2:  # each of two swaps all values of its stretch
        return half * codec.wire_nbytes(numel // width, torch.float32)
    twice = 2 if kind == "sum" else 1
    return twice * half * units // 2 * codec.wire_nbytes(numel // RANKS, torch.float32)


def row(seconds: dict[str, list[float]], name: str, sent: float, plan: float, error: float) -> Row:
    """Return the figures of one arm."""
    pairs = zip(seconds[REFERENCE], seconds[name], strict=True)
    return {
        "planned MB": plan / 1e6,
        "uplink MB": sent / 1e6,
        "ms": round(1e3 * statistics.median(seconds[name])),
        "x two levels": statistics.median(two / mine for two, mine in pairs),
        "of the bound": error,
    }


def table(rows: dict[str, Row]) -> str:
    """Return a line for each arm, in Markdown."""
    names = list(next(iter(rows.values())))
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for arm, found in rows.items():
        cells = ("" if math.isnan(found[name]) else _cell(found[name]) for name in names)
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(value: float) -> str:
    return f"{value:d}" if isinstance(value, int) else f"{value:.3g}"


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the ranks in a lab; return numel and the rows by kind and arm."""
    rows = folder / "rows.json"
    command = [sys.executable, str(Path(__file__).resolve()), "--rows", str(rows)]
    for name in ("megabytes", "turns", "codec", "bits", "bound"):
        command += [f"--{name}", str(getattr(asked, name))]
    command += ["--arms", *asked.arms]
    with Lab(Layout.parse(LAYOUT), Rates(parse_rate(asked.rate), parse_rate(asked.uplink))) as lab:
        result = lab.run([*command, "--switch", f"{lab.prefix}sw"], timeout=1800)
    if result.status:
        raise SystemExit("a rank failed:\n" + "\n".join(t[-2000:] for t in result.outputs))
    found: dict[str, Any] = json.loads(rows.read_text())
    return found


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; --rows and --switch are those of a rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rate", default="200mbit", help="of a node's link")
    add("--uplink", default="50mbit", help="of a site's link")
    add("--megabytes", type=float, default=4.0, help="of a message in fp32")
    add("--codec", default="blockint")
    add("--bits", type=int, default=8, help="of blockint; 0: the codec has none")
    add("--bound", type=float, default=0.05, help="error_bound")
    add("--turns", type=int, default=7)
    add("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    add("--json", type=Path, help="write the rows to this file")
    add("--rows", type=Path, help=argparse.SUPPRESS)
    add("--switch", help=argparse.SUPPRESS)
    asked = parser.parse_args(given)
    missing = {"native", REFERENCE} - set(asked.arms)
    if missing:
        parser.error(f"--arms: expected native and {REFERENCE!r} among them, found {asked.arms}")
    return asked


def main() -> int:
    """Returns the exit status."""
    asked = parse()
    if asked.rows is not None and "RANK" in os.environ:
        rank(asked)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = measure(asked, Path(folder))
    words = f"{asked.codec}, {4e-6 * found['numel']:.3g} MB of fp32, nodes {asked.rate}"
    print(f"{words}, uplinks {asked.uplink}, medians of {asked.turns} turns")
    for kind, rows in found["rows"].items():
        print(f"\n{kind}:\n\n{table(rows)}")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
