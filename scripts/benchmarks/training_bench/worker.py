"""One rank: runs a training script unchanged, and reports time and NIC counters of every step.

worker.py train_gpt|benchmarks.train_peer ARGUMENT ...

Every step waits for its turn (``turns``).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # scripts/, as all imports here
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))  # gpt, train_gpt

from benchmarks.training_bench import turns

#: a trainer's ``step``: (trainer, batches) -> loss
Step = Callable[..., float]


def sent_nbytes(interface: str) -> int:
    """Return the bytes sent through ``interface`` since its creation; 0 if it does not exist."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == interface:
            return int(figures.split()[8])
    return 0


def watched(step: Step, seat: turns.Seat) -> Step:
    """Wrap ``step`` of a trainer: wait for a turn, and report its seconds, bytes and loss.

    The last turn, too, ends with its step: a rank that exits early would take the core from the
    ranks that still step.
    """
    interface, begun = os.environ.get("GLOO_SOCKET_IFNAME", "lo"), False

    def around(self: Any, batches: Any) -> float:
        nonlocal begun
        if not begun:
            seat.wait({})
            begun = True
        before = sent_nbytes(interface)
        start = time.perf_counter()
        loss = step(self, batches)
        seconds = time.perf_counter() - start
        seat.wait(
            {"seconds": seconds, "sent": sent_nbytes(interface) - before, "loss": float(loss),
             "tokens": self.share.global_batch}
        )  # fmt: skip
        return loss

    return around


def name_block(arguments: Sequence[str]) -> None:
    """Pass hybridcomp the block's path: torch's engines read no DeepSpeed file."""
    if "--engine" in arguments:
        config = arguments[arguments.index("--deepspeed_config") + 1]
        if "compression" in json.loads(Path(config).read_text()):
            os.environ["HYBRIDCOMP_CONFIG"] = config


def run(program: str, arguments: Sequence[str], wrap: Callable[[Step], Step]) -> int:
    """Run a training script with every trainer's ``step`` wrapped; return its exit status."""
    sys.argv = [program, *arguments]
    script = importlib.import_module(program)
    trainers: list[Any] = [importlib.import_module("gpt.torch_engines").TorchTrainer]
    if program == "benchmarks.train_peer":
        trainers.append(importlib.import_module("benchmarks.peers.trainer").PeerTrainer)
    else:
        loop = importlib.import_module("gpt.loop")
        trainers += [loop.PlainTrainer, loop.PipeTrainer]
    for trainer in trainers:
        trainer.step = wrap(trainer.step)
    status: int = script.main()
    return status


def main() -> int:
    """Train as a rank of the benchmark."""
    products = importlib.import_module("benchmarks.training_bench.products")
    if products.needed():
        products.install()
    if "--tp" not in sys.argv:  # megatron-core's layers all-reduce and accept no other function
        importlib.import_module("benchmarks.training_bench.ring").install()
    seat = turns.Seat()
    name_block(sys.argv)
    return run(sys.argv[1], sys.argv[2:], lambda step: watched(step, seat))


if __name__ == "__main__":
    sys.exit(main())
