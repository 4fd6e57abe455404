#!/usr/bin/env python3
"""Count gradient values that a codec never sends, and what its errors do to Adam's moments.

    scripts/bench/unsent_values.py --steps 1000 --out unsent.json

A value that stays below half a step of its block of 32 is encoded as zero. Trains the example's
model on one CPU without compression and encodes every parameter's gradient in many ways beside it:
as it is, with residuals of 32, 8 and 4 bits, and rounded at random. Of each way and kind of
parameter (norms, biases, embeddings, matrices) the file says

* never: the share of the values that was sent in no step although it was not zero in all;
* missing: the share of the sum of the gradients that has not arrived: norm of (sum of what was
  decoded - sum of the gradients) over the norm of the latter;
* error: norm of the errors of all steps over the norm of all gradients;
* second: mean over the values of sqrt(v of what was decoded / v of the gradient), v as Adam's
  second moment with its beta of 0.95: an update is shorter by as much.

"noise" is, by kind, the norm of half the difference between the gradients of the batch's two halves
over that of the gradients: how far sampling alone moves them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridcomp.codecs import make_codec
from hybridcomp.codecs.quantized_residual import zeros
from hybridcomp.collectives.wire.encoding import EncodeRequest, encode_job

KINDS = ("norms", "biases", "embeddings", "matrices")
BETA = 0.95


def ways_of(bits: int) -> dict[str, tuple[dict[str, Any], int]]:
    """Return by name the arguments of blockint, and the bits of residuals (0: none)."""
    found: dict[str, tuple[dict[str, Any], int]] = {f"{bits} bits": ({"bits": bits}, 0)}
    for kept in (32, 8, 4):
        found[f"{bits} bits, feedback {kept}"] = ({"bits": bits}, kept)
    random = {"bits": bits, "rounding": "random"}
    found[f"{bits} bits, at random"] = (random, 0)
    found[f"{bits} bits, at random, feedback 32"] = (random, 32)  # which the block refuses
    if bits == 4:
        found["4 bits, gaussian"] = ({"bits": 4, "levels": "gaussian"}, 0)
    return found


def kind_of(name: str, parameter: Tensor) -> str:
    """Return which of KINDS a parameter of the example is."""
    if name.endswith("bias"):
        return "biases"
    if parameter.dim() == 1:
        return "norms"
    return "embeddings" if name == "layers.0.weight" else "matrices"


class Watched:
    """One parameter: sums over the steps of what came, of its squares and as a second moment."""

    def __init__(self, numel: int) -> None:
        self.sent = torch.zeros(numel, dtype=torch.bool)  # at least once not zero
        self.total = torch.zeros(numel, dtype=torch.float64)
        self.second = torch.zeros(numel)
        self.squares = 0.0  # of the gradient, or of the errors

    def add(self, came: Tensor, counted: Tensor) -> None:
        """Note what came in a step; ``counted`` goes into the squares."""
        self.sent |= came != 0
        self.total += came
        self.second.mul_(BETA).addcmul_(came, came, value=1 - BETA)
        self.squares += float(counted.square().sum())


class Encoded(Watched):
    """Encodes by a codec, with a residual or without."""

    def __init__(self, numel: int, settings: dict[str, Any], kept: int) -> None:
        super().__init__(numel)
        self._codec = make_codec("blockint", **settings)
        self._residual = zeros(kept, numel, torch.device("cpu")) if kept else None
        nbytes = self._codec.wire_nbytes(numel, torch.float32)
        self._payload, self._decoded = torch.empty(nbytes, dtype=torch.uint8), torch.empty(numel)

    def step(self, gradient: Tensor) -> None:
        """Encode one gradient."""
        job = EncodeRequest(gradient, self._residual)
        encode_job(self._codec, job, self._payload, torch.float32)
        self._codec.decode(self._payload, self._decoded)
        self.add(self._decoded, self._decoded - gradient)


def report(
    ways: dict[str, dict[str, Encoded]], given: dict[str, Watched], kinds: dict[str, str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return by way and kind what the top of this file lists, and the number of values."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for way, parameters in ways.items():
        for kind in KINDS:
            pairs = [(parameters[name], given[name]) for name in given if kinds[name] == kind]
            alive = sum(int(native.sent.sum()) for _, native in pairs)
            never = sum(int((native.sent & ~one.sent).sum()) for one, native in pairs)
            whole = sum(float(native.total.square().sum()) for _, native in pairs)
            off = sum(float((one.total - native.total).square().sum()) for one, native in pairs)
            ratios = [
                (one.second[native.sent] / native.second[native.sent].clamp(min=1e-30)).sqrt()
                for one, native in pairs
            ]
            errors = sum(one.squares for one, _ in pairs)
            found.setdefault(way, {})[kind] = {
                "values": alive,
                "never": never / max(alive, 1),
                "missing": (off / whole) ** 0.5,
                "error": (errors / sum(native.squares for _, native in pairs)) ** 0.5,
                "second": float(torch.cat(ratios).mean()),
            }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, encode beside it, write the file every 100 steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add("--steps", type=int, default=1000)
    add("--batch", type=int, default=4, help="samples of 128 tokens")
    add("--lr", type=float, default=3e-4)
    add("--seed", type=int, default=0)
    add("--bits", type=int, nargs="+", default=[3, 4, 5])
    add("--data", type=Path, default=Path("data/text"), metavar="PREFIX")
    add("--out", type=Path, default=Path("unsent.json"), metavar="FILE")
    asked = parser.parse_args(arguments)
    count(asked)


def count(asked: argparse.Namespace) -> None:
    """Do what ``main`` says with a parsed command line."""
    from gpt.data import Samples
    from gpt.indexed import IndexedTokens
    from gpt.model import GPT, loss_of
    from gpt.weights import ModelConfig

    torch.manual_seed(asked.seed)
    tokens = IndexedTokens(asked.data.with_name(f"{asked.data.name}_train"))
    samples = Samples(tokens, 128, asked.seed)
    config = ModelConfig(
        vocabulary=samples.vocabulary,
        layers=4,
        width=128,
        heads=4,
        norm="layernorm",
        seed=asked.seed,
    )
    model, loss = GPT(config), loss_of(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=asked.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    parameters = dict(model.named_parameters())
    kinds = {name: kind_of(name, parameter) for name, parameter in parameters.items()}
    numels = {name: parameter.numel() for name, parameter in parameters.items()}
    ways = {
        way: {name: Encoded(numel, *how) for name, numel in numels.items()}
        for bits in asked.bits
        for way, how in ways_of(bits).items()
    }
    given = {name: Watched(numel) for name, numel in numels.items()}
    noise = dict.fromkeys(KINDS, 0.0)
    for step in range(asked.steps):
        found, labels = samples.batch(range(step * asked.batch, (step + 1) * asked.batch))
        optimizer.zero_grad()
        halves: list[list[Tensor]] = []
        for half in range(2):
            value = loss(model(found[half::2]), labels[half::2]) / 2
            halves.append(list(torch.autograd.grad(value, [*parameters.values()])))
        for parameter, first, second in zip(parameters.values(), *halves, strict=True):
            parameter.grad = first + second
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        clip = min(1.0, 1.0 / float(norm))
        for (name, parameter), first, second in zip(parameters.items(), *halves, strict=True):
            assert parameter.grad is not None
            gradient = parameter.grad.reshape(-1).contiguous()
            given[name].add(gradient, gradient)
            noise[kinds[name]] += float((first - second).square().sum()) * clip**2
            for watched in ways.values():
                watched[name].step(gradient)
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == asked.steps:
            whole = {
                kind: sum(given[name].squares for name in given if kinds[name] == kind)
                for kind in KINDS
            }
            told = {
                "steps": step + 1,
                "loss": 2 * float(value.detach()),
                "noise": {kind: (noise[kind] / whole[kind]) ** 0.5 for kind in KINDS},
                "ways": report(ways, given, kinds),
            }
            asked.out.write_text(json.dumps(told, indent=1) + "\n")
            print(f"step {step + 1}  loss {told['loss']:.3f}", flush=True)


if __name__ == "__main__":
    main()
