#!/usr/bin/env python3
"""Count gradient values that a codec never sends, with and without error feedback.

    scripts/bench/unsent_values.py --steps 1000 --out unsent.json

A value that stays below half a step of its block of 32 is encoded as zero. Trains the example's
model on one CPU without compression and encodes every parameter's gradient in many ways beside it:
as it is, with residuals of 32, 8 and 4 bits, and rounded at random. Of each way and kind of
parameter (norms, biases, embeddings, matrices) the file says which share of the values was not sent
in any step although it was not zero in all, and which share of the sum of the gradients has not
arrived: norm of (sum of what was decoded - sum of the gradients) over the norm of the latter.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridcomp.codecs import make_codec
from hybridcomp.codecs.quantized_residual import zeros
from hybridcomp.collectives.wire.encoding import EncodeRequest, encode_job

KINDS = ("norms", "biases", "embeddings", "matrices")
#: name of a way -> arguments of blockint, bits of residuals (0: none)
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    f"{bits} bits{', feedback ' + str(kept) if kept else ''}": ({"bits": bits}, kept)
    for bits in (3, 4, 5)
    for kept in (0, 32, 8, 4)
}
WAYS["4 bits, gaussian"] = ({"bits": 4, "levels": "gaussian"}, 0)
RANDOM = {f"{bits} bits, at random": bits for bits in (3, 4, 5)}


def kind_of(name: str, parameter: Tensor) -> str:
    """Return which of KINDS a parameter of the example is."""
    if name.endswith("bias"):
        return "biases"
    if parameter.dim() == 1:
        return "norms"
    return "embeddings" if name == "layers.0.weight" else "matrices"


@dataclass
class Watched:
    """One way of encoding one parameter: what was sent of it so far."""

    numel: int
    sent: Tensor = field(init=False)  # bool: at least once not as zero
    total: Tensor = field(init=False)  # fp64: the sum of what was decoded

    def __post_init__(self) -> None:
        """Begin with nothing sent."""
        self.sent = torch.zeros(self.numel, dtype=torch.bool)
        self.total = torch.zeros(self.numel, dtype=torch.float64)

    def add(self, decoded: Tensor) -> None:
        """Note what arrived in a step."""
        self.sent |= decoded != 0
        self.total += decoded


class Encoded(Watched):
    """Encodes by a codec, with a residual or without."""

    def __init__(self, numel: int, settings: dict[str, Any], kept: int) -> None:
        super().__init__(numel)
        self._codec = make_codec("blockint", **settings)
        self._residual = zeros(kept, numel, torch.device("cpu")) if kept else None
        nbytes = self._codec.wire_nbytes(numel, torch.float32)
        self._payload = torch.empty(nbytes, dtype=torch.uint8)

    def step(self, gradient: Tensor) -> None:
        """Encode one gradient."""
        job = EncodeRequest(gradient, self._residual)
        encode_job(self._codec, job, self._payload, torch.float32)
        decoded = torch.empty(self.numel)
        self._codec.decode(self._payload, decoded)
        self.add(decoded)


class AtRandom(Watched):
    """Rounds blockint's uniform levels up or down at random, so that the mean is the value."""

    def __init__(self, numel: int, bits: int, seed: int) -> None:
        super().__init__(numel)
        self._top = 2 ** (bits - 1) - 1
        self._draw = torch.Generator().manual_seed(seed)

    def step(self, gradient: Tensor) -> None:
        """Round one gradient; a step is that of the codec: absmax with a mantissa of 4 bits."""
        blocks = torch.nn.functional.pad(gradient, (0, -self.numel % 32)).view(-1, 32)
        bits = blocks.abs().amax(1, keepdim=True).view(torch.int32)
        step = (((bits + 0x7FFFF) >> 19) << 19).view(torch.float32).clamp(min=2.0**-110) / self._top
        levels = torch.floor(blocks / step + torch.rand(blocks.shape, generator=self._draw))
        self.add((levels.clamp(-self._top, self._top) * step).view(-1)[: self.numel])


def report(
    ways: dict[str, dict[str, Watched]], given: dict[str, Tensor], kinds: dict[str, str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return by way and kind the shares of values never sent and of the sum that is missing."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for way, parameters in ways.items():
        for kind in KINDS:
            names = [name for name in parameters if kinds[name] == kind]
            alive = sum(int((given[f"{name}, any"]).sum()) for name in names)
            never = sum(
                int((given[f"{name}, any"] & ~parameters[name].sent).sum()) for name in names
            )
            whole = sum(float(given[name].square().sum()) for name in names)
            off = sum(
                float((parameters[name].total - given[name]).square().sum()) for name in names
            )
            share = {
                "values": alive,
                "never": never / max(alive, 1),
                "missing": (off / whole) ** 0.5,
            }
            found.setdefault(way, {})[kind] = share
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, encode beside it, write the file every 100 steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add("--steps", type=int, default=1000)
    add("--batch", type=int, default=4, help="samples of 128 tokens")
    add("--lr", type=float, default=3e-4)
    add("--seed", type=int, default=0)
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
    ways: dict[str, dict[str, Any]] = {
        way: {name: Encoded(numel, *how) for name, numel in numels.items()}
        for way, how in WAYS.items()
    }
    for way, bits in RANDOM.items():
        ways[way] = {
            name: AtRandom(numel, bits, seed) for seed, (name, numel) in enumerate(numels.items())
        }
    given: dict[str, Tensor] = {}
    for name, numel in numels.items():
        given[name] = torch.zeros(numel, dtype=torch.float64)
        given[f"{name}, any"] = torch.zeros(numel, dtype=torch.bool)
    for step in range(asked.steps):
        found, labels = samples.batch(range(step * asked.batch, (step + 1) * asked.batch))
        optimizer.zero_grad()
        value = loss(model(found), labels)
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            gradient = parameter.grad.reshape(-1).contiguous()
            given[name] += gradient
            given[f"{name}, any"] |= gradient != 0
            for watched in ways.values():
                watched[name].step(gradient)
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == asked.steps:
            told = {"steps": step + 1, "loss": float(value), "ways": report(ways, given, kinds)}
            asked.out.write_text(json.dumps(told, indent=1) + "\n")
            print(f"step {step + 1}  loss {float(value):.3f}", flush=True)


if __name__ == "__main__":
    main()
