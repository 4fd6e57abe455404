#!/usr/bin/env python3
"""Train a small GPT with DeepSpeed, FSDP2 or DDP, configured by a DeepSpeed JSON file.

deepspeed --num_gpus 2 train_gpt.py --deepspeed_config configs/ds_zero1_baseline.json

--deepspeed_config sets precision, ZeRO, optimizer, learning rate schedule and batch sizes;
prepare_data.py writes the two datasets. With --pp N the model is a PipelineModule of N stages. With
--tp N megatron-core shards the layers over N ranks; with --tp2d Q hybridcomp shards them over Q x Q
ranks. Other ranks are replicas. With --cp N groups of N replicas share each sequence by
hybridcomp's ring attention. With --pp N --slices auto the pipeline runs slices of the sequences
instead of micro-batches.

torchrun --nproc-per-node 2 scripts/examples/train_gpt.py --engine fsdp2 --deepspeed_config FILE

trains the same model on the same data under torch's engines (--engine fsdp2, ddp, or hsdp: sharded
within a node, replicated across nodes). Batch sizes, AdamW, clipping, bf16 and schedule come from
the file, whose ZeRO settings are ignored. The log has the same format, so runs are comparable.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

if os.environ.get("DS_ACCELERATOR") == "cpu" or not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded: one core a rank

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

# import it before any process group exists: if DistributedDataParallel imports it later, its
# functions hold the group as a default argument, and gloo's threads outlive the interpreter
import torch.distributed.nn.functional
from deepspeed.accelerator import get_accelerator
from gpt import loop
from gpt.apex import fused_adam, what_is_apex
from gpt.data import both_parts
from gpt.ds_file import SettingsError, report_beside
from gpt.indexed import DatasetError
from gpt.layouts import (
    ParallelismError,
    check,
    check_numbers,
    convert,
    cut_sequences,
    lay_out,
    numbers,
    segments,
    token_slices,
)
from gpt.model import GPT, loss_of, pipeline
from gpt.weights import ModelConfig

#: user errors, reported in one line
MISTAKES = (
    DatasetError, ParallelismError, SettingsError, FileNotFoundError, json.JSONDecodeError,
)  # fmt: skip


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--local_rank", type=int, default=-1, help="set by the launcher")
    add("--engine", choices=("deepspeed", "fsdp2", "hsdp", "ddp"), default="deepspeed")
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
        help="tensor-parallel ranks; pip install 'megatron-core<0.20'")  # fmt: skip
    add("--tp2d", type=int, default=1, metavar="Q",
        help="tensor parallel in two dimensions, Q x Q ranks; needs hybridcomp")  # fmt: skip
    add("--pp", type=int, default=1, metavar="N", help="pipeline stages")
    add("--cp", type=int, default=1, metavar="N",
        help="context-parallel ranks, of the replicas; needs hybridcomp")  # fmt: skip
    add("--slices", default="none", metavar="auto|N|N,N,...",
        help="with --pp: token slices, chosen by their times, so many, or of these lengths; "
        "needs hybridcomp")  # fmt: skip
    add("--cuts", type=numbers, default=(), metavar="N,N,...",
        help="layers of each stage, as a plan has them (even in parameters)")  # fmt: skip
    add("--recompute", type=segments, default=(), metavar="N,N-N,...",
        help="layers, from 0, that run forward again in backward; N-N as one (none)")  # fmt: skip
    add("--lr", type=float, default=1e-3, help="only where the DeepSpeed file has no optimizer")
    add("--log", type=Path, metavar="FILE", help="JSON lines: loss and speed of every step")
    add("--print-every", type=int, default=10, metavar="N")
    add("--eval-every", type=int, default=0, metavar="N", help="0: only at the end")
    add("--eval-from", type=int, default=0, metavar="STEP", help="and not before this step")
    add("--eval-batches", type=int, default=8, metavar="N", help="0: never")
    add("--save", type=Path, metavar="FOLDER", help="checkpoint at the end")
    add("--save-every", type=int, default=0, metavar="N", help="and every N steps")
    add("--load", type=Path, metavar="FOLDER", help="go on from its latest checkpoint")
    add("--weights-from", type=Path, metavar="FILE",
        help="begin with the weights that --weights-to wrote, with or without --tp2d")  # fmt: skip
    add("--weights-to", type=Path, metavar="FILE", help="write the weights of the plain model")
    add("--ask", action="append", default=[], metavar="TEXT",
        help="with --pp: in the end go on with this text, in bytes; needs hybridcomp")  # fmt: skip
    add("--answer-tokens", type=int, default=64, metavar="N", help="of each answer to --ask")
    add("--temperature", type=float, default=0.8, help="of these answers")
    add("--wandb", metavar="PROJECT", help="log to W&B; WANDB_MODE=offline works")
    add("--wandb-group", metavar="GROUP")
    add("--wandb-name", metavar="NAME")
    deepspeed.add_config_arguments(parser)
    found = parser.parse_args(arguments)
    if found.deepspeed_config is None:
        parser.error("--deepspeed_config FILE is needed")
    for name in ("steps", "length", "tp", "tp2d", "pp", "cp", "print_every"):
        if getattr(found, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1")
    found.slices = "" if found.slices == "none" else found.slices  # as a plan writes it
    return found


def prepare_machine(seed: int) -> None:
    """Set up process group and seeds; on a CPU also avoid building unused kernels."""
    if get_accelerator().device_name() == "cpu":
        # otherwise init_distributed compiles shared-memory kernels for inference_all_reduce, a
        # minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    deepspeed.init_distributed(verbose=False)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def ds_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the DeepSpeed file as a dict, with W&B and the ledger's file from the command line."""
    settings: dict[str, Any] = json.loads(Path(arguments.deepspeed_config).read_text())
    if "sharding" in settings:  # of a plan, beside its file
        settings["sharding"] = str(Path(arguments.deepspeed_config).parent / settings["sharding"])
    report_beside(settings, arguments.log)
    if arguments.wandb:
        group = {"group": arguments.wandb_group} if arguments.wandb_group else {}
        settings["wandb"] = {"enabled": True, "project": arguments.wandb, **group}
        if arguments.wandb_name:
            os.environ["WANDB_NAME"] = arguments.wandb_name
    return settings


