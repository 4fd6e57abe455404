#!/usr/bin/env python3
"""Gaps in loss by levels of 4 bits: two ranks under DDP, ZeRO 1 and FSDP2, all in one process.

    python bench_levels.py --data data/text --seeds 0 48 --out levels.jsonl

A seed that --out has is not trained again. Trainings of a seed differ in what they send only, so
their models are stacked: native and each engine with each spacing take one pass. The codec is
hybridcomp's, on the blocks of 32 that the engines send: under DDP two ranks add both decoded
gradients, under ZeRO 1 and FSDP2 the owner's own to the other's decoded one, and compute with
parameters decoded from 8 bits (preset `recommended`). A test holds it against the engines. The
learning rate rises over 20 steps, stays, and falls to zero over the last three tenths; losses are
of a part of the validation text, before and after that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))  # gpt

from gpt.data import Samples
from gpt.indexed import IndexedTokens
from gpt.model import GPT, rotary_table
from gpt.weights import ModelConfig

from hybridcomp.codecs.blockint import BlockInt
from hybridcomp.tools.compare.statistics import half_width

BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.1
WARM_UP, COOL_DOWN = 20, 0.3
#: part of the validation text, in batches of so many samples
PART, BATCH = 0.25, 16
EIGHT = BlockInt(8)


@dataclass(frozen=True)
class Arm:
    """One training of a seed. ``codec``: of the gradients; None: native."""

    engine: str
    levels: str = ""
    codec: BlockInt | None = None

    def __str__(self) -> str:
        return f"{self.engine}:{self.levels}" if self.levels else self.engine


ENGINES = ("ddp", "zero1", "fsdp2")
ARMS = (
    Arm("native"),
    *(
        Arm(engine, levels, BlockInt(4, levels=levels))
        for engine in ENGINES
        for levels in ("uniform", "lloyd")
    ),
)


def through(codec: BlockInt, values: Tensor) -> Tensor:
    """Encode and decode ``values``, contiguous fp32."""
    flat = values.reshape(-1)
    payload = torch.empty(codec.wire_nbytes(flat.numel(), flat.dtype), dtype=torch.uint8)
    decoded = torch.empty_like(flat)
    codec.decode(payload[: codec.encode(flat, payload)], decoded)
    return decoded.view_as(values)


class Parts:
    """Where the parameters of a model lie in a flat tensor of all, and which rank owns what."""

    def __init__(self, model: GPT) -> None:
        self.named = dict(model.named_parameters())
        numels = [p.numel() for p in self.named.values()]
        assert not any(numel % 64 for numel in numels), "a rank's half is a number of blocks"
        self.edges = list(itertools.pairwise([0, *itertools.accumulate(numels)]))
        self.numel = sum(numels)
        self.of_first = torch.zeros(self.numel, dtype=torch.bool)  # FSDP2: half of each parameter
        for low, high in self.edges:
            self.of_first[low : (low + high) // 2] = True
        self.native = slice(*self.edges[-2])  # the last norm: under FSDP2 a small message, native

    def seen(self, arm: Arm, weights: Tensor, step: int) -> Tensor:
        """Return the weights that a step of ``arm`` computes with; ZeRO 1 gathers after a step."""
        if arm.engine == "fsdp2":
            gathered = through(EIGHT, weights)
            gathered[self.native] = weights[self.native]
            return gathered
        return through(EIGHT, weights) if arm.engine == "zero1" and step else weights

    def average(self, arm: Arm, grads: Tensor) -> Tensor:
        """Return the mean of both ranks' gradients (2, numel) as the engine computes it."""
        if arm.codec is not None:
            sent = through(arm.codec, grads)
            if arm.engine == "fsdp2":
                sent[:, self.native] = grads[:, self.native]
                sent[0] = torch.where(self.of_first, grads[0], sent[0])
                sent[1] = torch.where(self.of_first, sent[1], grads[1])
            elif arm.engine == "zero1":
                half = self.numel // 2
                sent[0, :half], sent[1, half:] = grads[0, :half], grads[1, half:]
            grads = sent
        return (grads[0] + grads[1]) * 0.5


