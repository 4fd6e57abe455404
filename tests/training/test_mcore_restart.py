"""megatron-core resumes where it stopped: residuals and step are saved with its checkpoints."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.training.mcore_trainer import Job, Outcome, run

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.core") is None,
    reason="megatron-core is not installed",
)

FEEDBACK = {"codec": "blockint", "bits": 4, "error_feedback": True}
BLOCK = {"dp": FEEDBACK, "min_bytes": 0, "start_step": 2}


def train(jobs: list[Job]) -> tuple[list[Outcome | str], str]:
    """Return the results and the messages."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        found = run(jobs)
    return found, said.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def trained(folder: Path) -> list[tuple[list[Any], str]]:
    whole = Job(steps=8, block=BLOCK)
    jobs = [
        whole,
        replace(whole, restart=4, folder=str(folder / "whole")),
        replace(whole, restart=4),
    ]
    return run_ranks(2, train, jobs, timeout=600)


def test_goes_on_as_if_nothing_had_happened(trained: list[tuple[list[Any], str]]) -> None:
    for (unbroken, resumed, _), _ in trained:
        assert unbroken.losses == resumed.losses
        assert unbroken.parameters == resumed.parameters
        assert unbroken.residuals == resumed.residuals > 0
    assert len(trained[-1][0][0].losses) == 8


def test_forgetting_it_differs_and_is_said(trained: list[tuple[list[Any], str]]) -> None:
    (unbroken, _, forgetful), said = trained[0]
    assert unbroken.parameters != forgetful.parameters
    assert said.count("WARNING: Megatron's optimizer was restored") == 1
    assert "hybridcomp.load_state(folder)" in said


def test_files(folder: Path, trained: list[tuple[list[Any], str]]) -> None:
    state = json.loads((folder / "whole" / "hybridcomp_state.json").read_text())
    assert state["step"] == 4 and state["loss_scale"] == 1.0
    assert state["groups"] == {"tp": 1, "pp": 1, "ep": 1}
    assert len(list((folder / "whole").glob("hybridcomp_residuals_rank_*.pt"))) == 2
