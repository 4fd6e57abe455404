"""Layouts, arms and model sizes that are measured on one GPU."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import one_gpu
from benchmarks.training_bench import cells
from benchmarks.training_bench.cells import LAYOUTS, REFERENCE, Arm
from benchmarks.training_bench.spec import Spec

#: native with truncated messages: the step time without a wire
COMPUTE = "compute"
LOSSLESS = {name: {"codec": "expcode"} for name in ("dp", "zero", "tp", "pp")}
#: arms that are not measured: training is in bf16
LEFT_OUT = ("native fp32",)
#: elements; the default of 500 million would allocate a gigabyte on every rank
BUCKETS = {"reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000}
#: arms of every layout, before the others
FIRST = (REFERENCE, COMPUTE, "recommended", "recommended when auto", "bound", "lossless", "delta")
#: layouts measured with all ranks on one GPU, the most informative first
MEASURED = (
    "zero1", "zero2", "tp2", "pp2", "fsdp2", "ddp", "dp2", "zero3", "dp2pp2", "tp2pp2",
    "asymmetric", "3d", "hpz",
)  # fmt: skip
#: sizes of the models; heads are 64 wide
SIZES = {
    "tiny": (2, 128, 64, 1),
    "4M": (4, 256, 512, 4),
    "85M": (12, 768, 1024, 4),
    "350M": (28, 1024, 1024, 2),
}  # layers, width, length, samples of a micro-batch


@dataclass(frozen=True)
class Options:
    """Command line options that cells use."""

    size: str
    data: Path
    folder: Path  # for logs and settings
    gpu: bool
    seed: int = 0
    device: str = ""  # name, for the records


def arms_of(layout: str, chosen: list[str] | None = None) -> list[Arm]:
    """Return the reference, the arm without a wire, ours, then peers; ``chosen`` selects.

    Raises ValueError for an unknown name.
    """
    dimensions = LAYOUTS[layout].dimensions
    left_out = [*LEFT_OUT, *_the_same(dimensions)]
    found = [arm for arm in cells.arms_of(layout) if arm.name not in left_out and arm.bf16]
    if layout not in ("dp2", "ddp"):
        found = [arm for arm in found if arm.peer is None]
    block = {name: value for name, value in LOSSLESS.items() if name in dimensions}
    found[1:1] = [Arm(COMPUTE), Arm("lossless", block=tuple(block.items()))]
    # arms that are compared with each other run at once
    found.sort(key=lambda arm: FIRST.index(arm.name) if arm.name in FIRST else len(FIRST))
    if chosen is None:
        return found
    known = {arm.name: arm for arm in found}
    for name in chosen:
        if name not in known:
            raise ValueError(f"{layout}: no arm {name!r}; expected some of {', '.join(known)}")
    return [arm for arm in found if arm.name in (REFERENCE, COMPUTE, *chosen)]


def _the_same(dimensions: tuple[str, ...]) -> list[str]:
    """Return presets that equal another preset if a job has these dimensions only."""
    if dimensions == ("dp",):
        return ["mzhybrid", "zhybrid"]  # naive-zfp
    return [] if "dp" in dimensions else ["mzhybrid"]  # naive-mpc


def settings_of(layout: str, arm: Arm, size: str) -> dict[str, Any]:
    """Return an arm's DeepSpeed settings: bf16, buckets of 100 MB, fused AdamW."""
    settings = cells.native_settings(layout)
    batch = SIZES[size][3]
    accumulated = settings.get("gradient_accumulation_steps", 1)
    settings["train_micro_batch_size_per_gpu"] = max(1, batch // 2) if accumulated > 1 else batch
    settings["steps_per_print"] = 10**9  # the ledger is read at the end
    settings["bf16"] = {"enabled": True}
    settings["zero_optimization"] = {
        "stage": settings["zero_optimization"]["stage"], **BUCKETS,
        **dict(LAYOUTS[layout].zero), **dict(arm.zero),
    }  # fmt: skip
    settings["optimizer"]["params"]["fused"] = True
    if arm.block is not None:
        settings["compression"] = dict(arm.block)
    return settings


def specs_of(layout: str, arm: Arm, steps: int, port: int, options: Options) -> list[Spec]:
    """Write an arm's settings and return the specs of its ranks."""
    place = LAYOUTS[layout]
    layers, width, length, _ = SIZES[options.size]
    stem = options.folder / f"{layout}.{arm.stem}"
    config = stem.with_name(f"{stem.name}.json")
    config.write_text(json.dumps(settings_of(layout, arm, options.size)))
    arguments = [
        "--deepspeed_config", str(config), "--data", str(options.data), "--seed",
        str(options.seed), "--layers", str(layers), "--width", str(width), "--heads",
        str(max(2, width // 64)), "--length", str(length), "--steps", str(steps),
        "--eval-batches", "0", "--print-every", str(steps), *place.arguments,
    ]  # fmt: skip
    program = "train_gpt"
    if arm.peer is not None:
        program = "benchmarks.train_peer"
        arguments += ["--method", arm.peer, "--per-node", str(place.per_node), "--start", "2"]
    ranks, device = place.nodes * place.per_node, "cuda" if options.gpu else "cpu"
    first = Spec(
        0, program, tuple(arguments), arm.block is not None, {}, "", arm.name == REFERENCE
    )  # fmt: skip
    return [
        replace(
            first, rank=rank, log=f"{stem}.{rank}.log",
            env=one_gpu.environment(
                rank, ranks, per_node=place.per_node, port=port, device=device
            ),
        )
        for rank in range(ranks)
    ]  # fmt: skip
