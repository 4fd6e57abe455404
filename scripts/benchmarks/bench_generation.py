#!/usr/bin/env python3
"""Time generation on two pipeline stages over a slow link, with and without batches in flight.

    scripts/benchmarks/bench_generation.py --latency 0.3

Two ranks of this machine are the stages of a small GPT with random weights. The link is emulated: a
frame becomes readable ``latency`` seconds plus its bytes over ``rate`` after it was sent, in order.
Both variants generate the same tokens. ``--padding`` instead alternates prompt passes on packed and
padded tokens and reports CPU seconds at several shares of padding.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import socket
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # hybridcomp, from this checkout
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))  # gpt

from gpt.model import GPT
from gpt.weights import ModelConfig

from hybridcomp.config.generation import GenerateConfig
from hybridcomp.generation import (
    GeneratingStage,
    KeyStore,
    PackedPass,
    Sampling,
    SequencePart,
    StageRunner,
    answer,
    frames,
)

CPU = torch.device("cpu")


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--latency", type=float, default=0.3, metavar="S", help="of one way")
    add("--rate", type=float, default=1e6, metavar="BYTES", help="a second")
    add("--tokens", type=int, default=12, help="of an answer")
    add("--batches", type=int, default=4)
    add("--size", type=int, default=8, help="sequences of a batch")
    add("--width", type=int, default=128)
    add("--padding", action="store_true")
    return parser.parse_args()


def slow_down(latency: float, rate: float) -> None:
    """Delay every incoming frame as a link of that latency and rate would."""
    packed, unpacked, free = frames.HopFrame.packed, frames.HopFrame.unpacked, [0.0]

    def stamped(self: frames.HopFrame) -> torch.Tensor:
        if not self.said:
            return packed(self)
        free[0] = max(free[0], time.time()) + self.payload.numel() / rate
        return packed(frames.HopFrame({**self.said, "due": free[0] + latency}, self.payload))

    def late(received: torch.Tensor) -> frames.HopFrame:
        found = unpacked(received)
        if found.said:
            time.sleep(max(0.0, found.said["due"] - time.time()))
        return found

    frames.HopFrame.packed = stamped  # type: ignore[method-assign]
    frames.HopFrame.unpacked = staticmethod(late)  # type: ignore[method-assign]


def stage(arguments: argparse.Namespace, rank: int) -> GeneratingStage:
    """Return one half of the model."""
    model = GPT(ModelConfig(256, 4, arguments.width, 4)).eval()
    half = list(model.layers[3 * rank : 3 + 4 * rank])
    settings, group = GenerateConfig(batch=arguments.size), dist.group.WORLD
    assert group is not None, "the ranks have met"
    return GeneratingStage(half, half, CPU, group, None, 0, None, False, settings, 0)


def run(rank: int, arguments: argparse.Namespace, port: int) -> None:
    """Run one stage; the first prints the table."""
    torch.set_num_threads(1)
    meet = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    slow_down(arguments.latency, arguments.rate)
    own, draw = stage(arguments, rank), random.Random(0)
    count = arguments.batches * arguments.size
    prompts = [[draw.randrange(256) for _ in range(draw.randint(16, 48))] for _ in range(count)]
    took: dict[str, tuple[float, Any]] = {}
    for name, slots in (("one after the other", 1), ("in flight", arguments.batches)):
        began = time.perf_counter()
        found = answer(own, prompts, arguments.tokens, Sampling(), in_flight=slots)
        took[name] = (time.perf_counter() - began, found)
    if rank == 0:
        (slow, first), (fast, second) = took.values()
        told = f"{arguments.batches} batches of {arguments.size}, {arguments.latency * 1e3:.0f} ms"
        for name, (seconds, found) in took.items():
            print(f"{told}, {name}: {seconds:.2f} s, {sum(map(len, found)) / seconds:.1f} tokens/s")
        print(f"{slow / fast:.2f} times as fast in flight, answers equal: {first == second}")
    dist.barrier()
    dist.destroy_process_group()


def padding() -> None:
    """Print CPU seconds of a pass over 16 prompts, packed and padded to the longest."""
    torch.set_num_threads(1)
    layers = GPT(ModelConfig(256, 2, 512, 8)).eval().layers[:-1]
    padded = torch.nn.Sequential(*layers)
    rows, draw = torch.ones(16, 256, dtype=torch.int64), random.Random(1)
    for share in (0.0, 0.24, 0.46, 0.7):
        most = min(256.0, 512 * (1 - share))
        others = [round(draw.uniform(max(1, 512 * (1 - share) - most), most)) for _ in range(15)]
        lengths = [256, *others]
        parts = tuple(SequencePart(n, (1,) * length) for n, length in enumerate(lengths))
        runner = StageRunner(list(layers), KeyStore(257), CPU, is_first=True, is_last=False)
        ended = PackedPass((SequencePart(99, (1,)),), tuple(range(16)))
        took: list[float] = []
        for _ in range(5):
            began = time.process_time()
            runner(PackedPass(parts))
            between = time.process_time()
            runner(ended)
            again = time.process_time()
            with torch.no_grad():
                padded(rows)
            took.append((time.process_time() - again) / (between - began))
        lost = 1 - sum(lengths) / (16 * 256)
        print(f"padding {lost:.2f}: {median(took):.2f} times fewer CPU seconds packed", flush=True)


def main() -> None:
    """Measure."""
    arguments = parse()
    if arguments.padding:
        padding()
        return
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run, args=(rank, arguments, port)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    sys.exit(max(one.exitcode or 0 for one in ranks))


if __name__ == "__main__":
    main()
