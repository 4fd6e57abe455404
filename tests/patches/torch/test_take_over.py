"""Residuals of another layout of ranks are sent by the next step that encodes all parameters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hybridcomp
from hybridcomp.collectives.hierarchical.discovery import Hierarchy
from tests.patches.torch.test_state import HSDP, JOBS, load, save, started
from tests.patches.torch.trainer import Job, sum_of_residuals, train
from tests.ranks import RunRanks
from tests.selection import by_day


def saved_by(job: Job, folder: Path) -> dict[str, torch.Tensor]:
    model, optimizer, attached = started(job)
    train(job, model, optimizer, 0, 3)
    save(folder, model, optimizer)
    return sum_of_residuals(attached)


def taken_by(job: Job, folder: Path) -> tuple[dict[str, torch.Tensor], bool]:
    """Load, save and load again; return the residuals, and if any are left after a full step."""
    model, optimizer, _ = started(job)
    load(folder, model, optimizer, named=True)
    save(folder / "again", model, optimizer)
    hybridcomp.detach(model)
    model, optimizer, attached = started(job)
    load(folder / "again", model, optimizer, named=True)
    held = sum_of_residuals(attached)
    train(job, model, optimizer, 3, 4)
    return held, attached.channels.residuals.is_restored


def two_levels(job: Job, hierarchy: Hierarchy) -> Job:
    return replace(job, block={**(job.block or {}), "hierarchy": hierarchy})


CASES = {
    "FSDP to HSDP by nodes": (JOBS["FSDP2"], two_levels(HSDP, "auto"), 4),
    "HSDP to FSDP": (HSDP, JOBS["FSDP2"], 4),
    "FSDP to HSDP": (JOBS["FSDP2"], HSDP, 4),
    "DDP to nodes": (JOBS["DDP"], two_levels(JOBS["DDP"], 2), 4),
    "DDP from nodes": (two_levels(JOBS["DDP"], 2), JOBS["DDP"], 4),
    "DDP from sites of nodes": (two_levels(JOBS["DDP"], [2, 2]), two_levels(JOBS["DDP"], 4), 8),
    "FSDP to sites of nodes": (JOBS["FSDP2"], two_levels(JOBS["FSDP2"], [2, 2]), 8),
}


@pytest.mark.parametrize("name", by_day(CASES, ["FSDP to HSDP by nodes", "DDP from nodes"]))
def test_all_of_it_is_sent(name: str, on_ranks: RunRanks, tmp_path: Path) -> None:
    before, after, ranks = CASES[name]
    missing = on_ranks(ranks, saved_by, before, tmp_path)[0]
    assert any(float(tensor.norm()) > 0 for tensor in missing.values())
    for held, waits in on_ranks(ranks, taken_by, after, tmp_path):
        assert not waits
        assert set(held) == set(missing)
        for name, tensor in missing.items():
            torch.testing.assert_close(held[name], tensor, rtol=1e-4, atol=1e-7)
