"""A run of the launcher with an error bound is killed and resumes as if uninterrupted.

Three seeds' spread is the tolerance for other ranks. By day ``test_checkpoint`` resumes engines,
and ``scripts/test_example_launch`` the example.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.training.example import CONFIG, kill_after, losses, prepare, start, train

pytest.importorskip("deepspeed")

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800)]

STEPS = 300
SAVED = STEPS // 2
BATCH = 8  # samples per step, over all ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create data, configurations for two and four ranks, and the unbroken run."""
    folder = tmp_path_factory.mktemp("restart")
    prepare(folder)
    for ranks in (2, 4):
        (folder / f"ranks{ranks}.json").write_text(json.dumps(config(BATCH // ranks)))
    train(folder, "whole", "ranks2", f"--steps={STEPS}", module=True)
    return folder


def config(micro_batch: int) -> dict[str, Any]:
    schedule = {"warmup_num_steps": 2, "total_num_steps": STEPS}
    return {
        **CONFIG,
        "train_micro_batch_size_per_gpu": micro_batch,
        "scheduler": {"type": "WarmupDecayLR", "params": schedule},
        "zero_optimization": {"stage": 0},  # upstream resumes other stages only on as many ranks
        "compression": {"dp": {"error_bound": 0.02, "error_feedback": True}, "min_bytes": 0},
    }


@pytest.fixture(scope="module")
def killed(folder: Path) -> Path:
    """Return the log of a run killed after its checkpoint.

    The run is long, since the kill may come late on a busy machine. Saves after the first
    checkpoint are ignored.
    """
    save = ("--save=checkpoint", f"--save-every={SAVED}")
    launched = start(folder, "killed", "ranks2", f"--steps={100 * STEPS}", *save, module=True)
    kill_after(folder, "killed", SAVED + 1, launched)
    assert SAVED < len(losses(folder, "killed")) < 100 * STEPS
    (folder / "checkpoint" / "latest").write_text(f"global_step{SAVED}")
    return folder / "killed" / "loss.jsonl"


def resume(folder: Path, killed: Path, name: str, ranks: int) -> list[float]:
    (folder / name).mkdir()
    shutil.copy(killed, folder / name)
    train(
        folder, name, f"ranks{ranks}", f"--steps={STEPS}", "--load=checkpoint", module=True,
        ranks=ranks,
    )  # fmt: skip
    return losses(folder, name)


def test_same_number_of_ranks_is_the_unbroken_run(folder: Path, killed: Path) -> None:
    assert resume(folder, killed, "resumed", 2) == losses(folder, "whole")


def test_another_number_of_ranks_stays_in_the_spread_of_seeds(folder: Path, killed: Path) -> None:
    whole, four = losses(folder, "whole"), resume(folder, killed, "four", 4)
    assert four[:SAVED] == whole[:SAVED] and four[SAVED:] != whole[SAVED:]
    assert four == pytest.approx(whole, rel=0.01)
    ends = [last(whole)]
    for seed in (1, 2):
        train(folder, f"seed{seed}", "ranks2", f"--steps={STEPS}", f"--seed={seed}", module=True)
        ends.append(last(losses(folder, f"seed{seed}")))
    print(f"unbroken, by seed: {ends}; resumed on four ranks: {last(four)}")
    assert abs(last(four) - last(whole)) <= max(ends) - min(ends)


def last(found: list[float]) -> float:
    """Return the mean of the last tenth."""
    tail = found[-(len(found) // 10) :]
    return sum(tail) / len(tail)
