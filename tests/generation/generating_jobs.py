"""Small generating pipelines for tests: the example's GPT, whole and sharded over ranks."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.paths import ROOT

VOCAB, WIDTH, HEADS, LAYERS = 61, 32, 4, 4


def example() -> None:
    """Make the example's modules importable."""
    folder = str(ROOT / "scripts" / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)


def config(tp: int = 1, tied: bool = False) -> Any:
    """Return the model's size."""
    example()
    from gpt.weights import ModelConfig

    return ModelConfig(VOCAB, LAYERS, WIDTH, HEADS, tied=tied, tp=tp)


def prompts(count: int, longest: int = 24, seed: int = 0) -> list[list[int]]:
    """Random prompts of random lengths."""
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def sharpen(layers: Any) -> None:
    """Scale a fresh model's logits to the spread of a trained one's."""
    with torch.no_grad():
        for layer in layers:
            for weight in layer.parameters():  # once each, also if two layers share it
                if weight.dim() > 1:
                    weight.mul_(6.0)


def engine(tp: int = 1, pp: int = 1, block: Any = None, tied: bool = False, **given: Any) -> Any:
    """Build a DeepSpeed engine around a pipeline of the model; ``given``: config keys."""
    import deepspeed

    from tests.training.in_turn import start_deepspeed

    start_deepspeed()
    sizes = config(tp, tied)
    from gpt import tensor_parallel
    from gpt.model import pipeline

    topology = tensor_parallel.start(tp, pp) if tp > 1 else None
    cut = {"topology": topology} if topology is not None else {"num_stages": pp}
    module = pipeline(sizes, **cut)
    sharpen([module])
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "steps_per_print": 10**9,
        **given,
    }
    if block is not None:
        settings["compression"] = block
    built, *_ = deepspeed.initialize(model=module, config=settings)
    return built


def whole_model(tied: bool = False) -> Any:
    """Return the same model unsharded."""
    sizes = config(tied=tied)
    from gpt.model import GPT

    model = GPT(sizes)
    sharpen([model])
    return model.eval()


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], tokens: int) -> tuple[list[int], Tensor]:
    """Answer by full passes over all tokens so far; return the answer and its logits (n, V)."""
    ids, rows = list(prompt), []
    for _ in range(tokens):
        rows.append(model(torch.tensor([ids]))[0, -1])
        ids.append(int(rows[-1].argmax()))
    return ids[len(prompt) :], torch.stack(rows)


class Tokenizer:
    """Stand-in for a tokenizer of so many tokens."""

    def __init__(self, size: int = VOCAB, pad: int | None = 0, eos: Any = 3) -> None:
        self.size, self.pad_token_id, self.eos_token_id = size, pad, eos

    def __len__(self) -> int:
        return self.size


class Recording:
    """A picker that records all logits, by sequence."""

    def __init__(self, sampling: Any) -> None:
        self.sampling = sampling
        self.logits: dict[int, list[Tensor]] = {}

    def __call__(self, passed: Any, logits: Tensor) -> Any:
        for part, row in zip(passed.parts, logits, strict=True):
            self.logits.setdefault(part.sequence, []).append(row)
        return self.sampling(passed, logits)


def settle(engine: Any, **settings: Any) -> Any:
    """Return the engine's stage with settings of the block's ``generate``."""
    from hybridcomp.patches.generating import stage_of

    stage = stage_of(engine)
    return replace(stage, settings=stage.settings.model_copy(update=settings))


def refused(call: Callable[[], object]) -> str:
    """Return class and text of a call's error."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def digest(tensor: Tensor) -> str:
    """Hash the bytes."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(bytes(data.tolist())).hexdigest()[:16]
