"""Runs of Hugging Face's Trainer, read from its output folder.

``trainer_state.json`` beside this file was written by transformers 5.23.0 and accelerate 1.15.0: a
GPT-2 of 106 thousand parameters, two ranks, ZeRO 1 with ``recommended``, resumed at step 20 of 40.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.tools.compare import CompareError, Wishes, compared
from hybridcomp.tools.compare.json_lines import read_training as read_lines
from hybridcomp.tools.compare.trainer_state import FILE, place_in, read_training
from tests.tools.compare.made import ROW

SAVED = Path(__file__).with_name(FILE)


def output(folder: Path, *, ledger: bool = False, **changed: Any) -> Path:
    """Return an output folder of the Trainer."""
    folder.mkdir(parents=True)
    (folder / FILE).write_text(json.dumps({**json.loads(SAVED.read_text()), **changed}))
    if ledger:
        record = {"summary": True, "step": 40, "dimensions": {"dp": {"forward": ROW}}}
        (folder / "ledger.jsonl").write_text(json.dumps(record) + "\n")
    return folder


def test_a_resumed_run_is_one_curve() -> None:
    found = read_training(SAVED, "ledger.jsonl")
    assert found.steps.tolist() == list(range(5, 41, 5))
    assert found.losses[0] == pytest.approx(3.92646) and found.losses[-1] == pytest.approx(2.95257)
    assert found.valid_loss == pytest.approx(2.88782)
    assert found.tokens is None and found.seconds is None and found.seed is None
    assert found.identity == {"data": {"train_batch_size": 4}}


def test_output_folders_are_compared_with_their_ledgers(tmp_path: Path) -> None:
    base, run = output(tmp_path / "base"), output(tmp_path / "run", ledger=True)
    found = compared([str(base), str(run)], Wishes(last=4))
    assert [one.label for one in found.runs] == ["base", "run"]
    assert found.comparisons[1].gap == 0 and found.runs[1].ledger() == {"dp": {"forward": ROW}}
    other = output(tmp_path / "other", train_batch_size=8)
    with pytest.raises(CompareError, match=r"another data order .*train_batch_size is 8 to 4"):
        compared([str(base), str(other)], Wishes(last=4))


def test_the_last_checkpoint_stands_for_a_run_that_was_not_finished(tmp_path: Path) -> None:
    whole = output(tmp_path / "run", ledger=True)
    for name in ("checkpoint-9", "checkpoint-20", "checkpoint-best"):
        (whole / name).mkdir()
        shutil.copy(whole / FILE, whole / name)
    assert place_in(whole) == whole / FILE
    (whole / FILE).unlink()
    assert place_in(whole) == whole / "checkpoint-20" / FILE
    found = compared([f"a={SAVED}", f"b={whole}"], Wishes(last=4))
    assert found.runs[1].ledger()  # beside the checkpoints


def test_figures_of_the_callback_are_the_ledger_where_no_file_is(tmp_path: Path) -> None:
    history = json.loads(SAVED.read_text())["log_history"]
    for step, wire in ((10, 1.0), (20, 3.0)):
        figures = {"raw_MB": 8.0, "wire_MB": wire, "ratio": 8.0 / wire, "error": 0.1}
        record = {f"compression/dp/{name}": value for name, value in figures.items()}
        history.append({**record, "compression/tp/backward/wire_MB": 1.0, "step": step})
    folder = output(tmp_path / "run", log_history=history)
    found = read_training(folder / FILE, "ledger.jsonl")
    assert found.steps.tolist() == list(range(5, 41, 5))
    row = found.ledger["dp"]["forward"]
    assert (row["raw_MB"], row["wire_MB"], row["ratio"]) == (16.0, 4.0, 4.0)
    assert row["error"] == pytest.approx(0.1) and "backward" in found.ledger["tp"]
    output(tmp_path / "both", ledger=True, log_history=history)
    beside = read_training(tmp_path / "both" / FILE, "ledger.jsonl")
    assert beside.ledger == {"dp": {"forward": ROW}}


def test_folders_of_seeds(tmp_path: Path) -> None:
    for seed in range(2):
        output(tmp_path / "runs" / f"seed{seed}")
    found = compared([f"a={tmp_path / 'runs'}", f"b={tmp_path / 'runs'}"], Wishes(last=4))
    assert [len(run.trainings) for run in found.runs] == [2, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected a log_history"),
        ("[]", "expected a log_history"),
        ('{"log_history": [3]}', "expected a log_history"),
        ('{"log_history": []}', "holds no step with a loss"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(CompareError, match=message):
        read_training(tmp_path / FILE, "ledger.jsonl")


def test_json_lines_with_evaluations(tmp_path: Path) -> None:
    """As written by a callback that logs the Trainer's metrics."""
    path = tmp_path / "loss.jsonl"
    history = json.loads(SAVED.read_text())["log_history"]
    path.write_text("".join(json.dumps(record) + "\n" for record in history))
    found = read_lines(path, "none")
    assert found.steps.tolist() == list(range(5, 41, 5))
    assert found.valid_loss == pytest.approx(2.88782)
    path.write_text(json.dumps({"step": 1, "lr": 0.1}) + "\n")
    with pytest.raises(CompareError, match="expected records with step and loss"):
        read_lines(path, "none")
