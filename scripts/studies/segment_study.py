#!/usr/bin/env python3
"""What the length of a segment does to the loss curve, at equal bits.

segment_study.py --data data/text --steps 1000 --seeds 0 1 2 --bits 4.2 2.5

Two data-parallel replicas in one process: their gradients go through the real codec, parameter by
parameter and with error feedback, are averaged and given to AdamW, as ZeRO-1 with two ranks does.
One step for a whole parameter is no setting of the product, since one large value would erase the
rest; here it shows why. The bound of each length is chosen so that all need the same bits on the
gradients of the native run's step 50; the bits of the whole run are measured. A run that finished
is not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridcomp.codecs import Radix

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from gpt.data import Samples
from gpt.indexed import IndexedTokens
from gpt.model import GPT, lm_loss
from gpt.weights import ModelConfig
from studies.segment_tables import NATIVE, chapter

REPLICAS, SAMPLES, LENGTH = 2, 2, 128  # 512 tokens a step, as loss_study.py --divide-batch 4
LEARNING_RATE = 3e-4  # at 1e-3 two runs that differ in one bit end a per cent apart
CALIBRATED_AT = 50  # step
TENSOR = 0  # a "length": one step for the whole parameter
LENGTHS = (256, 4096, TENSOR)
Gradients = list[Tensor]  # one flat fp32 tensor for each parameter


class Coding:
    """A codec for every parameter, the residuals of every replica, and the bits they took."""

    def __init__(self, segment: int, bound: float) -> None:
        self.segment, self.bound = segment, bound
        self.bits = self.values = 0
        self._residuals: list[Gradients] = []
        self._room = torch.empty(0, dtype=torch.uint8)

    def _codec(self, values: Tensor) -> Radix:
        if self.segment != TENSOR:
            return Radix(self.bound, self.segment)
        largest = max(float(values.abs().max()), 1e-30)
        return Radix(max(self.bound * largest, 2.0**-126), mode="abs")

    def decoded(self, values: Tensor) -> Tensor:
        """What arrives of ``values``."""
        codec, out = self._codec(values), torch.empty_like(values)
        needed = codec.wire_nbytes(values.numel(), values.dtype)
        if self._room.numel() < needed:
            self._room = torch.empty(needed, dtype=torch.uint8)
        used = codec.encode(values, self._room[:needed])
        codec.decode(self._room[:used], out)
        self.bits += 8 * used
        self.values += values.numel()
        return out

    def average(self, replicas: Sequence[Gradients]) -> Gradients:
        """What the optimizer gets; keeps what was not sent."""
        if not self._residuals:
            self._residuals = [[torch.zeros_like(g) for g in own] for own in replicas]
        total = [torch.zeros_like(gradient) for gradient in replicas[0]]
        for own, residuals in zip(replicas, self._residuals, strict=True):
            for gradient, residual, sums in zip(own, residuals, total, strict=True):
                wanted = gradient + residual
                sent = self.decoded(wanted)
                torch.sub(wanted, sent, out=residual)
                sums += sent
        return [sums / len(replicas) for sums in total]


def native(replicas: Sequence[Gradients]) -> Gradients:
    """The average, not encoded."""
    return [torch.stack(parts).mean(0) for parts in zip(*replicas, strict=True)]


def bound_for(bits: float, segment: int, gradients: Gradients) -> float:
    """The bound at which ``segment`` needs ``bits`` a value; bisection, to half a per cent."""
    low, high = 1e-4, 0.9
    while high / low > 1.005:
        middle = (low * high) ** 0.5
        coding = Coding(segment, middle)
        for gradient in gradients:
            coding.decoded(gradient)
        low, high = (middle, high) if coding.bits > bits * coding.values else (low, middle)
    return high


def run(
    data: IndexedTokens, seed: int, steps: int, until: int,
    average: Callable[[Sequence[Gradients]], Gradients],
) -> list[tuple[float, Gradients]]:  # fmt: skip
    """Loss of every step before ``until``, a mean over the replicas; with the last, its gradients.

    The learning rate falls to zero at ``steps``.
    """
    samples = Samples(data, LENGTH, seed)
    torch.manual_seed(seed)
    model = GPT(ModelConfig(vocabulary=samples.vocabulary))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    found: list[tuple[float, Gradients]] = []
    for step in range(until):
        warm = min(1.0, (step + 1) / max(2, steps // 10))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warm * (1 - step / steps)
        losses, replicas = [], []
        for replica in range(REPLICAS):
            first = (step * REPLICAS + replica) * SAMPLES
            inputs, labels = samples.batch(range(first, first + SAMPLES))
            optimizer.zero_grad()
            loss = lm_loss(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
            replicas.append([flat_gradient(parameter) for parameter in parameters])
        for parameter, gradient in zip(parameters, average(replicas), strict=True):
            parameter.grad = gradient.view_as(parameter)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        found.append((statistics.mean(losses), replicas[0] if step + 1 == until else []))
    return found


def flat_gradient(parameter: Tensor) -> Tensor:
    """A copy; the next backward pass writes into the original."""
    assert parameter.grad is not None
    return parameter.grad.flatten().clone()


def study(options: argparse.Namespace) -> None:
    """Train what is missing; one file for each run."""
    data = IndexedTokens(options.data.with_name(f"{options.data.name}_train"))
    options.out.mkdir(parents=True, exist_ok=True)
    _, calibration = run(data, 0, options.steps, CALIBRATED_AT, native)[-1]
    cases = [(0.0, 0), *((bits, segment) for bits in options.bits for segment in LENGTHS)]
    for seed in options.seeds:
        for bits, segment in cases:
            name = f"{bits:g}_{label(segment)}" if bits else NATIVE
            path = options.out / f"{name}_seed{seed}.json"
            if path.exists() and json.loads(path.read_text())["steps"] == options.steps:
                continue
            begin = time.monotonic()
            coding = Coding(segment, bound_for(bits, segment, calibration)) if bits else None
            average = coding.average if coding else native
            losses = [loss for loss, _ in run(data, seed, options.steps, options.steps, average)]
            record: dict[str, Any] = {"steps": options.steps, "losses": losses}
            if coding:
                record |= {"bound": coding.bound, "bits": coding.bits / coding.values}
            path.write_text(json.dumps(record))
            print(f"{path.stem}: {time.monotonic() - begin:.0f} s", flush=True)


def label(segment: int) -> str:
    """Of a length, in tables and file names."""
    return "tensor" if segment == TENSOR else str(segment)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=1000)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--bits", type=float, nargs="+", default=[4.2, 2.5])
    add("--data", type=Path, default=Path("data/text"), metavar="PREFIX")
    add("--out", type=Path, default=Path("runs/segment_study"), metavar="FOLDER")
    found = parser.parse_args(arguments)
    if found.steps <= CALIBRATED_AT:
        parser.error(f"--steps: expected more than {CALIBRATED_AT}, found {found.steps}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, then compare."""
    options = parse(arguments)
    torch.set_num_threads(1)
    study(options)
    print(chapter(options.out, options.out))


if __name__ == "__main__":
    main()
