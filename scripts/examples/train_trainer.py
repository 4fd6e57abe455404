#!/usr/bin/env python3
"""Hugging Face's Trainer over DDP, FSDP2 or DeepSpeed.

torchrun --nproc-per-node 2 scripts/examples/train_trainer.py --block scripts/examples/ddp.json
torchrun --nproc-per-node 2 scripts/examples/train_trainer.py --fsdp2 \\
    --block scripts/examples/fsdp2.json
DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 -m hybridcomp.run \\
    scripts/examples/train_trainer.py --deepspeed scripts/examples/zero.json
"""

from __future__ import annotations

import argparse

import torch
from on_cpu import accelerate_on_cpu, deepspeed_on_cpu
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from hybridcomp.patches.trainers.hugging_face import HybridcompCallback


def samples(count: int, vocabulary: int, length: int) -> list[dict[str, torch.Tensor]]:
    """Return counting sequences from random starts, in place of a dataset."""
    starts = torch.randint(0, vocabulary, (count, 1), generator=torch.Generator().manual_seed(0))
    rows = (starts + torch.arange(length)) % vocabulary
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block", help='a block, or a file with one under "compression"')
    parser.add_argument("--fsdp2", action="store_true")
    parser.add_argument("--deepspeed", help="a DeepSpeed file, which holds the block")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", default="runs/trainer")
    parser.add_argument("--report-to", default="none", help="tensorboard, wandb, ...")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    settings = TrainingArguments(
        arguments.output, per_device_train_batch_size=8, max_steps=arguments.steps, logging_steps=5,
        learning_rate=1e-3, lr_scheduler_type="constant", save_steps=10, disable_tqdm=True,
        report_to=arguments.report_to, use_cpu=not torch.cuda.is_available(),
        deepspeed=arguments.deepspeed, fsdp=arguments.fsdp2 or None,
        fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
    )  # fmt: skip
    if arguments.fsdp2:
        accelerate_on_cpu("fsdp")
    if arguments.deepspeed:
        deepspeed_on_cpu()
    trainer = Trainer(GPT2LMHeadModel(config), settings, train_dataset=samples(512, 256, 64))
    trainer.add_callback(HybridcompCallback(trainer, arguments.block))
    trainer.train(resume_from_checkpoint=arguments.resume)
    trainer.save_state()  # trainer_state.json: losses and the ledger's figures
    if trainer.is_world_process_zero():
        losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
        print(f"losses {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
