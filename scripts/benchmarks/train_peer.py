#!/usr/bin/env python3
"""Train the example GPT with another method of compressed data parallelism, for comparisons.

deepspeed --num_gpus 2 scripts/benchmarks/train_peer.py --method sdp4bit \\
    --deepspeed_config configs/ds_zero1_baseline.json --log runs/sdp4bit/loss.jsonl

Model, data and their order, seeds, batch sizes, AdamW, clipping and learning rate schedule are
those of train_gpt.py with the same file, whose ZeRO and "compression" settings are ignored:
--method chooses the communication. Log and ledger.jsonl have the same format. It uses NCCL if
DS_ACCELERATOR is cuda, otherwise gloo on CPUs. With --engine fsdp2 or ddp only the gradient
reduction differs from train_gpt.py --engine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded: one core a rank

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))  # gpt, train_gpt

from gpt import loop
from gpt.data import Share, both_parts
from gpt.ds_file import SettingsError, adam_of, scheduler_of
from gpt.indexed import DatasetError
from gpt.model import GPT, lm_loss
from gpt.weights import ModelConfig

from benchmarks.peers import hooks
from benchmarks.peers.methods import PEERS, Peer, Settings
from benchmarks.peers.torch_engines import METHODS, CountedTrainer, Native, engine_of
from benchmarks.peers.trainer import PeerTrainer
from benchmarks.peers.wire import Wire
from benchmarks.shared import parser_of


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--method", required=True, metavar="NAME")
    add("--engine", choices=list(METHODS), help="torch's own, as train_gpt.py has it")
    add("--per-node", type=int, default=1, metavar="N",
        help="consecutive ranks to a node, for the schemes in two levels")  # fmt: skip
    add("--start", type=int, metavar="N", help="native steps before; default: as advised")
    add("--deepspeed_config", required=True, metavar="FILE")
    add("--local_rank", type=int, default=-1, help="set by the launcher")
    add("--data", type=Path, default=Path("data/text"), metavar="PREFIX")
    add("--steps", type=int, default=300)
    add("--seed", type=int, default=0, help="of weights and data order")
    for name, default in (("layers", 4), ("width", 128), ("heads", 4), ("length", 128)):
        add(f"--{name}", type=int, default=default)
    add("--log", type=Path, metavar="FILE", help="JSON lines: loss and speed of every step")
    add("--print-every", type=int, default=10, metavar="N")
    add("--eval-batches", type=int, default=8, metavar="N", help="0: never")
    found = parser.parse_args(arguments)
    known = METHODS[found.engine] if found.engine else PEERS
    if found.method not in known:
        parser.error(f"--method {found.method}: expected one of {', '.join(known)}")
    return found


def under_engine(
    arguments: argparse.Namespace, settings: dict[str, Any], model: GPT
) -> tuple[Native, CountedTrainer]:
    """Return the method, and the model under torch's engine."""
    method = METHODS[arguments.engine][arguments.method]
    start = arguments.start or hooks.start_iteration(arguments.steps)
    engine = engine_of(arguments.engine, method, model, settings, start)
    return method, CountedTrainer(engine, lm_loss, settings)


def by_itself(
    arguments: argparse.Namespace, settings: dict[str, Any], model: GPT
) -> tuple[Peer, PeerTrainer]:
    """Return the method, and the model in its parameters' dtype."""
    device = next(model.parameters()).device
    if settings.get("bf16", {}).get("enabled"):
        model = model.to(torch.bfloat16)
    peer, wire = PEERS[arguments.method], Wire()
    method = peer.make(
        model, wire, Settings(
            per_node=arguments.per_node,
            clip=float(settings.get("gradient_clipping", 0.0)), adam=adam_of(settings),
        ),
    )  # fmt: skip
    share = Share(
        rank=dist.get_rank(), world_size=dist.get_world_size(),
        micro_batch=settings["train_micro_batch_size_per_gpu"],
        micro_batches=settings.get("gradient_accumulation_steps", 1),
    )  # fmt: skip
    scheduler = scheduler_of(settings, method.optimizer)
    return peer, PeerTrainer(method, wire, share, lm_loss, scheduler, device)


def run(arguments: argparse.Namespace) -> None:
    """Parse the command line, train and print the summary."""
    settings = json.loads(Path(arguments.deepspeed_config).read_text())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    device = torch.device("cuda" if os.environ.get("DS_ACCELERATOR") == "cuda" else "cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(arguments.seed)
    samples, valid, vocabulary = both_parts(
        arguments.data, arguments.length, arguments.seed, arguments.eval_batches > 0
    )
    config = ModelConfig(
        vocabulary, arguments.layers, arguments.width, arguments.heads, seed=arguments.seed
    )
    build = under_engine if arguments.engine else by_itself
    peer, trainer = build(arguments, settings, GPT(config).to(device))
    share = trainer.share
    header = {
        "deepspeed_config": arguments.deepspeed_config,
        "seed": arguments.seed,
        "world_size": share.world_size,
        "tensor_parallel": 1,
        "pipeline_stages": 1,
        "tokens_per_step": share.global_batch * arguments.length,
        "engine": arguments.engine,
        "peer": arguments.method,
        "what": peer.what + (" (reimplementation)" if isinstance(peer, Peer) else ""),
        "source": peer.source,
    }
    log = loop.open_log(arguments.log, header, samples, config, settings)
    plan = loop.Plan(
        steps=arguments.steps, length=arguments.length, print_every=arguments.print_every,
        eval_every=0, eval_batches=arguments.eval_batches, save=None, save_every=0,
    )  # fmt: skip
    loop.train(trainer, samples, valid, plan, log, 0)
    if arguments.log:
        trainer.write_ledger(arguments.log.with_name("ledger.jsonl"), arguments.method)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Train; return the exit status: 1 for a user's mistake, reported in one line."""
    try:
        run(parse())
    except (DatasetError, SettingsError, FileNotFoundError, json.JSONDecodeError) as error:
        print(f"train_peer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
