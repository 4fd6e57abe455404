"""bench_levels.py: its stacked trainings make the engines' losses on two ranks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from gpt.data import Samples, Share
from gpt.loop import PlainTrainer
from gpt.model import GPT, lm_loss
from gpt.torch_engines import Engine, TorchTrainer
from gpt.weights import ModelConfig

import hybridcomp
from benchmarks.bench_levels import ARMS, Stack, interval, report
from tests.ranks import run_ranks
from tests.selection import by_day

STEPS, HEADS, MICRO, LENGTH = 4, 4, 2, 64
#: what a wrong sum, a missing message or other levels change in a loss is 1e-4 and more
NEAR = 2e-5
SETTINGS: dict[str, Any] = {
    "train_batch_size": 2 * MICRO, "train_micro_batch_size_per_gpu": MICRO,
    "gradient_clipping": 0.0, "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {
        "lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}},
}  # fmt: skip


def begun() -> tuple[GPT, Samples]:
    """Return the model at its start and the samples of a text of 256 different tokens."""
    tokens = np.random.default_rng(0).permutation(np.repeat(np.arange(256), 16) ** 2 // 256 % 256)
    text = cast(Any, SimpleNamespace(tokens=np.append(tokens, 255), prefix="text"))
    model = GPT(ModelConfig(vocabulary=256, layers=1, width=64, heads=HEADS, seed=0))
    return model, Samples(text, LENGTH, 0)


def stack() -> Stack:
    model, samples = begun()
    return Stack(model, HEADS, samples, MICRO, STEPS, 1e-3)


def engine(kind: str, levels: str, rates: list[float]) -> list[float]:
    """Train on this rank; return the losses."""
    model, samples = begun()
    block: Any = {"preset": "recommended", "when": "always"}
    if levels:
        block["dp"] = {"levels": levels}
    trainer: Any
    if kind == "zero1":
        import deepspeed

        hybridcomp.install()
        found, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()),
            config={**SETTINGS, "compression": block if levels else {"preset": "none"}},
        )  # fmt: skip
        trainer = PlainTrainer(found, lm_loss)
    else:
        wrapped = Engine(cast(Any, kind), model, SETTINGS)
        trainer = TorchTrainer(wrapped, lm_loss, SETTINGS)
        found = wrapped
        if levels:
            hybridcomp.attach(wrapped.model, block)
    share: Share = trainer.share
    stream, losses = share.stream(samples, 0, torch.device("cpu")), []
    for rate in rates:
        for group in found.optimizer.param_groups:
            group["lr"] = rate
        losses.append(trainer.step(iter([next(stream)])))
    return losses


@pytest.mark.parametrize(
    ("kind", "levels"),
    by_day(
        [("ddp", ""), *itertools.product(("ddp", "zero1", "fsdp2"), ("uniform", "lloyd"))],
        [("ddp", "lloyd"), ("fsdp2", "lloyd")],
    ),
)
def test_a_stacked_training_makes_the_losses_of_its_engine(kind: str, levels: str) -> None:
    stacked, rates, losses = stack(), [], []
    name = f"{kind}:{levels}" if levels else "native"
    place = [str(arm) for arm in ARMS].index(name)
    for _ in range(STEPS):
        rates.append(stacked.rate_now())
        losses.append(stacked.train())
    first, _ = run_ranks(2, engine, kind, levels, rates)
    mine = [each[place] for each in losses]
    assert first == pytest.approx(mine, abs=NEAR)
    if levels:  # so that the check above could fail
        assert first != pytest.approx([each[0] for each in losses], abs=NEAR)


def test_a_report_has_gaps_and_what_lloyd_adds() -> None:
    names, native = [str(arm) for arm in ARMS], np.array([2.0, 2.1, 2.2, 2.3])
    lines = [
        {"arms": names, "middle": [x] * 7, "valid": [x, *(x * (1 + k / 1e3) for k in range(6))]}
        for x in native
    ]
    said = list(report(lines))
    assert said[0].startswith("4 seeds")
    assert said[2].split("|")[1].strip() == "+0.100 ± 0.000"  # ddp:lloyd
    assert said[-1].split("|") == ["fsdp2 more       +0.000 ± 0.000 ", " +0.100 ± 0.000"]
    assert interval(np.array([1.0, 2.0, 3.0])) == "+2.000 ± 2.484"
