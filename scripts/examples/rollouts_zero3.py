#!/usr/bin/env python3
"""Loop over generation and training: DeepSpeed trains, another model generates.

torchrun --standalone --nproc-per-node 2 scripts/examples/rollouts_zero3.py
torchrun --standalone --nproc-per-node 2 scripts/examples/rollouts_zero3.py --stage 1
torchrun --standalone --nproc-per-node 2 scripts/examples/rollouts_zero3.py --engine verl
torchrun --standalone --nproc-per-node 1 scripts/examples/rollouts_zero3.py --engine vllm

Each round publishes the weights, loads them into the generating model, rewards its output and
trains one step; it prints how long generation paused. ``--engine verl`` sends weights through
verl's registry as its actors and rollouts do. ``--engine vllm`` needs a GPU that fits both models.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import deepspeed
import torch
import torch.distributed as dist
from on_cpu import deepspeed_on_cpu
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import hybridcomp

WORDS, LENGTH, PROMPTS = 64, 12, 32


class Rollout(Protocol):
    """A model that generates with published weights; only rank 0 has one.

    Attributes:
        pause_s: seconds that generation paused for the last update.
    """

    pause_s: float

    def update(self) -> int:
        """Load the version that ``publish`` has just written; return its number."""

    def generate(self, prompts: Tensor) -> Tensor:
        """Return prompts with their completions, 1 + LENGTH tokens per row."""


class Transformers:
    """A model of transformers on this host."""

    def __init__(self, config: LlamaConfig, source: str) -> None:
        from hybridcomp.inference.module_follower import ModuleFollower

        self.model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        self.follower = ModuleFollower(self.model, source)

    def update(self) -> int:
        self.follower.update()
        assert self.follower.version is not None
        self.pause_s = self.follower.pause_s
        return self.follower.version

    @torch.no_grad()
    def generate(self, prompts: Tensor) -> Tensor:
        found: Tensor = self.model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0,
            min_new_tokens=LENGTH, max_new_tokens=LENGTH, pad_token_id=0,
        )  # fmt: skip
        return found


class Verl(Transformers):
    """A model of transformers that receives weights as verl's rollout workers do."""

    def __init__(self, config: LlamaConfig, source: str) -> None:
        self.model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        self.receives = verl_engine(source)
        self.receives.init_process_group(is_rollout=True)
        self.version = 0

    def update(self) -> int:
        asyncio.run(self._receive())
        self.receives.init_process_group(is_rollout=True)  # verl calls it before each sync
        self.version += 1
        return self.version

    async def _receive(self) -> None:
        mine = {name: one.detach() for name, one in self.model.named_parameters()}
        begun = None
        async for name, tensor in self.receives.receive_weights():
            begun = begun or time.perf_counter()
            mine[name].copy_(tensor)
        assert begun is not None
        self.pause_s = time.perf_counter() - begun


