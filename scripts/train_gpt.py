#!/usr/bin/env python3
"""Train a small GPT with DeepSpeed, or under torch's FSDP2 or DDP, by one DeepSpeed JSON file.

deepspeed --num_gpus 2 scripts/train_gpt.py --deepspeed_config configs/ds_zero1_baseline.json

Precision, ZeRO, optimizer, learning rate schedule, batch sizes: --deepspeed_config. Data: two
datasets written by scripts/prepare_data.py. With --pp N the model is a PipelineModule of N stages,
with --tp N megatron-core cuts its layers over N ranks; the ranks that are left are replicas. With
--cp N every N replicas share their sequences, by the ring attention of hybridcomp.

torchrun --nproc-per-node 2 scripts/train_gpt.py --engine fsdp2 --deepspeed_config FILE

trains the same model on the same data in torch's own engine (--engine fsdp2 or ddp): batch sizes,
AdamW, clipping, bf16 and the schedule are the file's, ZeRO in it is not looked at. The log is the
same, so runs of two engines can be compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if os.environ.get("DS_ACCELERATOR") == "cpu" or not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded: one core a rank

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from gpt import loop
from gpt.apex import fused_adam, what_is_apex
from gpt.data import Samples
from gpt.ds_file import SettingsError
from gpt.indexed import DatasetError, IndexedTokens
from gpt.model import GPT, loss_of, pipeline
from gpt.weights import ModelConfig


class ParallelismError(ValueError):
    """Ranks or packages that --tp, --pp and --cp need are not there."""


#: what a user can get wrong: told in one line
MISTAKES = (
    DatasetError, ParallelismError, SettingsError, FileNotFoundError, json.JSONDecodeError,
)  # fmt: skip


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--local_rank", type=int, default=-1, help="set by the launcher")
    add("--engine", choices=("deepspeed", "fsdp2", "ddp"), default="deepspeed")
    add("--data", type=Path, default=Path("data/text"), metavar="PREFIX",
        help="of PREFIX_train.bin/.idx and PREFIX_valid.bin/.idx")  # fmt: skip
    add("--steps", type=int, default=300, help="optimizer steps, those of --load included")
    add("--seed", type=int, default=0, help="of weights and data order")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--length", type=int, default=128, help="tokens of one sample")
    add("--norm", choices=("rmsnorm", "layernorm"), default="rmsnorm")
    add("--tie-embeddings", action="store_true", help="one weight for embedding and output")
    add("--tp", type=int, default=1, metavar="N",
        help="tensor-parallel ranks; pip install 'hybridcomp[megatron]'")  # fmt: skip
    add("--pp", type=int, default=1, metavar="N", help="pipeline stages")
    add("--cp", type=int, default=1, metavar="N",
        help="context-parallel ranks, of the replicas; needs hybridcomp")  # fmt: skip
    add("--lr", type=float, default=1e-3, help="only where the DeepSpeed file has no optimizer")
    add("--log", type=Path, metavar="FILE", help="JSON lines: loss and speed of every step")
    add("--print-every", type=int, default=10, metavar="N")
    add("--eval-every", type=int, default=0, metavar="N", help="0: only at the end")
    add("--eval-batches", type=int, default=8, metavar="N", help="0: never")
    add("--save", type=Path, metavar="FOLDER", help="checkpoint at the end")
    add("--save-every", type=int, default=0, metavar="N", help="and every N steps")
    add("--load", type=Path, metavar="FOLDER", help="go on from its latest checkpoint")
    add("--wandb", metavar="PROJECT", help="log to W&B; WANDB_MODE=offline works")
    add("--wandb-group", metavar="GROUP")
    add("--wandb-name", metavar="NAME")
    deepspeed.add_config_arguments(parser)
    found = parser.parse_args(arguments)
    if found.deepspeed_config is None:
        parser.error("--deepspeed_config FILE is needed")
    for name in ("steps", "length", "tp", "pp", "cp", "print_every"):
        if getattr(found, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1")
    return found


def prepare_machine(seed: int) -> None:
    """Process group, seeds, and on a CPU: no build of kernels that training never uses."""
    if get_accelerator().device_name() == "cpu":
        # else init_distributed compiles shared-memory kernels, a minute, for inference_all_reduce
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    deepspeed.init_distributed(verbose=False)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def ds_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The DeepSpeed file as a dict, with W&B switched on where the command line says so."""
    settings: dict[str, Any] = json.loads(Path(arguments.deepspeed_config).read_text())
    if arguments.wandb:
        group = {"group": arguments.wandb_group} if arguments.wandb_group else {}
        settings["wandb"] = {"enabled": True, "project": arguments.wandb, **group}
        if arguments.wandb_name:
            os.environ["WANDB_NAME"] = arguments.wandb_name
    return settings


def lay_out(tp: int, pp: int) -> Any:
    """DeepSpeed's topology of the ranks and megatron-core's groups; None without --tp.

    Raises ParallelismError.
    """
    world_size = dist.get_world_size()
    if world_size % (tp * pp):
        raise ParallelismError(
            f"--tp {tp} --pp {pp}: expected a multiple of {tp * pp} ranks, found {world_size}; "
            "change --num_gpus"
        )
    if tp == 1:
        return None
    # Megatron overlaps the all-reduce of input gradients with matrix products on this condition
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    try:
        from gpt import tensor_parallel
    except ImportError as error:
        raise ParallelismError(
            f"--tp {tp}: expected megatron-core, found none that can be imported ({error}); "
            "pip install 'hybridcomp[megatron]'"
        ) from None
    return tensor_parallel.start(tp, pp)


