"""The example: native, compressed, resumed, as a pipeline; nightly with ``deepspeed``.

By day the ranks are forked; ``training/test_launch.py`` tests the launcher.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.tools.compare import Wishes, compared
from tests.selection import by_day, by_night
from tests.training.example import CONFIG, launch, losses, prepare, records, train

pytest.importorskip("deepspeed")

# launches of several processes each, two before the first test
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 6
BLOCK: dict[str, Any] = {
    "preset": "recommended",
    "dp": {"error_feedback": True},
    "when": "always",
    "min_bytes": 0,
    "ledger": {"jsonl": "compressed/ledger.jsonl"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Create data, configurations, the baseline run and the compressed run."""
    folder = tmp_path_factory.mktemp("example")
    prepare(folder)
    pipe = {**CONFIG, "zero_optimization": {"stage": 0}, "gradient_accumulation_steps": 2}
    monitored = {**CONFIG, "csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "j"}}
    for name, config in {
        "baseline": monitored, "compressed": {**CONFIG, "compression": BLOCK}, "pipe": pipe,
    }.items():  # fmt: skip
        (folder / f"{name}.json").write_text(json.dumps(config))
    train(folder, "baseline", "baseline", f"--steps={STEPS}")
    start = launch if by_night(request.config) else train
    start(
        folder, "compressed", "compressed", f"--steps={STEPS}", "--save=checkpoint",
        "--save-every=3", "--eval-every=3", module=True,
    )  # fmt: skip
    return folder


def test_log_of_a_run(folder: Path) -> None:
    header, *steps, summary = records(folder, "baseline")
    assert header["run"]["seed"] == 0 and header["run"]["world_size"] == 2
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert [record["tokens"] for record in steps] == [2 * 4 * 32 * n for n in range(1, STEPS + 1)]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[0]["learning_rate"] < steps[1]["learning_rate"] > steps[-1]["learning_rate"]
    assert summary["summary"] and 0 < summary["valid_loss"] < 6


def test_monitors_of_deepspeed_get_the_loss(folder: Path) -> None:
    head, *rows = (folder / "csv/j/loss.csv").read_text().splitlines()
    assert [float(row.split(",")[1]) for row in rows] == losses(folder, "baseline")


def test_compressed_run_is_close_and_compared(folder: Path) -> None:
    baseline, compressed = losses(folder, "baseline"), losses(folder, "compressed")
    assert compressed[0] == baseline[0]  # nothing was sent yet
    assert compressed != baseline
    assert compressed == pytest.approx(baseline, rel=0.02)
    assert not (folder / "baseline/ledger.jsonl").exists()
    words = [str(folder / "baseline"), str(folder / "compressed")]
    result = compared(words, Wishes(need_ledger=True, last=2))
    assert result.comparisons[1].gap == pytest.approx(0, abs=2)
    assert result.runs[1].ledger()["dp"]["forward"]["codec"] == "blockint(bits=4)"
    assert result.notes == []  # model, data and settings were compared and agree


def test_resumed_run_is_the_unbroken_one(folder: Path) -> None:
    """Weights, optimizer, schedule, residuals and sample order are all restored."""
    (folder / "resumed").mkdir()
    shutil.copy(folder / "compressed/loss.jsonl", folder / "resumed/loss.jsonl")
    (folder / "checkpoint/latest").write_text("global_step3")
    config = {**CONFIG, "compression": {**BLOCK, "ledger": {"jsonl": None}}}
    (folder / "resumed.json").write_text(json.dumps(config))
    printed = train(
        folder, "resumed", "resumed", f"--steps={STEPS}", "--load=checkpoint", module=True
    )
    assert "step 4/6" in printed and "step 3/6" not in printed
    assert losses(folder, "resumed") == losses(folder, "compressed")


@pytest.mark.parametrize("tied", by_day([[], ["--tie-embeddings"]], [[]]))
def test_pipeline_begins_with_the_same_loss(folder: Path, tied: list[str]) -> None:
    """Weights and samples do not depend on the stages; two micro-batches replace two ranks."""
    name = f"pipe{len(tied)}"
    asks = ["--ask=the quick", "--answer-tokens=1", "--temperature=0"]
    printed = train(folder, name, "pipe", "--steps=3", "--pp=2", *tied, *asks)
    assert re.search(r"answer 'the quick.{1,4}'", printed)
    if not tied:
        assert losses(folder, name) == pytest.approx(losses(folder, "baseline")[:3], rel=1e-4)
    assert records(folder, name)[-1]["valid_loss"] < losses(folder, name)[0]


@pytest.mark.nightly
def test_three_dimensions_at_once(folder: Path) -> None:
    """Two tensor ranks by two stages; each direction's codec is in the ledger.

    By day ``tests/training/test_3d.py`` trains in three dimensions.
    """
    pytest.importorskip("megatron.core")
    few = {"codec": "blockint", "bits": 4, "backward": {"bits": 8}}
    block = {"tp": few, "pp": few, "min_bytes": 0, "ledger": {"jsonl": "3d/ledger.jsonl"}}
    config = {**CONFIG, "gradient_accumulation_steps": 2, "compression": block}
    (folder / "3d.json").write_text(json.dumps(config))
    printed = train(
        folder, "3d", "3d", "--steps=4", "--tp=2", "--pp=2", "--eval-batches=0", "--ask=the quick",
        "--ask=a", "--answer-tokens=5", module=True, ranks=4,
    )  # fmt: skip
    assert printed.count("answer 'the quick") == printed.count("answer 'a") == 1
    assert "tp.forward blockint(bits=4)" in printed and "tp.backward blockint(bits=8)" in printed
    found = losses(folder, "3d")
    assert found == pytest.approx(losses(folder, "baseline")[:4], rel=0.02)
    assert records(folder, "3d")[0]["run"]["tensor_parallel"] == 2
    text = (folder / "3d/ledger.jsonl").read_text().splitlines()[-1]
    rows = json.loads(text)["dimensions"]
    assert rows.keys() == {"tp", "pp"}
    for dimension in ("tp", "pp"):
        ways = rows[dimension]
        assert ways["forward"]["codec"] == "blockint(bits=4)"
        assert ways["backward"]["codec"] == "blockint(bits=8)"
        assert ways["forward"]["ratio"] > 1.5 * ways["backward"]["ratio"] > 2
    assert (
        rows["tp"]["forward"]["native_messages"] == rows["tp"]["backward"]["native_messages"] == 0
    )


@pytest.mark.nightly
def test_sequences_over_ranks_in_a_pipeline(folder: Path) -> None:
    """Two stages by two ranks that share sequences: the baseline's losses, one ledger."""
    eight = {"codec": "blockint", "bits": 8}
    block = {"cp": eight, "pp": "expcode", "min_bytes": 0}
    block["ledger"] = {"jsonl": "cp/ledger.jsonl"}
    config = {**CONFIG, "zero_optimization": {"stage": 0}, "gradient_accumulation_steps": 2}
    (folder / "cp.json").write_text(json.dumps({**config, "compression": block}))
    train(folder, "cp", "cp", "--steps=3", "--pp=2", "--cp=2", module=True, ranks=4)
    assert losses(folder, "cp") == pytest.approx(losses(folder, "baseline")[:3], rel=1e-3)
    header = records(folder, "cp")[0]["run"]
    assert header["context_parallel"] == 2 and header["tokens_per_step"] == 2 * 4 * 32
    rows = json.loads((folder / "cp/ledger.jsonl").read_text().splitlines()[-1])["dimensions"]
    assert rows.keys() == {"dp", "cp", "pp"}
    assert rows["cp"]["forward"]["codec"] == rows["cp"]["backward"]["codec"] == "blockint(bits=8)"
    assert rows["cp"]["forward"]["native_messages"] == 0 < rows["cp"]["backward"]["messages"]


@pytest.mark.nightly
def test_token_slices_fill_a_pipeline(folder: Path) -> None:
    """Two stages on slices chosen by timing: the baseline's losses, slices in the ledger."""
    block = {"pp": {"codec": "blockint", "bits": 8}, "min_bytes": 0}
    block["ledger"] = {"jsonl": "slices/ledger.jsonl"}
    config = {**CONFIG, "gradient_accumulation_steps": 2, "compression": block}
    (folder / "slices.json").write_text(json.dumps(config))
    printed = train(folder, "slices", "slices", "--steps=3", "--pp=2", "--slices=auto", module=True)
    header = records(folder, "slices")[0]["run"]
    assert sum(header["token_slices"]) == 32 and header["pipeline_stages"] == 2
    assert f"slices {','.join(map(str, header['token_slices']))}: " in printed
    assert losses(folder, "slices") == pytest.approx(losses(folder, "baseline")[:3], rel=1e-3)
    rows = json.loads((folder / "slices/ledger.jsonl").read_text().splitlines()[-1])["dimensions"]
    assert rows["pp"]["forward"]["codec"] == rows["pp"]["backward"]["codec"] == "blockint(bits=8)"
    assert rows["pp"]["forward"]["native_messages"] == 0
