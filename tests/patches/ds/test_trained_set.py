"""Parameters frozen or unfrozen during training are named, once."""

from __future__ import annotations

import itertools
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp import log
from tests.ranks import run_ranks

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from hybridcomp.patches.ds.trained_set import IGNORED, MOVES
from tests.training.trainer import Job, Tiny, make_engine, parameters, train_step

BLOCK: dict[str, Any] = {"dp": "bf16", "min_bytes": 0, "ledger": {"every": 1_000_000}}
#: name -> job, whether its optimizer continues with frozen and trains unfrozen parameters
JOBS: dict[str, tuple[Job, bool, bool]] = {
    "ZeRO 0": (Job(block=BLOCK), False, True),
    "ZeRO 0, bf16": (Job(dtype="bf16", block=BLOCK), True, False),
    "ZeRO 1": (Job(stage=1, block=BLOCK), True, False),
    "ZeRO 2": (Job(stage=2, block=BLOCK), True, False),
    "ZeRO 3": (Job(stage=3, block=BLOCK), True, False),
}
STEPS = 2


def changed(job: Job, begins: bool) -> tuple[bool, list[str]]:
    """Freeze or unfreeze two parameters during training; return whether they move, and the log."""
    model, steps = Tiny(), itertools.count()
    model.inner.requires_grad_(not begins)
    engine = make_engine(job, model)
    said: list[str] = []

    def trained() -> dict[str, Tensor]:
        for _ in range(STEPS):
            train_step(engine, job, next(steps))
        return parameters(engine)

    with patch.object(log, "say", lambda *texts, anywhere=False: said.extend(texts)):
        for _ in range(2):  # alternating, as in adversarial training
            before = trained()
            model.inner.requires_grad_(begins)
            after = trained()
            model.inner.requires_grad_(not begins)
    moves = not torch.equal(before["inner.weight"], after["inner.weight"])
    engine.destroy()
    return moves, [text for text in said if "requiring gradients" in text]


def every_job() -> dict[str, tuple[bool, list[str]]]:
    found = {}
    for name, (job, _, _) in JOBS.items():
        for begins in (False, True):
            found[f"{name}, {begins}"] = changed(job, begins)
            dist.barrier()
    return found


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, tuple[bool, list[str]]]]:
    return run_ranks(2, every_job, timeout=900.0)


@pytest.mark.parametrize("name", JOBS)
def test_what_is_frozen_and_moves_is_named_once(name: str, outcomes: list[Any]) -> None:
    told = f"WARNING: 2 parameters stopped requiring gradients (inner.weight, inner.bias){MOVES}"
    for rank, found in enumerate(outcomes):
        goes_on = JOBS[name][1]
        assert found[f"{name}, False"] == (goes_on, [told] if goes_on and not rank else [])


@pytest.mark.parametrize("name", JOBS)
def test_what_is_unfrozen_and_stays_is_named_once(name: str, outcomes: list[Any]) -> None:
    told = f"WARNING: 2 parameters began requiring gradients (inner.weight, inner.bias){IGNORED}"
    for rank, found in enumerate(outcomes):
        trains = JOBS[name][2]
        assert found[f"{name}, True"] == (trains, [] if trains or rank else [told])
