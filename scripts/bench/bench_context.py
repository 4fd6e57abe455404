#!/usr/bin/env python3
"""Attention over ranks by sequence length: a ring, Ulysses and gathered keys, encoded and not.

One command, as root: ``python scripts/bench/bench_context.py --lengths 2048 4096``. Nodes of a
netlab, one rank on each, compute one causal attention forward and backward: by the ring of
``hybridcomp.nn``, by all-to-all of heads for sequence (Ulysses), and with keys and values of all
ranks gathered. All three compute with the same blocks and send through the channel ``cp``. All take
turns, over links without limit and at every rate, so that noise of the machine hits all of them;
medians are printed. Where ranks share cores let all be ``--slower`` by somewhat more than as many
ranks as a core has: each then computes as fast beside the others as alone, and messages find a core
at once (``scripts/lab/slow_processors.py``). ``--steady`` takes the machine's changing speed out of
what is computed (``context_bench/steady.py``).

*computing* is a pass of the native codec over links that are not shaped. For each length ``--ratio
R`` chooses the rate at which the native ring's bytes need R times as long as its computing does.
*allowed* is the least that the bytes of a row allow its method beside that computing: a ring hides
a message behind a block (``report.allowed``), the other two hide nothing. *used* is that over what
was measured. *overlap* is the longer of computing and of what the bytes need, over what was
measured, which a method reaches that hides everything.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from bench.context_bench import report
from bench.context_bench.links import VARIABLE, Links, served
from lab.cluster import Lab
from lab.layout import LabError, Layout
from lab.slow_processors import KEEP_MEMORY, slow_processors

#: name of a row's codec -> the setting of ``cp``
CODECS: dict[str, Any] = {
    "native": "none",
    "lossless": "expcode",
    "8 bits": {"codec": "blockint", "bits": 8},
    "4 bits": {"codec": "blockint", "bits": 4},
}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all lengths and rates. Raises LabError where a rank fails."""
    root = Path(__file__).resolve().parents[1]
    path = f"{root}:{root.parent}:{os.environ.get('PYTHONPATH', '')}"
    words = [sys.executable, __file__, "--rank", *sys.argv[1:]]
    deadline, layout = time.monotonic() + 3600, Layout.parse(args.layout)
    times = [args.slower] * layout.world_size if args.slower > 1 else []
    with (
        tempfile.TemporaryDirectory() as folder,
        slow_processors(times) as processors,
        Lab(layout) as lab,
    ):
        processors.limit(True)
        words = [*processors.words, *words]
        env = {"PYTHONPATH": path, VARIABLE: f"{folder}/links", **KEEP_MEMORY}
        with served(env[VARIABLE], lab.shape) as links, lab.started(words, env=env) as team:
            while not team.any_ended and time.monotonic() < deadline:
                links.serve(0.2)
            team.wait(10.0)
    if any(team.statuses):
        raise LabError("\n".join(team.texts))
    rows: list[dict[str, Any]] = json.loads(team.texts[0].splitlines()[-1])
    return rows


def rank_main(args: argparse.Namespace) -> None:
    """One rank: seconds and bytes of every method and rate; rank 0 prints them as JSON."""
    import torch
    import torch.distributed as dist

    from bench.context_bench.passes import rows_of
    from bench.context_bench.steady import SteadyBlocks

    torch.set_num_threads(1)
    if args.slower > 1:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # whichever core is idle
    dist.init_process_group("gloo")
    codecs = {name: CODECS[name] for name in args.codecs}
    with Links() as links, SteadyBlocks() if args.steady else nullcontext() as steady:
        every = (rows_of(length, codecs, args, links, steady) for length in args.lengths)
        rows = [row for rows in every for row in rows]
    if dist.get_rank() == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
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
    add("--methods", nargs="+", default=list(report.METHODS), choices=list(report.METHODS))
    add("--codecs", nargs="+", default=list(CODECS), choices=list(CODECS))
    add("--ratio", type=float, nargs="+", default=[1.0, 4.0], metavar="R")
    add("--rounds", type=int, default=5)
    add("--slower", type=float, default=1.0, metavar="T", help="all ranks are T times slower")
    add("--steady", action="store_true", help="blocks last as long on all ranks and in all passes")
    add("--out", type=Path, metavar="FILE", help="all rows as JSON")
    add("--rank", action="store_true", help=argparse.SUPPRESS)
    found = parser.parse_args(arguments)
    if found.codecs[0] != "native" or found.methods[0] != "ring":
        parser.error("--codecs, --methods: expected native and ring first, which set the rates")
    return found


def main() -> int:
    """Run; the exit status."""
    args = parse()
    if args.rank:
        rank_main(args)
        return 0
    load = os.getloadavg()[0]
    kept = {"options": {**vars(args), "out": None}, "load": load, "rows": measure(args)}
    print(report.tables(kept))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LabError as error:
        sys.exit(str(error))
