#!/usr/bin/env python3
"""TRL's SFTTrainer over DDP or FSDP2.

torchrun --nproc-per-node 2 scripts/examples/train_sft.py --block scripts/examples/ddp.json
torchrun --nproc-per-node 2 scripts/examples/train_sft.py --fsdp2 \\
    --block scripts/examples/fsdp2.json
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from on_cpu import accelerate_on_cpu
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from hybridcomp.patches.trainers.hugging_face import HybridcompCallback

NUMBERS = [str(number) for number in range(100)]


def tokenizer_of() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a word for every number, in place of a trained one."""
    words = ["<pad>", "<eos>", "<unk>", "and", "then", *NUMBERS]
    vocabulary = {word: place for place, word in enumerate(words)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def examples() -> Dataset:
    """Return questions and answers that count up."""
    return Dataset.from_list(
        [
            {
                "prompt": " ".join([*NUMBERS[start : start + 8], "and", "then"]),
                "completion": " " + " ".join(NUMBERS[start + 8 : start + 16]),
            }
            for start in range(80)
        ]
        * 8
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block", help='a block, or a file with one under "compression"')
    parser.add_argument("--fsdp2", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", default="runs/sft")
    parser.add_argument("--report-to", default="none", help="tensorboard, wandb, ...")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = tokenizer_of()
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    settings = SFTConfig(
        arguments.output, per_device_train_batch_size=8, max_steps=arguments.steps, logging_steps=5,
        learning_rate=3e-3, max_length=64, save_strategy="no", disable_tqdm=True, bf16=False,
        report_to=arguments.report_to, use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False, fsdp=arguments.fsdp2 or None,
        fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
    )  # fmt: skip
    if arguments.fsdp2:
        accelerate_on_cpu("fsdp")
    trainer = SFTTrainer(
        GPT2LMHeadModel(config), settings, train_dataset=examples(), processing_class=tokenizer
    )
    trainer.add_callback(HybridcompCallback(trainer, arguments.block))
    trainer.train()
    trainer.save_state()
    if trainer.is_world_process_zero():
        losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
        print(f"losses {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