def torch_trainer(
    arguments: argparse.Namespace, settings: dict[str, Any], config: ModelConfig
) -> loop.Trainer:
    """Return the model under torch's engine. Raises ParallelismError, SettingsError."""
    from gpt.torch_engines import Engine, TorchTrainer

    if arguments.tp * arguments.pp * arguments.tp2d > 1:
        raise ParallelismError(
            f"--engine {arguments.engine}: expected --tp 1 --pp 1 --tp2d 1, found --tp "
            f"{arguments.tp} --pp {arguments.pp} --tp2d {arguments.tp2d}; leave them out, or use "
            "--engine deepspeed"
        )
    if arguments.wandb:
        raise SettingsError("--wandb: DeepSpeed's monitor logs; leave it out without DeepSpeed")
    model = GPT(config).to(get_accelerator().current_device_name())
    engine = Engine(arguments.engine, model, settings)
    return TorchTrainer(engine, loss_of(config), settings)


def build_engine(
    arguments: argparse.Namespace, settings: dict[str, Any], config: ModelConfig, topology: Any
) -> Any:
    """Pass model and optimizer to ``deepspeed.initialize``."""
    mpu = None
    if arguments.slices:
        model, mpu = token_slices().build(config, arguments, topology)
    elif arguments.pp > 1:
        cut = {"num_stages": arguments.pp} if topology is None else {"topology": topology}
        model = pipeline(config, arguments.cuts, **cut)
    else:
        model = GPT(config)
        convert(arguments, config, model, load=True)
        if topology is not None:
            from deepspeed.runtime.pipe.topology import PipelineParallelGrid

            mpu = PipelineParallelGrid(topology=topology)
    arguments.deepspeed_config = None  # DeepSpeed accepts either file or dict
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
    if topology is not None and config.tp > 1:
        from gpt.tensor_parallel import check_groups

        check_groups(engine.mpu)
    return engine


def run(arguments: argparse.Namespace) -> None:
    """Parse the command line, train and print the summary."""
    config_path, settings = arguments.deepspeed_config, ds_settings(arguments)
    check(arguments, settings)
    check_numbers(arguments)
    prepare_machine(arguments.seed)
    torch_engine = arguments.engine != "deepspeed"
    cuts = (arguments.tp, arguments.pp, arguments.tp2d, arguments.cp)
    topology = None if torch_engine else lay_out(*cuts)
    if arguments.cp > 1:
        cut_sequences(arguments.cp, arguments.tp, arguments.pp, arguments.length)
    samples, valid, vocabulary = both_parts(
        arguments.data, arguments.length, arguments.seed, arguments.eval_batches > 0
    )
    sizes = ("layers", "width", "heads", "norm", "seed", "tp", "tp2d", "cp", "recompute")
    config = ModelConfig(
        vocabulary,
        tied=arguments.tie_embeddings,
        **{name: getattr(arguments, name) for name in sizes},
    )
    trainer: loop.Trainer
    if torch_engine:
        trainer = torch_trainer(arguments, settings, config)
    elif arguments.slices:
        engine = build_engine(arguments, settings, config, topology)
        trainer = token_slices().trainer(engine, arguments)
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
        "tensor_parallel_2d": arguments.tp2d,
        "pipeline_stages": arguments.pp,
        "context_parallel": arguments.cp,
        **({"token_slices": trainer.engine.module.slices} if arguments.slices else {}),
        "tokens_per_step": trainer.share.global_batch * arguments.length,
        "apex": what_is_apex(),
    }
    plan = loop.Plan(**{key.name: getattr(arguments, key.name) for key in fields(loop.Plan)})
    log = loop.open_log(arguments.log, header, samples, config, settings, step)
    loop.train(trainer, samples, valid, plan, log, consumed)
    convert(arguments, config, getattr(trainer.engine, "module", None), load=False)
    if arguments.ask:
        from gpt import answers

        count, warmth = arguments.answer_tokens, arguments.temperature
        answers.show(trainer.engine, arguments.ask, count, warmth, arguments.seed)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Train; return the exit status: 1 for a user's mistake, reported in one line."""
    arguments = parse()
    try:
        run(arguments)
    except MISTAKES as error:
        print(f"train_gpt: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
