#!/usr/bin/env python3
"""ZeRO-Offload on one GPU: steps with native copies over the bus against encoded ones.

One command: ``scripts/bench_offload.py``. Native and encoded steps take turns on one engine, so
that noise of the machine hits both; printed are the median of the paired ratios with a 95%
bootstrap interval, the bytes, and what the native bytes alone would take at the speed of a pinned
copy in the same run: where that is a small part of the step, compression cannot help. Few tokens
and several micro-batches make a step bound by the bus; ``--tokens`` and ``--accumulation`` set
them.

``--device cpu`` only shows that it runs: device and host are the same memory there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

#: what is not written, by device
SIZES = {
    "cuda": {"width": 4096, "layers": 12, "tokens": 256, "turns": 10},
    "cpu": {"width": 128, "layers": 2, "tokens": 32, "turns": 2},
}
VARIANTS = ("native", "encoded")


class Block(nn.Module):
    """8 x width^2 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(tokens, width) to (tokens, width)."""
        result: Tensor = hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        return result


def build(arguments: argparse.Namespace) -> Any:
    """An engine with its optimizer on the host; no kernel of DeepSpeed has to be compiled."""
    import deepspeed
    import deepspeed.ops

    import hybridcomp

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    hybridcomp.install()
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = nn.Sequential(*(Block(arguments.width) for _ in range(arguments.layers)))
    model.bfloat16()
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(parameters, 1e-4, fused=True)
        if arguments.optimizer == "adamw"
        else torch.optim.SGD(parameters, 1e-4, foreach=False)
    )
    codec = json.loads(arguments.codec)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": arguments.accumulation,
        "zero_optimization": {
            "stage": arguments.stage, "offload_optimizer": {"device": "cpu"},
            "overlap_comm": arguments.overlap,
        },
        "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True}, "steps_per_print": 10**9,
        "compression": {"offload": codec, "ledger": {"sample_every": 0}},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def waiter(device: str) -> Callable[[], None]:
    """A function that waits for the device."""
    cuda: Any = torch.cuda
    return cuda.synchronize if device == "cuda" else lambda: None


def bus_gbps(device: str) -> tuple[float, float]:
    """GB/s of pinned copies to the device and to the host, 256 MB, the best of five."""
    if device == "cpu":
        return float("inf"), float("inf")
    there = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    here = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    wait, best = waiter(device), []
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


def measure(engine: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds a step of every turn, by variant, and the bytes of the encoded ones."""
    import hybridcomp
    from hybridcomp.channels import channels_of

    channels = channels_of(engine)
    assert channels is not None
    wait, order = waiter(arguments.device), list(VARIANTS)
    values = torch.randn(
        arguments.tokens, arguments.width, device=engine.device, dtype=torch.bfloat16
    )
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    shuffler = random.Random(0)
    for turn in range(arguments.turns + 1):
        shuffler.shuffle(order)
        for name in order:
            hybridcomp.uninstall()
            if name == "encoded":
                hybridcomp.install()
            channels.ledger.restart()
            wait()
            start = time.perf_counter()
            for _ in range(arguments.steps * arguments.accumulation):
                engine.backward(engine(values).float().square().mean())
                engine.step()
            wait()
            if turn:  # the first is the warm-up: kernels are compiled, memory is pinned
                seconds[name].append((time.perf_counter() - start) / arguments.steps)
            if name == "encoded":
                rows = channels.ledger.rows(channels.ledger.interval)["offload"]
    return {"seconds": seconds, "rows": rows}


