"""Residuals under a loss scaler: in its units after a restart, and with torch's sharded scaler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.patches.torch import steps
from hybridcomp.patches.torch.loss_scale import SEVERAL
from tests.ranks import run_ranks

B4: dict[str, Any] = {
    "dp": {"codec": "blockint", "bits": 4, "error_feedback": True},
    "min_bytes": 0,
    "ledger": {"every": 1_000_000},
}
#: scale of the saving run, of the resumed one (None: no scaler), the argument of load_state, and
#: the expected factor of the residuals at the first message
RESTARTS = {
    "another scale": (8.0, 32.0, None, 4.0),
    "no scaler any more": (8.0, None, None, 0.125),
    "a scaler from now on": (None, 8.0, None, 8.0),
    "no scaler": (None, None, None, 1.0),
    "given": (8.0, None, 16.0, 2.0),
}


def attached_model() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 8))
    attached = hybridcomp.attach(model, B4)
    return model, attached, torch.optim.SGD(model.parameters(), lr=1e-3)


def train_step(model: Any, optimizer: Any, scaler: Any = None, factor: float = 1.0) -> None:
    loss = model(torch.ones(2, 64)).square().mean() * factor
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def scaler_of(scale: float | None) -> Any:
    return None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)


def restarted(folder: str, old: float | None, new: float | None, given: float | None) -> float:
    """Return the residuals' norm at a resumed run's first message, relative to the saved one."""
    model, attached, optimizer = attached_model()
    scaler = scaler_of(old)
    train_step(model, optimizer, scaler)
    hybridcomp.save_state(folder)
    before = attached.channels.residuals.norm()
    hybridcomp.detach(model)
    del model, attached, optimizer, scaler
    model, attached, optimizer = attached_model()
    scaler = scaler_of(new)
    hybridcomp.load_state(folder, given)
    met: list[float] = []
    run = attached.channels["dp"].run

    def noted(*args: Any, **kwargs: Any) -> Any:
        met.append(attached.channels.residuals.norm())
        return run(*args, **kwargs)

    attached.channels["dp"].run = noted
    train_step(model, optimizer, scaler)
    hybridcomp.detach(model)
    steps.forget_all()
    return float(met[0] / before)


def all_restarts(folder: str) -> dict[str, float]:
    return {name: restarted(f"{folder}/{name}", *case[:3]) for name, case in RESTARTS.items()}


def sharded_scaler() -> list[float]:
    """Return the residuals' norms at messages, after growth of the scale and a skipped step."""
    model, attached, optimizer = attached_model()
    scaler = ShardedGradScaler("cpu", init_scale=8.0, growth_interval=1)
    train_step(model, optimizer, scaler)
    found = [attached.channels.residuals.norm()]
    attached.reduced()
    found.append(attached.channels.residuals.norm())
    train_step(model, optimizer, scaler, float("inf"))
    found.append(attached.channels.residuals.norm())
    steps.forget_all()
    return found


def two_scalers(folder: str) -> tuple[float, list[str]]:
    from unittest.mock import patch

    from hybridcomp.patches.torch import loss_scale

    said: list[str] = []
    keep = scaler_of(2.0)
    with patch.object(loss_scale, "say", said.append):
        factor = restarted(folder, 8.0, 32.0, None)
    assert keep is not None
    return factor, said


def everything(folder: str) -> tuple[dict[str, float], list[float], tuple[float, list[str]]]:
    return all_restarts(f"{folder}/all"), sharded_scaler(), two_scalers(f"{folder}/two")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("scales")
    return run_ranks(2, everything, str(folder))


def test_a_continued_run_has_residuals_in_units_of_its_own_scale(outcomes: list[Any]) -> None:
    for found, *_ in outcomes:
        assert found == pytest.approx({name: case[3] for name, case in RESTARTS.items()})


def test_a_scaler_with_an_update_of_its_own_is_followed(outcomes: list[Any]) -> None:
    for _, (first, grown, skipped), _ in outcomes:
        assert grown == pytest.approx(2 * first) and skipped == 0.0


def test_among_several_scalers_the_one_of_the_model_is_not_known(outcomes: list[Any]) -> None:
    for *_, (factor, said) in outcomes:
        assert factor == pytest.approx(1.0) and said == [SEVERAL]
