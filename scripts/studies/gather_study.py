#!/usr/bin/env python3
"""What small parameter gathers of FSDP2 cost: error and loss against bits, one way beside another.

gather_study.py --data data/text --steps 1000 --seeds 0 1 2

Under FSDP2 nobody keeps unsharded parameters, so no difference to them can be sent; what every
owner has is its exact shard. Here the example GPT is trained in one process on parameters as two
owners' shards decode, while the optimizer updates the exact ones, as FSDP2 does; the backward pass
sees what the forward pass saw. Ways to make the most of few bits (``WAYS``): the product's blocks
of 32 values, one scale for each shard, a rotation before, other levels, and error feedback: what an
owner's last message left out of its shard is added to the next one. A run that finished is not
repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridcomp.codecs import BlockInt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from bench.peers.blocks import SIDE, turn
from gpt.data import Samples
from gpt.indexed import IndexedTokens
from gpt.model import GPT, lm_loss
from gpt.weights import ModelConfig
from studies.gather_tables import NATIVE, chapter

OWNERS, SAMPLES, LENGTH = 2, 4, 128  # 512 tokens a step, as loss_study.py --divide-batch 4
LEARNING_RATE = 3e-4  # at 1e-3 two runs that differ in one bit end a per cent apart
VALID_BATCHES = 16
#: steps at which the error of the parameters is measured: every so many
MEASURED = 20


@dataclass(frozen=True)
class Way:
    """How a shard becomes a message."""

    scale: str = "block"  # of 32 values, or "shard"
    rotate: bool = False
    gaussian: bool = False  # levels; 4 bits
    feedback: bool = False


WAYS = {
    "block": Way(),
    "block feedback": Way(feedback=True),
    "block rotate": Way(rotate=True),
    "block rotate feedback": Way(rotate=True, feedback=True),
    "gaussian": Way(gaussian=True),
    "gaussian feedback": Way(gaussian=True, feedback=True),
    "shard": Way("shard"),
    "shard rotate": Way("shard", rotate=True),
    "shard feedback": Way("shard", feedback=True),
}


def decoded(values: Tensor, way: Way, bits: int) -> Tensor:
    """What arrives of ``values``, one shard of a parameter, 1-D fp32."""
    seen = values
    if way.rotate:
        seen = torch.nn.functional.pad(values, (0, -values.numel() % SIDE))
        seen = turn(seen.view(1, -1)).view(-1)
    if way.scale == "shard":
        step = float(seen.abs().max()) / (2 ** (bits - 1) - 1) or 1.0
        found = (seen / step).round_() * step
    else:
        found = torch.empty_like(seen)
        codec = BlockInt(bits, levels="gaussian" if way.gaussian else "uniform")
        message = torch.empty(codec.wire_nbytes(seen.numel(), seen.dtype), dtype=torch.uint8)
        codec.encode(seen.contiguous(), message)
        codec.decode(message, found)
    if way.rotate:
        found = turn(found.view(1, -1)).view(-1)
    return found[: values.numel()]


def bits_of(way: Way, bits: int) -> float:
    """Bits of a value on the wire, of a long shard."""
    return float(bits) if way.scale == "shard" else BlockInt(bits).bits_per_value(torch.float32)


class Gathers:
    """What everybody decodes of the exact parameters; keeps what was left out, with feedback."""

    def __init__(self, exact: Sequence[Tensor], way: Way | None, bits: int) -> None:
        self._exact, self._way, self._bits = exact, way, bits
        self._left = [torch.zeros_like(values) for values in exact]
        self.errors: list[float] = []  # relative L2 errors of all parameters

    def __call__(self, parameters: Sequence[Tensor], keep: bool, measure: bool = False) -> None:
        """Write into ``parameters`` what is gathered; ``keep``: the next step's gathers differ."""
        wrong = total = 0.0
        for exact, left, parameter in zip(self._exact, self._left, parameters, strict=True):
            if self._way is None:
                parameter.copy_(exact)
                continue
            wanted = exact + left if self._way.feedback else exact
            shards = torch.split(wanted.flatten(), _owned(exact))
            arrived = torch.cat([decoded(shard, self._way, self._bits) for shard in shards])
            parameter.copy_(arrived.view_as(exact))
            if keep and self._way.feedback:
                torch.sub(wanted, parameter, out=left)
            if measure:
                wrong += float((parameter - exact).square().sum())
                total += float(exact.square().sum())
        if measure and total:
            self.errors.append((wrong / total) ** 0.5)