def cut_sequences(cp: int, tp: int, pp: int, length: int) -> None:
    """Make the groups of --cp. Raises ParallelismError."""
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
    try:
        from gpt import context_parallel
    except ImportError as error:
        raise ParallelismError(
            f"--cp {cp}: expected hybridcomp, found none that can be imported ({error}); "
            "pip install hybridcomp"
        ) from None
    context_parallel.start(cp, tp, pp)


def torch_trainer(
    arguments: argparse.Namespace, settings: dict[str, Any], config: ModelConfig
) -> loop.Trainer:
    """The model under torch's own engine. Raises ParallelismError, SettingsError."""
    from gpt.torch_engines import Engine, TorchTrainer

    if arguments.tp * arguments.pp > 1:
        raise ParallelismError(
            f"--engine {arguments.engine}: expected --tp 1 --pp 1, found --tp {arguments.tp} "
            f"--pp {arguments.pp}; leave them out, or use --engine deepspeed"
        )
    if arguments.wandb:
        raise SettingsError("--wandb: DeepSpeed's monitor logs; leave it out without DeepSpeed")
    model = GPT(config).to(get_accelerator().current_device_name())
    engine = Engine(arguments.engine, model, settings)
    return TorchTrainer(engine, loss_of(config), settings)


def build_engine(
    arguments: argparse.Namespace, settings: dict[str, Any], config: ModelConfig, topology: Any
) -> Any:
    """Model and optimizer, given to ``deepspeed.initialize``."""
    mpu = None
    if arguments.pp > 1:
        cut = {"num_stages": arguments.pp} if topology is None else {"topology": topology}
        model = pipeline(config, **cut)
    else:
        model = GPT(config)
        if topology is not None:
            from gpt.tensor_parallel import grid

            mpu = grid(topology)
    arguments.deepspeed_config = None  # DeepSpeed takes one or the other
    optimizer = None
    if "optimizer" not in settings:
        adam = fused_adam() or torch.optim.AdamW
        optimizer = adam(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)
    engine, *_ = deepspeed.initialize(
        args=arguments,
        model=model,
        model_parameters=list(model.parameters()),
        optimizer=optimizer,
        mpu=mpu,
        config=settings,
    )
    if topology is not None:
        from gpt.tensor_parallel import check_groups

        check_groups(engine.mpu)
    return engine


def run(arguments: argparse.Namespace) -> None:
    """Everything between the command line and the summary."""
    prepare_machine(arguments.seed)
    torch_engine = arguments.engine != "deepspeed"
    topology = None if torch_engine else lay_out(arguments.tp, arguments.pp)
    if arguments.cp > 1:
        cut_sequences(arguments.cp, arguments.tp, arguments.pp, arguments.length)
    folder, name = arguments.data.parent, arguments.data.name
    samples = Samples(IndexedTokens(folder / f"{name}_train"), arguments.length, arguments.seed)
    valid = None
    if arguments.eval_batches:
        valid = Samples(IndexedTokens(folder / f"{name}_valid"), arguments.length, 0)
    vocabulary = max(s.vocabulary for s in (samples, valid) if s is not None)
    config_path, settings = arguments.deepspeed_config, ds_settings(arguments)
    config = ModelConfig(
        vocabulary=vocabulary,
        layers=arguments.layers,
        width=arguments.width,
        heads=arguments.heads,
        norm=arguments.norm,
        tied=arguments.tie_embeddings,
        seed=arguments.seed,
        tp=arguments.tp,
        cp=arguments.cp,
    )
    trainer: loop.Trainer
    if torch_engine:
        trainer = torch_trainer(arguments, settings, config)
    elif arguments.pp > 1:
        trainer = loop.PipeTrainer(build_engine(arguments, settings, config, topology))
    else:
        engine = build_engine(arguments, settings, config, topology)
        trainer = loop.PlainTrainer(engine, loss_of(config))
    if arguments.cp > 1:
        from gpt.context_parallel import share

        trainer.share = share(trainer.share)
    step, consumed = loop.load(trainer.engine, arguments.load) if arguments.load else (0, 0)
    header = {
        "deepspeed_config": config_path,
        "engine": arguments.engine,
        "seed": arguments.seed,
        "world_size": dist.get_world_size(),
        "tensor_parallel": arguments.tp,
        "pipeline_stages": arguments.pp,
        "context_parallel": arguments.cp,
        "tokens_per_step": trainer.share.global_batch * arguments.length,
        "apex": what_is_apex(),
    }
    first = dist.get_rank() == 0
    if first:
        print(f"run {header}", flush=True)
    header |= loop.identity(samples, config, settings)
    loop.describe_run(header)
    plan = loop.Plan(
        steps=arguments.steps,
        length=arguments.length,
        print_every=arguments.print_every,
        eval_every=arguments.eval_every,
        eval_batches=arguments.eval_batches,
        save=arguments.save,
        save_every=arguments.save_every,
    )
    log = loop.Log(arguments.log if first else None, header, step)
    loop.train(trainer, samples, valid, plan, log, consumed)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Returns the exit status: 1 for a mistake of the user's, told in one line."""
    arguments = parse()
    try:
        run(arguments)
    except MISTAKES as error:
        print(f"train_gpt: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
