#!/usr/bin/env python3
"""Hugging Face's Trainer over DDP; the block is named by HYBRIDCOMP_CONFIG, no line is about it.

HYBRIDCOMP_CONFIG=scripts/examples/ddp.json torchrun --nproc-per-node 2 -m hybridcomp.run \\
    scripts/examples/train_trainer.py
"""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def samples(count: int, vocabulary: int, length: int) -> list[dict[str, torch.Tensor]]:
    """Counting sequences with random beginnings, in the place of a dataset."""
    starts = torch.randint(0, vocabulary, (count, 1), generator=torch.Generator().manual_seed(0))
    rows = (starts + torch.arange(length)) % vocabulary
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", default="runs/trainer")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4)
    settings = TrainingArguments(
        arguments.output,
        per_device_train_batch_size=8,
        max_steps=arguments.steps,
        logging_steps=5,
        learning_rate=1e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(GPT2LMHeadModel(config), settings, train_dataset=samples(512, 256, 64))
    result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"final loss {result.training_loss:.4f} (mean of {arguments.steps} steps)")


if __name__ == "__main__":
    main()
