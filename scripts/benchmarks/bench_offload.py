#!/usr/bin/env python3
"""Compare ZeRO-Offload steps with native and with encoded copies over the bus, on one GPU.

``scripts/benchmarks/bench_offload.py`` takes two minutes. Native and encoded steps alternate on one
engine, so that noise affects both; ``device`` accumulates micro-batches on the device, ``host`` on
the host (``compression.offload.sums``). It prints the median of the paired ratios with a 95%
interval, the bytes, the time of the native bytes at the speed of a pinned copy
(compression cannot help where this is a small part of the step), and the decision of ``"when":
"auto"`` on a separate engine. Few tokens and several micro-batches (``--tokens``,
``--accumulation``) make a step bound by the bus.

The optimizer is DeepSpeed's CPUAdam where it builds within a minute, otherwise torch's AdamW.
``--device cpu`` is a smoke test: device and host share their memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from benchmarks.offload_bench import VARIANTS, say, show, summary
from benchmarks.offload_bench.engine import DEVICE, build, builds_cpu_adam
from benchmarks.shared import parser_of

#: defaults by device
SIZES = {
    "cuda": {"width": 4096, "tokens": 256, "turns": 6},
    "cpu": {"width": 128, "tokens": 32, "turns": 2},
}
BUILD_S = 60.0


def wait() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def bus_gbps(device: str) -> tuple[float, float]:
    """Return GB/s of pinned copies to the device and to the host, 256 MB, the best of five."""
    if device == "cpu":
        return float("inf"), float("inf")
    there = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    here = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    best = []
    for out, values in ((there, here), (here, there)):
        seconds = []
        for _ in range(5):
            wait()
            start = time.perf_counter()
            out.copy_(values, non_blocking=True)
            wait()
            seconds.append(time.perf_counter() - start)
        best.append(here.numel() / min(seconds) / 1e9)
    return best[0], best[1]


def train(engine: Any, values: Tensor, steps: int) -> None:
    """Train whole optimizer steps."""
    for _ in range(steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(values).float().square().mean())
        engine.step()


def inputs(engine: Any, arguments: argparse.Namespace) -> Tensor:
    """Return one micro-batch."""
    shape = arguments.tokens, arguments.width
    return torch.randn(shape, device=engine.device, dtype=torch.bfloat16)


def measure(engine: Any, arguments: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Return seconds per step of every turn by variant, and the bytes of the encoded variants."""
    import hybridcomp
    from hybridcomp.channels import channels_of
    from hybridcomp.patches.ds.offload.offload_accumulation import sums_of

    channels = channels_of(engine)
    assert channels is not None
    order, values = list(VARIANTS), inputs(engine, arguments)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    rows: dict[str, Any] = {}
    shuffler = random.Random(0)
    for turn in range(arguments.turns + 1):
        shuffler.shuffle(order)
        for name in order:
            hybridcomp.uninstall()
            if name != "native":
                hybridcomp.install()
                sums_of(engine.optimizer).on_device = name == "device"
            channels.ledger.restart()
            wait()
            start = time.perf_counter()
            train(engine, values, arguments.steps)
            wait()
            took = (time.perf_counter() - start) / arguments.steps
            if turn:  # the first is the warm-up: kernels are compiled, memory is pinned
                seconds[name].append(took)
            say(f"ZeRO {arguments.stage}, turn {turn}, {name}: {took * 1e3:.1f} ms a step")
            if name != "native":
                rows[name] = channels.ledger.rows(channels.ledger.interval)["offload"]
        if turn and time.perf_counter() > deadline:
            say("no time for more turns")
            break
    return {"seconds": seconds, "rows": rows}


def verdict(arguments: argparse.Namespace) -> dict[str, Any]:
    """Let an engine with ``"when": "auto"`` decide, then time a step."""
    from hybridcomp.channels import channels_of

    engine = build(arguments, when="auto")
    channels = channels_of(engine)
    assert channels is not None
    values, pace = inputs(engine, arguments), channels.host.pace
    train(engine, values, pace.length + 1)
    wait()
    start = time.perf_counter()
    train(engine, values, 3)
    wait()
    found = {"said": pace.describe(), "auto_ms": (time.perf_counter() - start) / 3 * 1e3}
    engine.destroy()
    return found


def parse() -> argparse.Namespace:
    """Parse the command line and fill in defaults by device."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--stages", type=int, nargs="+", choices=(1, 2, 3), default=[2, 3])
    add("--width", type=int, help="4096; on a CPU 128")
    add("--layers", type=int, default=2, help="2, which are 268 million parameters of width 4096")
    add("--tokens", type=int, help="of a micro-batch: 256; 32")
    add("--turns", type=int, help="at most: 6; 2")
    add("--accumulation", type=int, default=4, help="micro-batches of a step")
    add("--steps", type=int, default=2, help="of a turn")
    add("--optimizer", choices=("cpuadam", "adamw"), help="cpuadam where it builds, or adamw")
    add("--codec", default='{"codec": "blockint", "bits": 8}')
    add("--overlap", action="store_true", help="overlap_comm")
    add("--seconds", type=float, default=110, help="after which no turn begins")
    add("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "no CUDA device: this measures copies over the bus of a GPU; run it where there is "
            "one, or with --device cpu to see that it runs"
        )
    for name, value in (SIZES[arguments.device]).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def main() -> None:
    """Parse, measure, print."""
    begin = time.perf_counter()
    arguments = parse()
    os.environ[DEVICE] = arguments.device
    if arguments.optimizer is None:
        limit = min(BUILD_S, arguments.seconds / 2)
        arguments.optimizer = "cpuadam" if builds_cpu_adam(limit) else "adamw"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
        backend = "nccl" if arguments.device == "cuda" else "gloo"
        dist.init_process_group(backend, f"file://{folder}/store", rank=0, world_size=1)
        bus = bus_gbps(arguments.device)
        for index, stage in enumerate(arguments.stages):
            arguments.stage = stage
            say(f"ZeRO {stage}: building the engine ...")
            engine = build(arguments)
            spent = time.perf_counter() - begin
            share = (arguments.seconds - spent) / (len(arguments.stages) - index)
            deadline = time.perf_counter() + share / 2  # the other half is for auto
            rows.append(summary(measure(engine, arguments, deadline), engine, arguments, bus))
            show(rows[-1])
            engine.destroy()
            del engine
            gc.collect()
        for row in rows:
            arguments.stage = row["stage"]
            if time.perf_counter() - begin > arguments.seconds:
                say("no time for auto")
                break
            say(f"ZeRO {arguments.stage}: auto on an engine of its own ...")
            row["auto"] = found = verdict(arguments)
            print(f"ZeRO-{arguments.stage}, {found['said']}; {found['auto_ms']:.1f} ms then")
            gc.collect()
        dist.destroy_process_group()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
