#!/usr/bin/env python3
"""A pipeline over token slices at batch 1: measured steps beside what the dynamic program predicts.

torchrun --nproc-per-node 4 scripts/bench/bench_slices.py --share 0.45      as root: shares of cores

Every rank is a stage of equal layers. First the stage's forward and backward are timed on slices of
several lengths at several places, and a line is fitted to them; then ``token_slices`` chooses, and
the sequence is trained on whole, in uniform slices and in the chosen ones, in turns. Messages are
timed on stages that compute nothing. The prediction takes a stage to be as fast beside others as it
is alone: give each rank a core of its own, or where there are fewer a ``--share`` of one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from bench.context_bench.slices_table import table
from hybridcomp.nn.slices import Past, SlicePipeline, attend
from hybridcomp.plan.algorithms.slices import Slices, SliceSeconds, token_slices, uniform_slices
from lab.layout import LabError
from lab.quota import share_of_core


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


class Passing(nn.Module):
    """A stage that hands on what comes: only the messages of a step are left."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.zeros(width))

    def forward(self, values: Tensor, past: Past) -> Tensor:
        """Tokens (1, T) or hidden states (1, T, C) to hidden states."""
        return self.row.expand(*values.shape, -1) if values.dim() == 2 else values * 1.0


def loss_of(hidden: Tensor, labels: Tensor) -> Tensor:
    """Something with a gradient: the mean square of the first features, around the labels."""
    return (hidden[..., 0] - labels / 256).square().mean()


def once(stage: Stage, width: int, start: int, stop: int) -> float:
    """Seconds of one slice, forward and backward, behind ``start`` tokens with gradients of all."""
    past = Past()
    if start:
        for layer in stage.layers:
            layer(torch.randn(1, start, width), past)
        past.advance(start)
    values = torch.randn(1, stop - start, width, requires_grad=True)
    begin, out = time.perf_counter(), values
    for layer in stage.layers:
        out = layer(out, past)
    out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
    return time.perf_counter() - begin


def fitted(stage: Stage, options: argparse.Namespace) -> SliceSeconds:
    """Seconds of a slice in granules: computing as ``_features`` says, and its messages.

    Fitted to what this stage takes. Errors count as shares of a time: most slices are short. The
    slowest stage's line is used on all.
    """
    granule: int = options.granule
    count, rows = options.length // granule, []
    for size in sorted({1, 2, max(1, count // 16), max(1, count // 4), max(1, count // 2), count}):
        for start in sorted({0, (count - size) // 2, count - size}):
            edges = granule * start, granule * (start + size)
            once(stage, options.width, *edges)
            found = [once(stage, options.width, *edges) for _ in range(options.repeats)]
            rows.append([feature / statistics.median(found) for feature in _features(*edges)])
    line = torch.linalg.lstsq(torch.tensor(rows), torch.ones(len(rows), 1)).solution
    lines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lines, line.squeeze(1).tolist())
    slowest = max(lines, key=lambda each: _time(each, 0, options.length))
    call, token = messages(options)

    def seconds(start: int, stop: int) -> float:
        computing = max(1e-9, _time(slowest, granule * start, granule * stop))
        return float(computing + call + token * granule * (stop - start))

    return seconds


def messages(options: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a slice's two messages on a stage: for each of them, and for each token.

    Of steps of stages that compute nothing, whose slices come one after the other all the same.
    """
    stage, count, short, times = Passing(options.width), 8, options.granule, []
    for length in (short, 4 * short):
        turns = range(options.repeats + 1)
        steps = [stepped(stage, (length,) * count, options.width) for _ in turns]
        times.append(statistics.median(steps[1:]) / (count + dist.get_world_size() - 1))
    token = max(0.0, (times[1] - times[0]) / (3 * short))
    return max(0.0, times[0] - token * short), token


def stepped(stage: nn.Module, lengths: Sequence[int], width: int) -> float:
    """Seconds of a step on the slowest rank."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(256, (1, sum(lengths) + 1), generator=generator)
    pipeline = SlicePipeline(stage, lengths, width, loss_of)
    dist.barrier()
    begin = time.perf_counter()
    pipeline.step(whole[:, :-1], whole[:, 1:])
    took = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def _features(start: int, stop: int) -> list[float]:
    """A call, tokens, pairs of tokens, and the keys of before that are copied behind each other."""
    tokens = stop - start
    return [1.0, tokens / 1e3, tokens * (start + stop) / 2e6, start / 1e3]


def _time(line: Sequence[float], start: int, stop: int) -> float:
    return sum(a * b for a, b in zip(line, _features(start, stop), strict=True))


def measured(stage: Stage, ways: dict[str, Slices], options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step in each way, in turns: the median of the slowest rank's."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.repeats + 1):
        for name, slices in ways.items():
            took = stepped(stage, slices.lengths(options.granule), options.width)
            if turn:
                seconds[name].append(took)
    return {
        name: {
            "slices": slices.lengths(options.granule),
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
    add("--share", type=float, metavar="F", help="of a core for each stage; as root")
    add("--out", type=Path, metavar="FILE", help="JSON")
    found = parser.parse_args(arguments)
    if found.length % found.granule:
        parser.error("--length: expected a multiple of --granule")
    return found


def compared(options: argparse.Namespace) -> dict[str, Any]:
    """What a step takes in each way, and what the dynamic program says of it."""
    torch.manual_seed(0)
    stage, count = Stage(options), options.length // options.granule
    seconds = fitted(stage, options)
    ways = {"whole": uniform_slices(count, 1, seconds)}
    for parts in (2, 4, 8, 16, 32):
        if parts <= count:
            ways[f"uniform {parts}"] = uniform_slices(count, parts, seconds)
    ways["chosen"] = token_slices(count, dist.get_world_size(), seconds)
    return measured(stage, ways, options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = parse(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cores = sorted(os.sched_getaffinity(0))
    quota: Any = contextlib.nullcontext()
    if options.share:
        quota = share_of_core(options.share, cores[dist.get_rank() % len(cores)])
    with quota:
        found = compared(options)
    if dist.get_rank() == 0:
        print(
            f"{dist.get_world_size()} stages of {options.layers} layers, width {options.width}, "
            f"{options.length} tokens, batch 1; shares of a core: {options.share or 'none'}\n"
        )
        print(table(found))
        if options.out:
            kept = {"options": vars(options), "stages": dist.get_world_size(), "rows": found}
            options.out.write_text(json.dumps(kept, indent=1, default=str) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LabError as error:
        sys.exit(str(error))
