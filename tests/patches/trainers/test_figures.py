"""The ledger's figures as trainers receive them, without any trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.patches.trainers import figures
from hybridcomp.patches.trainers.figures import take
from tests.ranks import RunRanks

BLOCK: dict[str, Any] = {
    "dp": {"codec": "blockint", "bits": 4, "error_feedback": True},
    "min_bytes": 0,
    "ledger": {"every": 2, "sample_every": 1},
}


def taken() -> list[dict[str, float]]:
    """Return the result of ``take`` after each of four steps, for a part of a module and alone."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64))
    holder = nn.ModuleDict({"part": model})
    hybridcomp.attach(model, BLOCK)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(4):
        model(torch.ones(4, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(take(model if step < 2 else holder))
        assert take(model) == {}
    return found


def test_each_report_is_taken_once_on_every_rank(on_ranks: RunRanks) -> None:
    ranks = on_ranks(2, taken)
    for found in ranks:
        assert [bool(figures) for figures in found] == [False, True, False, True]
        assert found[1]["train/compression/dp/ratio"] == pytest.approx(7.5, rel=0.05)
        assert {"train/compression/dp/error", "train/compression/dp/residual_norm"} <= found[
            3
        ].keys()
        assert found == ranks[0]


def test_a_model_that_nobody_attached_reports_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert take(nn.Linear(2, 2)) == {} and take(None) == {}
    figures.say_if_idle(nn.Linear(2, 2))
    assert "WARNING: nothing is compressed, despite the callback" in capsys.readouterr().out
    hybridcomp.install()
    try:
        figures.say_if_idle(nn.Linear(2, 2))
        assert capsys.readouterr().out == ""
    finally:
        hybridcomp.uninstall()
