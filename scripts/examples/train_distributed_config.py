#!/usr/bin/env python3
"""Hugging Face's Trainer over a model that transformers' DistributedConfig shards.

torchrun --nproc-per-node 2 scripts/examples/train_distributed_config.py \\
    --block scripts/examples/fsdp2.json
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from train_trainer import samples
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from hybridcomp.patches.trainers.hugging_face import HybridcompCallback


def pretrained(folder: Path) -> Path:
    """Save a small model on the first rank, in place of a pretrained model."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block", help='a block, or a file with one under "compression"')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", default="runs/distributed_config")
    arguments = parser.parse_args()
    settings = TrainingArguments(
        arguments.output, per_device_train_batch_size=8, max_steps=arguments.steps, logging_steps=5,
        learning_rate=1e-3, lr_scheduler_type="constant", save_strategy="no", disable_tqdm=True,
        report_to="none", use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    folder = pretrained(Path(arguments.output, "pretrained"))
    layout = DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]))
    model = LlamaForCausalLM.from_pretrained(folder, distributed_config=layout)
    trainer = Trainer(model, settings, train_dataset=samples(512, 256, 64))
    trainer.add_callback(HybridcompCallback(trainer, arguments.block))
    trainer.train()
    if trainer.is_world_process_zero():
        losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
        print(f"losses {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
