"""Tensors of a training step of the example GPT, one of each class that travels.

The model trains on the sources of Python's standard library, cut into words: with a vocabulary of
4096 most rows of the embedding's gradient are zero, as in real models.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from gpt.model import GPT, Block, lm_loss
from gpt.weights import ModelConfig
from prepare_data import standard_library

VOCABULARY = 4096
SAMPLES, LENGTH = 8, 128
#: values of a tensor that are kept
KEPT = 2**18


def read_words(limit: int = 4_000_000) -> Tensor:
    """Token numbers of the first ``limit`` characters; 0 is every word beyond the vocabulary."""
    text, size = [], 0
    for file in standard_library():
        text.append(Path(file).read_text(errors="replace"))
        size += len(text[-1])
        if size >= limit:
            break
    words = re.findall(r"\w+|\s+|[^\w\s]", "".join(text))
    common = Counter(words).most_common(VOCABULARY - 1)
    numbers = {word: number for number, (word, _) in enumerate(common, start=1)}
    return torch.tensor([numbers.get(word, 0) for word in words])


def batches(tokens: Tensor, seed: int) -> Iterator[Tensor]:
    """Random stretches of LENGTH + 1 tokens, (SAMPLES, LENGTH + 1), for ever."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - LENGTH - 1, (SAMPLES,), generator=generator)
        yield torch.stack([tokens[start : start + LENGTH + 1] for start in starts.tolist()])


class Watch:
    """Keeps what goes through one block: outputs by name, with their gradients."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.outputs: dict[str, Tensor] = {}
        for name, module in (("block", block), *block.named_children()):
            module.register_forward_hook(lambda _, __, out, name=name: self._keep(name, out))

    def _keep(self, name: str, out: Tensor) -> None:
        if out.requires_grad:
            out.retain_grad()
            self.outputs[name] = out


def _with_outliers(values: Tensor) -> Tensor:
    """Three channels thirty times as large: what large models' activations look like."""
    spiked = values.clone()
    spiked[..., [3, 77, 200]] *= 30
    return spiked


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _weight(block: Block, name: str) -> Tensor:
    """The weight of one of the block's layers, which tensor parallelism would have replaced."""
    layer = getattr(block, name)
    assert isinstance(layer, torch.nn.Linear)
    return layer.weight


def _take(model: GPT, watch: Watch, before: dict[str, Tensor]) -> dict[str, Tensor]:
    block = watch.block
    seen = watch.outputs
    _, key, value = seen["qkv"].chunk(3, dim=-1)
    embedding, output = model.layers[0].weight, model.layers[-1].weight
    assert isinstance(embedding, Tensor) and isinstance(output, Tensor)
    gelu = F.gelu(seen["up"])
    half = gelu.shape[-1] // 2
    return {
        "grad up": _gradient(_weight(block, "up")),
        "grad down": _gradient(_weight(block, "down")),
        "grad qkv": _gradient(_weight(block, "qkv")),
        "grad head": _gradient(output),
        "grad embed": _gradient(embedding),
        "act": seen["block"],
        "act grad": _gradient(seen["block"]),
        "tp partial": gelu[..., :half] @ _weight(block, "down")[:, :half].T,
        "gelu": gelu,
        "K": key,
        "V": value,
        "param": _weight(block, "up"),
        "delta": _weight(block, "up") - before["up"],
        "act+outlier": _with_outliers(seen["block"]),
    }


def capture(
    steps: int, seed: int = 0, layers: int = 4, width: int = 256
) -> tuple[dict[str, Tensor], float]:
    """Train ``steps`` steps; the tensors of the last one, flat fp32, and its loss.

    Most are taken of a block in the middle.
    """
    torch.manual_seed(seed)
    model = GPT(ModelConfig(vocabulary=VOCABULARY, layers=layers, width=width, heads=8))
    block = model.layers[layers // 2]
    assert isinstance(block, Block)
    watch = Watch(block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    stream = batches(read_words(), seed)
    for _ in range(steps):
        rows = next(stream)
        before = {"up": _weight(block, "up").detach().clone()}
        optimizer.zero_grad()
        loss = lm_loss(model(rows[:, :-1]), rows[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    taken = _take(model, watch, before)
    flat = {name: values.detach().float().reshape(-1) for name, values in taken.items()}
    kept = {name: values[:KEPT].clone() for name, values in flat.items()}
    # the rows of frequent words come first; all of it is what travels
    kept["grad embed"] = flat["grad embed"].clone()
    return kept, float(loss.detach())