def _owned(exact: Tensor) -> int:
    """Values of an owner's shard: rows, rounded up."""
    rows = exact.shape[0]
    return max(1, -(-rows // OWNERS) * (exact.numel() // rows))


def run(
    data: IndexedTokens, valid: IndexedTokens, seed: int, steps: int, way: Way | None, bits: int
) -> dict[str, Any]:
    """Train; losses of all steps, of validation on decoded and on exact parameters, errors."""
    samples = Samples(data, LENGTH, seed)
    torch.manual_seed(seed)
    model = GPT(ModelConfig(vocabulary=samples.vocabulary, seed=seed))
    parameters = list(model.parameters())
    exact = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    optimizer = torch.optim.AdamW(exact, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    gathers, losses = Gathers([p.detach() for p in exact], way, bits), []
    for step in range(steps):
        warm = min(1.0, (step + 1) / max(2, steps // 10))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warm * (1 - step / steps)
        with torch.no_grad():
            gathers(parameters, keep=True, measure=step % MEASURED == 0)
        loss = lm_loss(model(*_batch(samples, step, 0)), _batch(samples, step, 1)[0])
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
        for own, parameter in zip(exact, parameters, strict=True):
            own.grad, parameter.grad = parameter.grad, None
        torch.nn.utils.clip_grad_norm_(exact, 1.0)
        optimizer.step()
    with torch.no_grad():
        gathers(parameters, keep=False)
        decoded_loss = _evaluate(model, Samples(valid, LENGTH, 0))
        for parameter, own in zip(parameters, exact, strict=True):
            parameter.copy_(own)
        exact_loss = _evaluate(model, Samples(valid, LENGTH, 0))
    return {
        "steps": steps, "losses": losses, "valid": decoded_loss, "valid_exact": exact_loss,
        "error": statistics.mean(gathers.errors) if gathers.errors else 0.0,
    }  # fmt: skip


def _batch(samples: Samples, step: int, which: int) -> tuple[Tensor]:
    """The inputs (0) or the labels (1) of a step, (SAMPLES, LENGTH)."""
    return (samples.batch(range(step * SAMPLES, (step + 1) * SAMPLES))[which],)


def _evaluate(model: GPT, valid: Samples) -> float:
    losses = []
    for number in range(VALID_BATCHES):
        inputs, labels = _batch(valid, number, 0)[0], _batch(valid, number, 1)[0]
        losses.append(float(lm_loss(model(inputs), labels)))
    return statistics.mean(losses)


def study(options: argparse.Namespace) -> None:
    """Train what is missing; one file for each run."""
    prefix = options.data
    data, valid = (
        IndexedTokens(prefix.with_name(f"{prefix.name}_{part}")) for part in ("train", "valid")
    )
    options.out.mkdir(parents=True, exist_ok=True)
    cases: list[tuple[str, Way | None, int]] = [(NATIVE, None, 32)]
    for bits in options.bits:
        for name in options.ways:
            if bits == 4 or not WAYS[name].gaussian:
                cases.append((f"{name.replace(' ', '-')}_{bits}", WAYS[name], bits))
    for seed in options.seeds:
        for name, way, bits in cases:
            path = options.out / f"{name}_seed{seed}.json"
            if path.exists() and json.loads(path.read_text())["steps"] == options.steps:
                continue
            begin = time.monotonic()
            record = run(data, valid, seed, options.steps, way, bits)
            record["bits"] = 32.0 if way is None else bits_of(way, bits)
            path.write_text(json.dumps(record))
            last = statistics.mean(record["losses"][-max(1, options.steps // 10) :])
            print(f"{path.stem}: {last:.4f}, {time.monotonic() - begin:.0f} s", flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=1000)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--bits", type=int, nargs="+", default=[4, 5, 6, 8])
    add("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY")
    add("--data", type=Path, default=Path("data/text"), metavar="PREFIX")
    add("--out", type=Path, default=Path("runs/gather_study"), metavar="FOLDER")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, then compare."""
    options = parse(arguments)
    torch.set_num_threads(1)
    study(options)
    print(chapter(options.out, options.out))


if __name__ == "__main__":
    main()
