"""The example over NCCL with hybridcomp's own layers and torch's engines, and a measurement."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from hybridcomp.tools.plan.machines import cluster_file
from tests.nccl.common import DEVICE, EIGHT_BITS, MARKS
from tests.nccl.launched import launch
from tests.paths import EXAMPLES
from tests.training.example import CONFIG, losses, prepare

pytestmark = MARKS

#: torch's engines report every ten steps
STEPS = 10


@dataclass(frozen=True)
class Case:
    """A training: number of ranks, arguments, encoded dimensions."""

    ranks: int
    arguments: tuple[str, ...]
    dimensions: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)


STAGE0 = {"zero_optimization": {"stage": 0}}
CASES = {
    "fsdp2": Case(2, ("--engine=fsdp2",), ("dp", "zero")),
    "ddp": Case(2, ("--engine=ddp",), ("dp",)),
    "ring": Case(2, ("--cp=2",), ("cp",), STAGE0),
    "mesh": Case(4, ("--tp2d=2",), ("tp2d",), STAGE0),
    "slices": Case(2, ("--pp=2", "--slices=auto"), ("pp",)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data."""
    folder = tmp_path_factory.mktemp("example")
    prepare(folder)
    return folder


def trained(folder: Path, name: str, case: Case, block: dict[str, Any] | None) -> list[float]:
    """Return the losses of a training in bf16."""
    config = {**CONFIG, "bf16": {"enabled": True}, **case.settings}
    if block is not None:
        config["compression"] = block
    (folder / f"{name}.json").write_text(json.dumps(config))
    found = launch(
        f"--ranks={case.ranks}", f"--device={DEVICE}", "--",
        *([] if block is None else ["-m", "hybridcomp.run"]),
        str(EXAMPLES / "train_gpt.py"),
        f"--deepspeed_config={name}.json", "--layers=2", "--width=32", "--heads=2", "--length=32",
        "--eval-batches=0", f"--steps={STEPS}", f"--log={name}/loss.jsonl", *case.arguments,
        cwd=folder,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return losses(folder, name)


@pytest.mark.parametrize("name", CASES)
def test_eight_bits_follow_the_baseline(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    native = trained(folder, f"{name}.native", case, None)
    assert len(native) == STEPS and native[-1] < native[0]
    ledger = f"{name}/ledger.jsonl"
    block = {**dict.fromkeys(case.dimensions, EIGHT_BITS), "min_bytes": 0}
    monkeypatch.setenv("HYBRIDCOMP_CONFIG", f"{name}.json")  # torch's engines read no such file
    found = trained(folder, name, case, {**block, "ledger": {"jsonl": ledger}})
    assert found == pytest.approx(native, rel=0.02) and found != native
    rows = json.loads((folder / ledger).read_text().splitlines()[-1])["dimensions"]
    for dimension in case.dimensions:
        row = rows[dimension]["weights" if dimension == "tp2d" else "forward"]
        # biases and norms of a mesh stay native
        assert row["native_messages"] < row["messages"] and row["ratio"] > 1.5, row
        assert dimension == "tp2d" or not row["native_messages"]


def test_a_measurement(folder: Path) -> None:
    """``hybridcomp measure`` on two ranks, as short as possible."""
    words = ["-m", "hybridcomp.tools.measure", "--seconds=4", "--out=cluster.json"]
    found = launch("--ranks=2", f"--device={DEVICE}", "--", *words, cwd=folder, timeout=500.0)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    cluster = cluster_file.read(folder / "cluster.json")
    assert len(cluster.ranks) == 2 and cluster.links and cluster.codecs and cluster.encoded
    assert cluster.channels and cluster.trainings
    assert bool(cluster.host_codecs) == (DEVICE == "cuda")
    if DEVICE == "cuda":
        assert torch.cuda.get_device_name() in cluster.ranks[0].device
