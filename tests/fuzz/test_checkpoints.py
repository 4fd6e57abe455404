"""Damaged checkpoint files give a clear error on every rank and lose nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzzing import checkpoints  # importable through tests/fuzz/__init__.py
from tests.ranks import run_ranks

pytest.importorskip("deepspeed")


def damaged(folder: str) -> list[tuple[str, str]]:
    return checkpoints.try_all(folder)


def test_every_damage_is_an_error_that_names_rank_and_file(tmp_path: Path) -> None:
    assert len(checkpoints.damages()) >= 50
    for found in run_ranks(2, damaged, str(tmp_path)):
        assert [(title, problem) for title, problem in found if problem] == []
