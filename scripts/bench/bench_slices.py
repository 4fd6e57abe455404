#!/usr/bin/env python3
"""A pipeline over token slices at batch 1: measured steps beside what the dynamic program predicts.

python scripts/bench/bench_slices.py --slower 2.5

Every rank is a stage of equal layers. Slices are timed, tried and chosen as by ``chosen_slices``,
which is what ``--slices auto`` of the example does; then the sequence is trained on whole, in
uniform slices and in the chosen ones, in turns. The prediction takes a stage to be as fast beside
others as it is alone: give each rank a core of its own, or where there are fewer let all be
``--slower`` by somewhat more than ranks share a core (``scripts/lab/slow_processors.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from bench.context_bench.slices_table import table
from hybridcomp.nn.slices import Past, SlicedStage, attend, slice_times, tried_slices
from hybridcomp.plan.algorithms.slices import Slices
from lab.layout import LabError
from lab.slow_processors import KEEP_MEMORY, slow_processors

#: how many equal slices stand beside the chosen ones
UNIFORM = (2, 4, 6, 8, 12, 16, 24, 32)
#: turns of all ways, behind which those go on that take at most so many times the fastest
LOOK, CLEARLY = 5, 1.2


class Layer(nn.Module):
    """Attention to all tokens before, and an MLP; no norms, which cost little."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: Tensor, past: Past) -> Tensor:
        """(1, T, C) to (1, T, C)."""
        batch, length, _ = values.shape
        cut = self.qkv(values).view(batch, length, 3, self.heads, -1)
        query, key, value = cut.permute(2, 0, 3, 1, 4)
        mixed = attend(query, *past.extend(self, key, value))
        values = values + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = values + self.down(F.gelu(self.up(values)))
        return out


class Stage(nn.Module):
    """Some layers; the first stage has the table too, the loss takes hidden states."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.table = nn.Embedding(256, options.width) if dist.get_rank() == 0 else None
        layers = (Layer(options.width, options.heads) for _ in range(options.layers))
        self.layers = nn.ModuleList(layers)

    def forward(self, values: Tensor, past: Past) -> Tensor:
        """Tokens (1, T) or hidden states (1, T, C) to hidden states."""
        if self.table is not None:
            values = self.table(values)
        for layer in self.layers:
            values = layer(values, past)
        return values


def loss_of(hidden: Tensor, labels: Tensor) -> Tensor:
    """Something with a gradient: the mean square of the first features, around the labels."""
    return (hidden[..., 0] - labels / 256).square().mean()


def stepped(model: SlicedStage, lengths: Sequence[int]) -> float:
    """Seconds of a step on the slowest rank, of the module as an engine would train it."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(256, (1, sum(lengths) + 1), generator=generator)
    model.slices = tuple(lengths)
    dist.barrier()
    begin = time.perf_counter()
    model(whole[:, :-1], whole[:, 1:]).backward()
    took = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def measured(
    model: SlicedStage, ways: dict[str, Slices], options: argparse.Namespace
) -> dict[str, Any]:
    """Seconds of the steps in each way, in turns, of the slowest rank.

    Ways that are clearly slower than the fastest take the first turns only.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names, random, spent = list(ways), Random(0), 0.0
    for turn in range(options.repeats + 1):
        if turn > 1 and spent > options.seconds:  # the same on all ranks
            break
        random.shuffle(names)
        for name in names:
            took = stepped(model, ways[name].lengths(options.granule))
            spent += took
            if turn:
                seconds[name].append(took)
        if turn == LOOK:
            medians = {name: statistics.median(seconds[name]) for name in names}
            bound = CLEARLY * min(medians.values())
            names = [name for name in names if medians[name] <= bound or name == "chosen"]
    return {
        name: {
            "slices": slices.lengths(options.granule),
            "seconds": seconds[name],
            "measured_s": statistics.median(seconds[name]),
            "predicted_s": slices.seconds(dist.get_world_size()),
        }
        for name, slices in ways.items()
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--length", type=int, default=2048, help="tokens")
    add("--granule", type=int, default=128, help="slices are multiples of so many tokens")
    add("--width", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--layers", type=int, default=2, help="of each stage")
    add("--repeats", type=int, default=5)
    add("--seconds", type=float, default=180.0, metavar="S", help="no turn begins after so many")
    add("--stages", type=int, default=4)
    add("--slower", type=float, default=1.0, metavar="T", help="all ranks are T times slower")
    add("--out", type=Path, metavar="FILE", help="JSON")
    found = parser.parse_args(arguments)
    if found.length % found.granule:
        parser.error("--length: expected a multiple of --granule")
    return found


def compared(options: argparse.Namespace) -> dict[str, Any]:
    """What a step takes in each way, what the dynamic program says of it, and what was tried."""
    torch.manual_seed(0)
    model = SlicedStage(Stage(options), (options.length,), options.width, loss_of)
    times = slice_times(model, options.length, granule=options.granule, repeats=options.repeats)
    tried = tried_slices(model, times)
    ways = {"whole": times.uniform(1)}
    for parts in UNIFORM:
        if parts <= times.count:
            ways[f"uniform {parts}"] = times.uniform(parts)
    ways["chosen"] = tried[0].slices
    trials = [{"slices": t.slices.lengths(options.granule), "seconds": t.seconds} for t in tried]
    return {"tried": trials, "rows": measured(model, ways, options)}


def launched(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Start the stages, each on a processor of its own; the exit status of all."""
    times = [options.slower] * options.stages if options.slower > 1 else []
    with slow_processors(times) as processors:
        processors.limit(True)
        launcher = ["-m", "torch.distributed.run", "--no-python", "--nproc-per-node"]
        ranks = [*processors.words, sys.executable, str(Path(__file__).resolve()), *arguments]
        words = [sys.executable, *launcher, str(options.stages), *ranks]
        env = {"OMP_NUM_THREADS": "1", **os.environ, **KEEP_MEMORY}
        return subprocess.run(words, env=env, check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = parse(arguments)
    if "RANK" not in os.environ:
        return launched(options, sys.argv[1:] if arguments is None else arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = compared(options)
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} stages of {options.layers} layers, width {options.width}, "
            f"{options.length} tokens, batch 1; {options.slower:g} times slower\n"
        )
        print(table(found["rows"]))
        print(*found["tried"], sep="\n")
        if options.out:
            kept = {"options": vars(options), "stages": dist.get_world_size(), **found}
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(kept, indent=1, default=str) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LabError as error:
        sys.exit(str(error))
