#!/usr/bin/env python3
"""TRL's GRPOTrainer on ZeRO 3, with completions by a model that follows published weights.

torchrun --standalone --nproc-per-node 2 scripts/examples/rollouts_grpo.py

TRL would gather every parameter to generate or to send to vLLM. Here each rank publishes its shard
to a folder, from which the generating model loads the changes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from on_cpu import accelerate_on_cpu
from train_sft import NUMBERS, tokenizer_of
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

import hybridcomp
from hybridcomp.inference.module_follower import ModuleFollower

LENGTH = 12


class PublishedRollouts:
    """TRL's ``rollout_func``: publish, follow and generate, on every rank."""

    def __init__(self, config: LlamaConfig, source: str) -> None:
        self.source = source
        self.model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        self.follower = ModuleFollower(self.model, source)
        self.publisher: Any = None  # the engine exists once training has begun

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        if self.publisher is None:
            self.publisher = hybridcomp.publish(trainer.model_wrapped, self.source)
        told = self.publisher.publish()
        self.follower.update(told.version)
        if trainer.is_world_process_zero():
            paused = f"generation stood still for {1e3 * self.follower.pause_s:.1f} ms"
            print(f"version {told.version}: {told.bits_per_weight:.2f} bits a weight, {paused}")
        return self.generate(trainer.processing_class(prompts)["input_ids"])

    @torch.no_grad()
    def generate(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Return tokens and log-probabilities; all prompts have the same length."""
        asked = torch.tensor(prompts)
        tokens = self.model.generate(
            asked, attention_mask=torch.ones_like(asked), do_sample=True, top_k=0,
            min_new_tokens=LENGTH, max_new_tokens=LENGTH, pad_token_id=0,
        )  # fmt: skip
        places = tokens[:, asked.shape[1] :, None]
        logits = self.model(tokens).logits[:, asked.shape[1] - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(2, places).squeeze(2)
        return {
            "prompt_ids": prompts,
            "completion_ids": places.squeeze(2).tolist(),
            "logprobs": chosen.tolist(),
        }


def evens(completions: list[str], **_: Any) -> list[float]:
    """Reward the share of even numbers."""
    rows = [text.split() for text in completions]
    return [sum(word.isdigit() and int(word) % 2 == 0 for word in row) / LENGTH for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", default="runs/grpo", help="of the trainer, and of the versions")
    parser.add_argument("--local_rank", type=int, help="as launchers of DeepSpeed say it")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = tokenizer_of()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    settings = GRPOConfig(
        arguments.output, per_device_train_batch_size=16, num_generations=8, logging_steps=1,
        max_steps=arguments.steps, max_completion_length=LENGTH, learning_rate=1e-2, bf16=True,
        lr_scheduler_type="constant", save_strategy="no", report_to="none", disable_tqdm=True,
        gradient_checkpointing=False,
        use_cpu=not torch.cuda.is_available(),
        deepspeed=str(Path(__file__).with_name("rollouts_zero3.json")),
    )  # fmt: skip
    accelerate_on_cpu("deepspeed")
    source = Path(arguments.output, "weights").absolute().as_uri()
    prompts = Dataset.from_list([{"prompt": f"{number} 0 and"} for number in NUMBERS])
    trainer = GRPOTrainer(
        LlamaForCausalLM(config), evens, settings, train_dataset=prompts,
        processing_class=tokenizer, rollout_func=PublishedRollouts(config, source),
    )  # fmt: skip
    trainer.train()
    if trainer.is_world_process_zero():
        gained = [one["reward"] for one in trainer.state.log_history if "reward" in one]
        print(f"rewards {gained[0]:.3f} to {gained[-1]:.3f}")


if __name__ == "__main__":
    main()
