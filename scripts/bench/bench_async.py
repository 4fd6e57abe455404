#!/usr/bin/env python3
"""Time a pipeline of DeepSpeed with and without a flush, one rank a stage, on the links of a lab.

    python scripts/netlab.py --layout 4 --rate 100mbit -- python scripts/bench/bench_async.py

A stage is one layer whose passes take --forward and twice --forward seconds: it sleeps so long, as
a device would compute, so that stages do not share the cores of this machine. Activations and
gradients are (--batch, --width) in fp32 and travel for real. All cases run in the same processes,
in turns; the table has the median seconds of a step and its ratio to the flush.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

#: name -> block
CASES: dict[str, dict[str, Any]] = {
    "flush": {"preset": "none"},
    "2 versions": {"preset": "none", "pipeline": {"versions": 2}},
    "stash": {"preset": "none", "pipeline": {"versions": "stash"}},
    "stash, slack 1": {"preset": "none", "pipeline": {"versions": "stash", "slack": 1}},
    "flush, 8 bits": {"pp": {"codec": "blockint", "bits": 8}, "min_bytes": 0},
    "2 versions, 8 bits": {
        "pp": {"codec": "blockint", "bits": 8}, "min_bytes": 0, "pipeline": {"versions": 2},
    },
}  # fmt: skip


class Pause(torch.autograd.Function):
    """Hand values on after some seconds, and gradients after twice as many."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        """Sleep."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Sleep twice as long."""
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class Stage(nn.Module):
    """A scale for each column, and the time of a large layer."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.scale, self.seconds = nn.Parameter(torch.ones(width)), seconds

    def forward(self, values: Tensor) -> Tensor:
        """Scale, and take the time."""
        found: Any = Pause.apply(values * self.scale, self.seconds)  # type: ignore[no-untyped-call]
        return torch.as_tensor(found)


def data(batch: int, width: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same micro-batch again and again."""
    values = torch.randn(batch, width, generator=torch.Generator().manual_seed(0))
    while True:
        yield values, values.flip(0)


def make_engine(args: argparse.Namespace, block: dict[str, Any], stages: int) -> Any:
    """Make the engine of one case."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    model = PipelineModule(
        [LayerSpec(Stage, args.width, args.forward) for _ in range(stages)],
        num_stages=stages,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.micro_batches,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "compression": {**block, "ledger": {"sample_every": 0, "every": 10**9}},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    return engine


def waited(engine: Any) -> float:
    """Return the seconds that this stage has waited for messages, 0 with a flush."""
    from hybridcomp.patches.ds.pipe import PIPE

    pipe = getattr(engine, PIPE)
    return 0.0 if pipe.waitless is None else float(pipe.waitless.posts.waited_s)


def time_case(args: argparse.Namespace, block: dict[str, Any], stages: int) -> tuple[float, float]:
    """Return the median seconds of a step, and the seconds a step that this stage waited."""
    engine, batches = make_engine(args, block, stages), data(args.batch, args.width)
    for _ in range(2):
        engine.train_batch(batches)
    times, before = [], waited(engine)
    for _ in range(args.steps):
        start = time.perf_counter()
        engine.train_batch(batches)
        times.append(time.perf_counter() - start)
    wait = (waited(engine) - before) / args.steps
    engine.destroy()
    return statistics.median(times), wait


def main(argv: Sequence[str] | None = None) -> None:
    """Time all cases and print the table on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--forward", type=float, default=0.05, help="seconds")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    args = parser.parse_args(argv)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

    import deepspeed
    import torch.distributed as dist

    import hybridcomp

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes a minute
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    hybridcomp.install()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in args.cases}
    for _ in range(args.rounds):
        for name in args.cases:
            found[name].append(time_case(args, CASES[name], dist.get_world_size()))
    if dist.get_rank() == 0:
        kib = args.batch * args.width * 4 / 1024
        ideal = 3 * args.forward * args.micro_batches
        print(f"messages of {kib:.0f} KiB, passes of {ideal:.3f} s a step", flush=True)
        base = min(seconds for seconds, _ in found[args.cases[0]])
        for name, rows in found.items():
            seconds, wait = min(rows)
            print(
                f"{name:20} {seconds:7.3f} s a step  {base / seconds:5.2f} x  first stage waits "
                f"{wait:.3f} s  busy {ideal / seconds:4.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
