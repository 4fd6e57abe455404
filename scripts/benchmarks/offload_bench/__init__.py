"""Compute and print the figures of ``bench_offload.py``."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from typing import Any

import torch

from benchmarks.training_bench.report import speed_up

#: variants: native, and encoded with micro-batches accumulated on the device or on the host
VARIANTS = ("native", "device", "host")


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def per_step(rows: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return bytes and seconds of one step, by direction."""
    return {
        way: {
            "native_MB": row["raw_MB"] / steps, "sent_MB": row["wire_MB"] / steps,
            "codec": row["codec"], "codec_ms": row["codec_ms"] / steps,
            "wait_ms": row["wait_ms"] / steps,
        }
        for way, row in rows.items()
    }  # fmt: skip


def summary(
    found: dict[str, Any], engine: Any, arguments: argparse.Namespace, bus: tuple[float, float]
) -> dict[str, Any]:
    """Return the figures of one run, for its JSON: times, bytes and ratios are per step."""
    seconds = found["seconds"]
    native = statistics.median(seconds["native"])
    variants = {}
    for name in VARIANTS[1:]:
        pairs = [a / b for a, b in zip(seconds["native"], seconds[name], strict=True)]
        variants[name] = {
            "ms": statistics.median(seconds[name]) * 1e3, **speed_up(pairs),
            "moved": per_step(found["rows"][name], arguments.steps),
        }  # fmt: skip
    moved = variants["device"]["moved"]
    to_device, to_host = bus
    up, down = moved["forward"]["native_MB"], moved["backward"]["native_MB"]
    return {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "stage": arguments.stage, "optimizer": arguments.optimizer, "codec": arguments.codec,
        "accumulation": arguments.accumulation, "tokens": arguments.tokens,
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()),
        "native_ms": native * 1e3, "variants": variants, "turns": len(seconds["native"]),
        "bus_GBps": {"to_device": to_device, "to_host": to_host},
        # native accumulation on the host sends micro-batches in both directions; count all of
        # them at the slower speed
        "bus_share_of_native": (up / to_device + down / min(bus)) / 1e3 / native,
        "load": os.getloadavg()[0], "threads": torch.get_num_threads(),
    }  # fmt: skip


def show(row: dict[str, Any]) -> None:
    """Print one run."""
    print(
        f"{row['device']}, ZeRO-{row['stage']}, {row['parameters'] / 1e6:.1f} M parameters in "
        f"bf16, {row['accumulation']} micro-batches of {row['tokens']} tokens, "
        f"{row['optimizer']} on {row['threads']} threads, load {row['load']:.1f}"
    )
    share = row["bus_share_of_native"]
    print(
        f"native {row['native_ms']:.1f} ms a step, of which {share:.0%} are its bytes at the speed "
        f"of the bus ({min(row['bus_GBps'].values()):.0f} GB/s)"
    )
    names = {"forward": "parameters to the device", "backward": "gradients to the host"}
    for name, found in row["variants"].items():
        print(
            f"{f'sums on the {name}':20} {found['ms']:8.1f} ms, faster by {found['speed_up']:.3f}x "
            f"[{found['low']:.3f}, {found['high']:.3f}]"
        )
        for way, moved in found["moved"].items():
            ratio = moved["native_MB"] / moved["sent_MB"]
            print(
                f"  {names[way]:24} {moved['codec']:18} {moved['native_MB']:8.1f} MB natively, "
                f"{moved['sent_MB']:7.1f} sent, {ratio:5.2f}x, codec {moved['codec_ms']:6.1f} ms, "
                f"wait {moved['wait_ms']:6.1f} ms"
            )
    sys.stdout.flush()
