"""FSDP2 and DDP: frozen parameters that move, or unfrozen ones that stay or drift, are named."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

import hybridcomp
from hybridcomp import log
from hybridcomp.patches.common.trained_set import TrainedSet
from hybridcomp.patches.torch.trained_set import MOVES, NOT_AVERAGED, NOT_HELD
from tests.patches.torch.trainer import Job, build, tensors, train
from tests.ranks import RunRanks
from tests.selection import by_day

BLOCK: dict[str, Any] = {"dp": "bf16", "min_bytes": 0, "ledger": {"every": 1_000_000}}


class Keeping:
    """An optimizer whose ``zero_grad`` leaves zeros."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def step(self) -> None:
        self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad(set_to_none=False)


def changed(engine: Any, begins: bool, keeps: bool, holds: bool) -> tuple[bool, list[str]]:
    """Freeze or unfreeze a layer during training; return whether it moves, and the messages."""
    job = Job(engine=engine, unused=True)  # DDP has to detect unused parameters
    model: Any = build(job)
    extra = getattr(model, "module", model).extra
    if begins and engine == "fsdp2":
        extra.requires_grad_(False)
    if begins and engine == "ddp":
        model = rewrapped(model)
    attached = hybridcomp.attach(model, BLOCK)
    assert attached is not None
    every = [p for p in model.parameters() if holds or p.requires_grad]
    inner = torch.optim.AdamW(every, lr=1e-2, weight_decay=0.0)
    optimizer: Any = Keeping(inner) if keeps else inner
    said: list[str] = []
    with patch.object(log, "say", lambda *texts, anywhere=False: said.extend(texts)):
        train(job, model, optimizer, 0, 3)
        for _ in range(2):
            extra.requires_grad_(begins)
            before = [tensor.detach().clone() for tensor in tensors(extra)]
            train(job, model, optimizer, 0, 3)
            moves = not all(map(torch.equal, before, tensors(extra)))
            extra.requires_grad_(not begins)
            train(job, model, optimizer, 0, 3)
    attached.detach()
    return moves, said


def rewrapped(model: Any) -> Any:
    """Wrap the model in a DistributedDataParallel while a layer is frozen."""
    from torch.nn.parallel import DistributedDataParallel

    model.module.extra.requires_grad_(False)
    return DistributedDataParallel(model.module, find_unused_parameters=True)


#: engine, whether it unfreezes, keeps gradients, holds all parameters -> moves, messages
CASES: dict[tuple[str, bool, bool, bool], tuple[bool, str | None]] = {
    ("ddp", False, False, True): (False, None),
    ("ddp", False, True, True): (True, f"stopped requiring gradients ({{}}){MOVES}"),
    ("ddp", True, False, True): (True, f"began requiring gradients ({{}}){NOT_AVERAGED}"),
    ("fsdp2", False, False, True): (False, None),
    ("fsdp2", False, True, True): (True, f"stopped requiring gradients ({{}}){MOVES}"),
    ("fsdp2", True, False, True): (True, None),
    ("fsdp2", True, False, False): (False, f"began requiring gradients ({{}}){NOT_HELD}"),
}


#: by day the cases with a message, of both engines
DAY = [("ddp", False, True, True), ("ddp", True, False, True), ("fsdp2", True, False, False)]


@pytest.mark.parametrize(("engine", "begins", "keeps", "holds"), by_day(CASES, DAY))
def test_what_is_frozen_or_unfrozen_behind_the_optimizer_is_named_once(
    engine: str, begins: bool, keeps: bool, holds: bool, on_ranks: RunRanks
) -> None:
    case = engine, begins, keeps, holds
    moves, told = CASES[case]
    for rank, (moved, said) in enumerate(on_ranks(2, changed, *case)):
        names = "extra.weight, extra.bias"
        lines = [] if told is None or rank else ["WARNING: 2 parameters " + told.format(names)]
        assert (moved, said) == (moves, lines)


def test_a_look_returns_what_has_changed_since_the_last_one() -> None:
    layer = torch.nn.Linear(2, 2)
    found = TrainedSet(layer.named_parameters())
    assert found.look() is None and found.first == {"weight", "bias"}
    layer.bias.requires_grad_(False)
    stopped, begun = found.look() or ({}, {})
    assert (list(stopped), begun) == (["bias"], {}) and stopped["bias"] is layer.bias
    assert found.look() is None
    layer.bias.requires_grad_(True)
    layer.weight.requires_grad_(False)
    stopped, begun = found.look() or ({}, {})
    assert (list(stopped), list(begun)) == (["weight"], ["bias"])