def interval(ratios: list[float]) -> tuple[float, float]:
    """95% bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def summary(
    found: dict[str, Any], engine: Any, arguments: argparse.Namespace, bus: tuple[float, float]
) -> dict[str, Any]:
    """The figures of one run, a step each; seconds, bytes."""
    seconds, rows = found["seconds"], found["rows"]
    ratios = [a / b for a, b in zip(seconds["native"], seconds["encoded"], strict=True)]
    low, high = interval(ratios)
    moved = {
        way: {
            "native_MB": row["raw_MB"] / arguments.steps,
            "sent_MB": row["wire_MB"] / arguments.steps,
            "codec": row["codec"], "codec_ms": row["codec_ms"] / arguments.steps,
            "wait_ms": row["wait_ms"] / arguments.steps,
        }
        for way, row in rows.items()
    }  # fmt: skip
    to_device, to_host = bus
    up, down = moved["forward"]["native_MB"], moved["backward"]["native_MB"]
    native = statistics.median(seconds["native"])
    return {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "stage": arguments.stage, "optimizer": arguments.optimizer, "codec": arguments.codec,
        "accumulation": arguments.accumulation, "tokens": arguments.tokens,
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()),
        "native_ms": native * 1e3, "encoded_ms": statistics.median(seconds["encoded"]) * 1e3,
        "speedup": statistics.median(ratios), "speedup_low": low, "speedup_high": high,
        "bus_GBps": {"to_device": to_device, "to_host": to_host},
        # sums of micro-batches travel both ways natively; all of it is counted at the slower speed
        "bus_share_of_native": (up / to_device + down / min(bus)) / 1e3 / native,
        "moved": moved, "load": os.getloadavg()[0], "threads": torch.get_num_threads(),
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    """Print one run."""
    print(
        f"{row['device']}, ZeRO-{row['stage']}, {row['parameters'] / 1e6:.1f} M parameters in "
        f"bf16, {row['accumulation']} micro-batches of {row['tokens']} tokens, "
        f"{row['optimizer']} on {row['threads']} threads, load {row['load']:.1f}"
    )
    print(
        f"step  native {row['native_ms']:.1f} ms  encoded {row['encoded_ms']:.1f} ms  "
        f"faster by {row['speedup']:.3f}x [{row['speedup_low']:.3f}, {row['speedup_high']:.3f}]"
    )
    share = row["bus_share_of_native"]
    print(f"native bytes at the speed of the bus: {share:.0%} of a native step")
    print(
        f"{'direction':24} {'codec':20} {'native MB':>10} {'sent MB':>9} {'ratio':>6} "
        f"{'codec ms':>8} {'wait ms':>7}"
    )
    names = {"forward": "parameters to the device", "backward": "gradients to the host"}
    for way, moved in row["moved"].items():
        ratio = moved["native_MB"] / moved["sent_MB"]
        print(
            f"{names[way]:24} {moved['codec']:20} {moved['native_MB']:10.2f} "
            f"{moved['sent_MB']:9.2f} {ratio:6.2f} {moved['codec_ms']:8.1f} {moved['wait_ms']:7.1f}"
        )


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--stages", type=int, nargs="+", choices=(1, 2, 3), default=[2, 3])
    parser.add_argument("--width", type=int, help="4096; on a CPU 128")
    parser.add_argument("--layers", type=int, help="12, which are 1.6 billion parameters; 2")
    parser.add_argument("--tokens", type=int, help="of a micro-batch: 256; 32")
    parser.add_argument("--turns", type=int, help="10; 2")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--codec", default='{"codec": "blockint", "bits": 8}')
    parser.add_argument("--overlap", action="store_true", help="overlap_comm")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "no CUDA device: this measures copies over the bus of a GPU; run it where there is "
            "one, or with --device cpu to see that it runs"
        )
    for name, value in (SIZES[arguments.device]).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1",
            "DS_ACCELERATOR": arguments.device, "TORCH_EXTENSIONS_DIR": f"{folder}/ext",
        }  # fmt: skip
        backend = "nccl" if arguments.device == "cuda" else "gloo"
        dist.init_process_group(backend, f"file://{folder}/store", rank=0, world_size=1)
        bus = bus_gbps(arguments.device)
        for stage in arguments.stages:
            arguments.stage = stage
            engine = build(arguments)
            rows.append(summary(measure(engine, arguments), engine, arguments, bus))
            show(rows[-1])
            engine.destroy()
            del engine
            gc.collect()
        dist.destroy_process_group()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
