"""Place the ranks of a training, and convert weights between layouts."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from gpt.errors import ParallelismError as ParallelismError
from gpt.weights import ModelConfig


def lay_out(tp: int, pp: int, tp2d: int = 1, cp: int = 1) -> Any:
    """Return DeepSpeed's topology with the groups of --tp or --tp2d, or None without these.

    Raises ParallelismError.
    """
    world_size = dist.get_world_size()
    if tp2d > 1:
        return mesh_of(tp2d, tp * pp * cp)
    if world_size % (tp * pp):
        raise ParallelismError(
            f"--tp {tp} --pp {pp}: expected a multiple of {tp * pp} ranks, found {world_size}; "
            "change --num_gpus"
        )
    if tp == 1:
        return None
    # Megatron overlaps the all-reduce of input gradients with matmuls only under this setting
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    try:
        from gpt import tensor_parallel
    except ImportError as error:
        raise ParallelismError(
            f"--tp {tp}: expected megatron-core, found none that can be imported ({error}); "
            "pip install 'megatron-core<0.20'"
        ) from None
    return tensor_parallel.start(tp, pp)


def mesh_of(tp2d: int, others: int) -> Any:
    """Return DeepSpeed's topology for --tp2d, and the mesh. Raises ParallelismError.

    ``others``: ranks of --tp, --pp and --cp.
    """
    world_size = dist.get_world_size()
    if others > 1 or world_size % tp2d**2:
        raise ParallelismError(
            f"--tp2d {tp2d}: expected a multiple of {tp2d**2} ranks and no --tp, --pp or --cp, "
            f"found {world_size} ranks and {others} for these three; change them"
        )
    return needing_hybridcomp("two_dimensional", f"--tp2d {tp2d}").start(tp2d)


def needing_hybridcomp(name: str, option: str) -> Any:
    """Return a module of ``gpt`` that imports hybridcomp. Raises ParallelismError without it."""
    try:
        return importlib.import_module(f"gpt.{name}")
    except ImportError as error:
        raise ParallelismError(
            f"{option}: expected hybridcomp, found none that can be imported ({error}); "
            "pip install -e . in the clone of hybridcomp"
        ) from None


def check(arguments: argparse.Namespace, settings: Mapping[str, Any]) -> None:
    """Raise ParallelismError for conflicting options, before building anything."""
    stage = settings.get("zero_optimization", {}).get("stage", 0)
    if arguments.tp2d > 1 and stage == 3:
        raise ParallelismError(
            f"--tp2d {arguments.tp2d}: expected zero_optimization.stage 0, 1 or 2, found 3; its "
            "layers hold parts already, which ZeRO 3 would cut again"
        )
    batch = settings.get("train_micro_batch_size_per_gpu")
    if isinstance(batch, int) and batch % arguments.tp2d:
        raise ParallelismError(
            f"--tp2d {arguments.tp2d}: expected a train_micro_batch_size_per_gpu that it divides, "
            f"found {batch}; change it"
        )
    if arguments.slices:
        check_slices(arguments, stage)
    if arguments.ask and (arguments.pp < 2 or arguments.engine != "deepspeed"):
        raise ParallelismError(
            "--ask: expected --pp of at least 2 and --engine deepspeed; leave it out"
        )
    asked = [name for name in ("weights_from", "weights_to") if getattr(arguments, name)]
    plain = arguments.tp * arguments.pp == 1 and arguments.engine == "deepspeed" and stage < 3
    if asked and not plain:
        raise ParallelismError(
            f"--{asked[0].replace('_', '-')}: expected --engine deepspeed, ZeRO 0, 1 or 2 and no "
            "--tp or --pp; leave it out"
        )


def check_slices(arguments: argparse.Namespace, stage: int) -> None:
    """Raise ParallelismError for options that conflict with token slices."""
    wrong = {
        "--pp of at least 2": arguments.pp < 2,
        "--engine deepspeed": arguments.engine != "deepspeed",
        "no --tp2d": arguments.tp2d > 1,
        "no --cp, which cuts the same tokens": arguments.cp > 1,
        "no --recompute, which would look at the keys of earlier slices twice": arguments.recompute,
        "no --tie-embeddings, whose weight the first and the last stage would have to share":
            arguments.tie_embeddings,
        "zero_optimization.stage 0, 1 or 2": stage > 2,
    }  # fmt: skip
    reasons = [name for name, is_wrong in wrong.items() if is_wrong]
    if reasons:
        raise ParallelismError(f"--slices {arguments.slices}: expected {'; '.join(reasons)}")
    token_slices().lengths_of(arguments.slices, arguments.length)


def token_slices() -> Any:
    """Return the module of --slices. Raises ParallelismError without hybridcomp."""
    return needing_hybridcomp("token_slices", "--slices")


def convert(arguments: argparse.Namespace, config: ModelConfig, model: Any, load: bool) -> None:
    """Read (--weights-from) or write (--weights-to) weights of the plain model; see ``check``."""
    path = arguments.weights_from if load else arguments.weights_to
    if path is None:
        return
    if config.tp2d > 1:
        from gpt import two_dimensional

        (two_dimensional.load_plain if load else two_dimensional.save_plain)(model, path)
    elif load:
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    elif dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)


def cut_sequences(cp: int, tp: int, pp: int, length: int) -> None:
    """Create the groups of --cp. Raises ParallelismError."""
    replicas = dist.get_world_size() // (tp * pp)
    if replicas % cp:
        raise ParallelismError(
            f"--cp {cp}: expected a multiple of {cp} replicas, found {replicas}; change --num_gpus"
        )
    if length % (2 * cp):
        raise ParallelismError(
            f"--cp {cp} --length {length}: expected a multiple of {2 * cp} tokens, two chunks a "
            "rank; change --length"
        )
    needing_hybridcomp("context_parallel", f"--cp {cp}").start(cp, tp, pp)


def numbers(text: str) -> tuple[int, ...]:
    """Parse comma-separated numbers; ``none``: an empty list. Raises ValueError for argparse."""
    return () if text == "none" else tuple(int(part) for part in text.split(","))


def segments(text: str) -> tuple[tuple[int, int], ...]:
    """Parse comma-separated blocks, ``2-4`` for three at once, to (first, stop) pairs.

    ``none``: no block. Raises ValueError for argparse.
    """
    found = []
    for part in () if text == "none" else text.split(","):
        first, _, last = part.partition("-")
        found.append((int(first), int(last or first) + 1))
    return tuple(found)


def check_numbers(arguments: argparse.Namespace) -> None:
    """Raise ParallelismError if --cuts or --recompute do not match the layers."""
    before = 0
    for start, stop in arguments.recompute:
        if not before <= start < stop <= arguments.layers:
            shown = f"{start}" if stop == start + 1 else f"{start}-{stop - 1}"
            raise ParallelismError(
                f"--recompute {shown}: expected a layer, {before} to {arguments.layers - 1}, in "
                "rising order"
            )
        before = stop
    cuts = arguments.cuts if arguments.pp > 1 else ()
    if cuts and (len(cuts) != arguments.pp or sum(cuts) != arguments.layers or min(cuts) < 0):
        raise ParallelismError(
            f"--cuts {','.join(map(str, cuts))}: expected {arguments.pp} numbers, one a stage of "
            f"--pp, {arguments.layers} layers together"
        )