class VerlPublisher:
    """Publishes from all ranks as verl's actors do: from an export that yields whole tensors."""

    def __init__(self, engine: Any, source: str) -> None:
        self.engine, self.sends = engine, verl_engine(source)
        self.sends.init_process_group(is_rollout=False)
        self.close = self.sends.finalize

    def publish(self) -> Any:
        asyncio.run(self.sends.send_weights(self._export()))
        return self.sends.summary

    def _export(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, parameter.detach()


def verl_engine(source: str) -> Any:
    """Return the engine that verl creates for ``checkpoint_engine.backend: hybridcomp``."""
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    import hybridcomp.inference.verl_engine  # noqa: F401  # as custom_backend_module

    return CheckpointEngineRegistry.new("hybridcomp", bucket_size=1 << 20, to=source)


class VLLM:
    """A vLLM engine in this process, notified of each version through its own requests."""

    def __init__(self, config: LlamaConfig, source: str, folder: Path) -> None:
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
        self.llm = LLM(
            str(folder), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True,
            gpu_memory_utilization=0.3,
            weight_transfer_config=WeightTransferConfig(backend="hybridcomp"),
        )  # fmt: skip
        self.llm.init_weight_transfer_engine({"init_info": {"source": source}})
        self.version = 0

    def update(self) -> int:
        self.version += 1
        begun = time.perf_counter()
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"version": self.version}})
        self.llm.finish_weight_update(weight_version=str(self.version))
        self.llm.reset_prefix_cache()  # its keys and values belong to the previous version
        self.pause_s = time.perf_counter() - begun
        return self.version

    def generate(self, prompts: Tensor) -> Tensor:
        from vllm import SamplingParams

        wanted = SamplingParams(
            min_tokens=LENGTH, max_tokens=LENGTH, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": row} for row in prompts.tolist()]
        found = self.llm.generate(asked, wanted, use_tqdm=False)
        return torch.tensor([[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in found])


def rewards(tokens: Tensor) -> Tensor:
    """Return 1 for each generated token that is even, else 0."""
    return 1.0 - (tokens[:, 1:] % 2).float()


def train_step(engine: Any, tokens: Tensor, advantages: Tensor) -> None:
    """Raise the likelihood of tokens with a high advantage: a step of REINFORCE."""
    logits = engine(input_ids=tokens).logits[:, :-1].float()
    chosen = logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)
    engine.backward(-(advantages * chosen).mean())
    engine.step()


def same_bits(rollout: Transformers, engine: Any) -> bool:
    """Return whether generating and trained model are bit-identical; collective."""
    found = dict(rollout.model.named_parameters()) if rollout else {}
    equal = True
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            if found:
                here = found[name].detach().view(torch.int16)
                equal &= torch.equal(here, parameter.detach().cpu().view(torch.int16))
    return equal


def engine_of(config: LlamaConfig, stage: int, lr: float) -> Any:
    """Return the training engine, in bf16."""
    settings = {
        "train_micro_batch_size_per_gpu": PROMPTS,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=settings
    )
    return engine


def rollout_of(arguments: argparse.Namespace, config: LlamaConfig, source: str) -> Rollout | None:
    """Return the generating model, on rank 0."""
    if dist.get_rank():
        return None
    if arguments.engine == "verl":
        return Verl(config, source)
    if arguments.engine == "vllm":
        return VLLM(config, source, Path(arguments.output, "model").absolute())
    return Transformers(config, source)


def one_round(engine: Any, publisher: Any, rollout: Rollout | None) -> tuple[float, Any]:
    """Publish, load, generate on rank 0, train on all; return the mean reward and a summary."""
    told = publisher.publish()
    tokens = torch.zeros(PROMPTS, 1 + LENGTH, dtype=torch.int64)
    if rollout is not None:
        assert rollout.update() == told.version
        tokens = rollout.generate(torch.randint(1, WORDS // 2, (PROMPTS, 1))).cpu()
    tokens = tokens.to(engine.device)
    dist.broadcast(tokens, 0)
    gained = rewards(tokens)
    train_step(engine, tokens, (gained - gained.mean()) / (gained.std() + 1e-6))
    return gained.mean().item(), told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--engine", choices=("transformers", "verl", "vllm"), default="transformers"
    )
    parser.add_argument("--stage", type=int, default=3, help="of ZeRO")
    parser.add_argument("--lr", type=float, default=3e-3, help="1e-6, as in RL: few weights move")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", default="runs/rollouts", help="a folder that is not there yet")
    parser.add_argument("--local_rank", type=int, help="as launchers of DeepSpeed say it")
    arguments = parser.parse_args()
    deepspeed_on_cpu()
    deepspeed.init_distributed()
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    source = Path(arguments.output, "weights").absolute().as_uri()
    engine = engine_of(config, arguments.stage, arguments.lr)
    publisher: Any = (
        VerlPublisher(engine, source)
        if arguments.engine == "verl"
        else hybridcomp.publish(engine, source)
    )
    rollout = rollout_of(arguments, config, source)
    gained = []
    for _ in range(arguments.rounds):
        reward, told = one_round(engine, publisher, rollout)
        gained.append(reward)
        if rollout is not None:
            print(
                f"version {told.version}: reward {reward:.3f}, {told.changed_share:.1%} of the "
                f"weights changed, {told.bits_per_weight:.2f} bits a weight, generation stood "
                f"still for {1e3 * rollout.pause_s:.1f} ms"
            )
    told = publisher.publish()
    if rollout is not None:
        rollout.update()
    equal = arguments.engine == "vllm" or same_bits(rollout, engine)  # type: ignore[arg-type]
    if dist.get_rank() == 0:
        print(f"rewards {gained[0]:.3f} to {gained[-1]:.3f}, version {told.version}, "
              f"weights equal bit by bit: {'yes' if equal else 'no'}")  # fmt: skip
    publisher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