class Stack:
    """A training of one seed for each of ``ARMS``, stacked along the first dimension.

    Args:
        model: the start of all of them.
        samples: of the training text.
        micro: samples of a rank in a step.
        steps, rate: of the schedule.
    """

    def __init__(
        self, model: GPT, heads: int, samples: Samples, micro: int, steps: int, rate: float
    ) -> None:
        self.parts, self.heads = Parts(model), heads
        self.samples, self.micro, self.steps, self.rate, self.step = samples, micro, steps, rate, 0
        start = torch.cat([p.detach().flatten() for p in self.parts.named.values()])
        self.weights = start.repeat(len(ARMS), 1)
        self.moments = torch.zeros(2, *self.weights.shape)
        # a leaf for each parameter and rank: a slice's gradient would be zeros around it
        self.leaves = {
            name: torch.empty(2 * len(ARMS), *p.shape).requires_grad_()
            for name, p in self.parts.named.items()
        }

    def train(self) -> list[float]:
        """Make one step; return the mean loss of each training."""
        every, here = len(ARMS), self.step * 2 * self.micro
        ranks = [self.samples.batch(range(here + r * self.micro, here + (r + 1) * self.micro))
                 for r in range(2)]  # fmt: skip
        tokens, labels = (
            torch.stack(part).repeat(every, 1, 1) for part in zip(*ranks, strict=True)
        )
        self._load()
        losses = losses_of(self.leaves, self.heads, tokens, labels)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            found: list[Any] = [leaf.grad for leaf in self.leaves.values()]
            grads = torch.cat([each.view(every, 2, -1) for each in found], 2)
            both = zip(ARMS, grads, strict=True)
            self._update(torch.stack([self.parts.average(arm, each) for arm, each in both]))
        for leaf in self.leaves.values():
            leaf.grad = None
        return [float(each) for each in losses.detach().view(every, 2).mean(1)]

    @torch.no_grad()
    def evaluate(self, text: Tensor) -> list[float]:
        """Return each training's loss over the samples of ``text``, (N, length + 1)."""
        self._load()
        held = {name: leaf[::2] for name, leaf in self.leaves.items()}
        every = []
        for first in range(0, len(text), BATCH):
            sample = text[first : first + BATCH].repeat(len(ARMS), 1, 1)
            every.append(losses_of(held, self.heads, sample[..., :-1], sample[..., 1:]))
        return [float(each) for each in torch.stack(every).mean(0)]

    @torch.no_grad()
    def _load(self) -> None:
        both = zip(ARMS, self.weights, strict=True)
        seen = torch.stack([self.parts.seen(arm, weights, self.step) for arm, weights in both])
        for leaf, (low, high) in zip(self.leaves.values(), self.parts.edges, strict=True):
            leaf.view(len(ARMS), 2, high - low).copy_(seen[:, None, low:high])

    def rate_now(self) -> float:
        """Return the learning rate of the next step."""
        left = (self.steps - self.step) / (self.steps * COOL_DOWN)
        return self.rate * min(1.0, (self.step + 1) / WARM_UP, left)

    def _update(self, grads: Tensor) -> None:
        rate = self.rate_now()
        self.step += 1
        first, second = self.moments
        self.weights.mul_(1 - rate * DECAY)
        first.lerp_(grads, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(grads, grads, value=1 - BETAS[1])
        size = (second.sqrt() / (1 - BETAS[1] ** self.step) ** 0.5).add_(EPS)
        self.weights.addcdiv_(first, size, value=-rate / (1 - BETAS[0] ** self.step))


def losses_of(leaves: dict[str, Tensor], heads: int, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the losses (A,) of A example GPTs on their tokens (A, B, T); weights (A, ...)."""
    every = iter(leaves.values())
    table = next(every)
    models, batch, length = tokens.shape
    vocabulary, width = table.shape[1:]
    places = tokens.reshape(models, -1) + torch.arange(models)[:, None] * vocabulary
    hidden = F.embedding(places, table.reshape(-1, width))
    shape = (models * batch, length, 3, heads, width // heads)
    for _ in range((len(leaves) - 3) // 6):
        norm1, qkv, out, norm2, up, down = itertools.islice(every, 6)
        query, key, value = linear(normed(hidden, norm1), qkv).view(shape).permute(2, 0, 3, 1, 4)
        query, key = turned(query), turned(key)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + linear(mixed.transpose(1, 2).reshape(models, -1, width), out)
        hidden = hidden + linear(F.gelu(linear(normed(hidden, norm2), up)), down)
    norm, head = every
    logits = linear(normed(hidden, norm), head).flatten(0, 1)
    return F.cross_entropy(logits, labels.reshape(-1), reduction="none").view(models, -1).mean(1)


def linear(values: Tensor, weights: Tensor) -> Tensor:
    """Multiply (A, N, C) by the weights (A, D, C)."""
    return torch.bmm(values, weights.transpose(1, 2))


def normed(values: Tensor, weights: Tensor) -> Tensor:
    """RMSNorm of (A, N, C) with the weights (A, C)."""
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-5) * weights[:, None]


def turned(values: Tensor) -> Tensor:
    """Turn (..., T, D) by the angles of its positions."""
    cos, sin = rotary_table(values.shape[-2], values.shape[-1], values.device)
    first, second = values.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def train(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train all arms of one seed; return its line."""
    text, held = (IndexedTokens(Path(f"{options.data}_{part}")) for part in ("train", "valid"))
    sizes = {name: getattr(options, name) for name in ("layers", "width", "heads")}
    vocabulary = 1 + int(max(each.tokens.max() for each in (text, held)))
    model = GPT(ModelConfig(vocabulary=vocabulary, seed=seed, **sizes))
    samples = Samples(text, options.length, seed)
    stack = Stack(model, options.heads, samples, options.micro, options.steps, options.lr)
    whole = BATCH * options.length
    numel = int(PART * (len(held.tokens) - 1)) // whole * whole
    tokens = torch.from_numpy(held.tokens[: numel + 1].astype(np.int64))
    valid = tokens.unfold(0, options.length + 1, options.length)
    cooling, middle = int((1 - COOL_DOWN) * options.steps), [0.0]
    for step in range(options.steps):
        if step == cooling:
            middle = stack.evaluate(valid)
        stack.train()
    arms = [str(arm) for arm in ARMS]
    return {"seed": seed, "arms": arms, "middle": middle, "valid": stack.evaluate(valid)}


def report(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Return a table: gaps in % of native's loss, and what Lloyd levels add to uniform ones."""
    yield f"{len(lines)} seeds: before the learning rate falls | at the end"
    arms = lines[0]["arms"]
    gaps = {}
    for when in ("middle", "valid"):
        losses = np.array([line[when] for line in lines])
        gaps[when] = dict(zip(arms, 100 * (losses / losses[:, :1] - 1).T, strict=True))
    for arm in arms[1:]:
        yield f"{arm:16} {' | '.join(interval(found[arm]) for found in gaps.values())}"
    for engine in ENGINES:
        more = [f[f"{engine}:lloyd"] - f[f"{engine}:uniform"] for f in gaps.values()]
        yield f"{engine + ' more':16} {' | '.join(map(interval, more))}"


def interval(values: NDArray[np.float64]) -> str:
    """Return the mean and half of its 95 % interval."""
    half = half_width(values)
    return f"{values.mean():+.3f}" + ("" if half is None else f" ± {half:.3f}")


def main() -> None:
    """Train the seeds that ``--out`` has not, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("levels.jsonl"))
    add("--data", type=Path, default=Path("data/text"), help="as of train_gpt.py")
    add("--seeds", type=int, nargs=2, default=(0, 48), metavar=("FIRST", "STOP"))
    sizes = {"layers": 1, "width": 64, "heads": 4, "length": 64, "micro": 2, "steps": 400}
    for name, default in sizes.items():
        add(f"--{name}", type=int, default=default)
    add("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.touch()
    lines = list(map(json.loads, options.out.read_text().splitlines()))
    for seed in sorted(set(range(*options.seeds)) - {line["seed"] for line in lines}):
        lines.append(train(options, seed))
        with options.out.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
    print(*report(lines), sep="\n")


if __name__ == "__main__":
    main()
