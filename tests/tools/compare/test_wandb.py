"""W&B: reads offline runs of several trainers, and logs a comparison's chart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from hybridcomp.session import wandb_run
from hybridcomp.tools.compare import CompareError, Wishes, compared
from hybridcomp.tools.compare.chart import final_figures
from hybridcomp.tools.compare.reading import read_run
from hybridcomp.tools.compare.wandb_files import HEADER, payloads, read, read_training
from hybridcomp.tools.compare.wandb_parts import joined
from tests.tools.compare.made import write_run

wandb = pytest.importorskip("wandb")

#: a trainer's log, in a separate process, since W&B leaves threads behind
TRAINERS = """
import sys, wandb
folder = sys.argv[1]

def start(name, config):
    return wandb.init(project="p", group="g", name=name, mode="offline", dir=f"{folder}/{name}",
                      config=config, settings=wandb.Settings(silent=True, console="off",
                                                             x_disable_stats=True))
import os
header = {"seed": 3, "model": {"layers": 4}, "data": {"order": "x"}, "tokens_per_step": 100}
for name, factor in (("ours", 1.0), ("lossy", 1.01)):
    os.makedirs(f"{folder}/{name}")
    codecs = {"dp/forward": "bf16"}
    run = start(name, {"run": header, "compression": {"dp": "bf16"}, "codecs": codecs})
    for step in range(1, 31):
        for key, value in (("loss", factor * (2 + 1 / step)), ("tokens", 100 * step),
                           ("tokens_per_second", 50.0), ("seconds", 2.0)):
            run.log({key: value}, step=8 * step)  # as DeepSpeed's monitor does: by samples
        if step % 10 == 0:
            for key, value in (("raw_MB", 4.0), ("wire_MB", 2.0), ("ratio", 2.0), ("codec_ms", 5.0),
                               ("error", 0.1), ("residual_norm", 1.0)):
                run.log({f"train/compression/dp/{key}": value}, step=8 * step)
    run.finish()
os.makedirs(f"{folder}/neox")
run = start("neox", {"seed": 5, "num_layers": 2, "hidden_size": 64, "seq_length": 32,
                     "train_batch_size": 4, "data_path": "text"})
for step in range(1, 31):
    run.log({"train/lm_loss": 3 + 1 / step, "train/learning_rate": 1.0}, step=step)
    run.log({"x" * 40: "y" * 3000}, step=step)  # larger than a block of the file, together
run.finish()

os.makedirs(f"{folder}/deepspeed")
run = start("deepspeed", {"seed": 5})  # DeepSpeed's monitor alone, resumed after step 10
for step in range(11, 31):
    run.log({"Train/Samples/train_loss": 3 + 1 / step}, step=8 * step)
    run.log({"Train/Samples/lr": 1.0}, step=8 * step)
run.finish()

# a stand-in for Hugging Face's Trainer: its callback's calls, with the names and config keys that
# transformers 5.23 gave a run of GPT-2, and the ledger's figures put between them
from hybridcomp.session import wandb_run
os.makedirs(f"{folder}/trainer")
run = start("trainer", {"seed": 0, "transformers_version": "5.23.0", "model_type": "gpt2",
                        "vocab_size": 64, "per_device_train_batch_size": 4,
                        "gradient_accumulation_steps": 1,
                        "deepspeed": {"zero_optimization": {"stage": 1}}, "train_batch_size": None})
run.config.update({"codecs": {"dp/forward": "blockint(bits=4)"}})
run.define_metric("train/global_step")
run.define_metric("*", step_metric="train/global_step", step_sync=True)
for step in range(1, 31):
    if step % 2 == 0:  # more often than the Trainer logs
        events = {"raw_MB": 4.0, "wire_MB": 1.0 + step / 30, "ratio": 4.0, "error": 0.1}
        assert wandb_run.log([(f"train/compression/dp/{k}", v) for k, v in events.items()], step)
    if step % 5 == 0:
        run.log({"train/loss": 3 + 1 / step, "train/epoch": step / 30, "train/global_step": step})
    if step % 15 == 0:
        run.log({"eval/loss": 3.5, "eval/runtime": 0.02, "train/global_step": step})
run.log({"train/train_runtime": 3.0, "train_loss": 3.1, "train/global_step": 30})
run.finish()

# runs that stopped after 20 steps and were resumed, offline, from a checkpoint of step 15
import time
for part, steps, loss in ((0, range(1, 21), 4.0), (1, range(16, 31), 3.0)):
    for name in ("samples", "rows"):
        os.makedirs(f"{folder}/{name}", exist_ok=True)
        run = wandb.init(project="p", id=f"same-{name}", name=name, mode="offline",
                         dir=f"{folder}/{name}", resume="allow",
                         config={"seed": 7, "model_type": "gpt2", "batch": part},
                         settings=wandb.Settings(silent=True, console="off",
                                                 x_disable_stats=True))
        for step in steps:
            values = {"train/compression/dp/raw_MB": 4.0, "train/compression/dp/wire_MB": 1.0}
            if name == "samples":  # DeepSpeed's monitor: its own numbers of rows
                run.log({"loss": loss, **values}, step=8 * step)
            else:  # Hugging Face's Trainer: W&B numbers the rows
                run.log({"train/loss": loss, "train/global_step": step, **values})
        run.finish()
    time.sleep(1.1)  # folders are named by the second
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("wandb")
    subprocess.run([sys.executable, "-c", TRAINERS, str(found)], check=True, capture_output=True)
    return found


def offline(folder: Path, name: str) -> Path:
    (found,) = (folder / name / "wandb").glob("offline-run-*")
    return found


def test_our_run(folder: Path) -> None:
    found = read_training(offline(folder, "ours"))
    assert found.seed == 3 and found.identity["data"] == {"order": "x", "tokens_per_step": 100}
    assert found.steps.tolist() == list(range(1, 31))
    assert found.tokens is not None and found.tokens[-1] == 3000
    assert found.seconds is not None and found.seconds[-1] == 60
    assert found.losses[9] == pytest.approx(2.1)
    assert (found.project, found.group) == ("p", "g")
    row = found.ledger["dp"]["forward"]
    assert row["codec"] == "bf16" and row["wire_MB"] == 6.0 and row["ratio"] == 2.0
    assert row["error"] == pytest.approx(0.1) and row["codec_ms"] == 15.0


def test_run_of_deepspeeds_monitor_is_by_steps(folder: Path) -> None:
    found = read_training(offline(folder, "deepspeed"))
    assert found.steps.tolist() == list(range(11, 31))
    assert found.losses[-1] == pytest.approx(3 + 1 / 30)


def test_run_of_gpt_neox(folder: Path) -> None:
    found = read_training(offline(folder, "neox"))
    assert found.seed == 5 and found.identity["model"] == {"num_layers": 2, "hidden_size": 64}
    assert found.identity["data"]["data_path"] == "text"
    assert found.tokens is not None and found.tokens[-1] == 30 * 4 * 32
    assert found.losses[-1] == pytest.approx(3 + 1 / 30)
    assert found.seconds is not None and len(found.steps) == 30


def test_run_of_the_trainer_with_figures_of_the_ledger(folder: Path) -> None:
    found = read_training(offline(folder, "trainer"))
    assert found.steps.tolist() == list(range(5, 31, 5))
    assert found.losses[-1] == pytest.approx(3 + 1 / 30) and found.valid_loss == 3.5
    assert found.seed == 0 and found.tokens is None and found.seconds is not None
    assert found.identity["model"] == {"vocab_size": 64, "model_type": "gpt2"}
    assert found.identity["data"]["per_device_train_batch_size"] == 4
    assert found.settings == {"zero_optimization": {"stage": 1}}
    row = found.ledger["dp"]["forward"]  # sums 15 reports, although the Trainer wrote 9 rows
    wire = sum(1.0 + step / 30 for step in range(2, 31, 2))
    assert row["raw_MB"] == 60.0 and row["wire_MB"] == pytest.approx(wire)
    assert row["ratio"] == pytest.approx(60.0 / wire)
    (file,) = offline(folder, "trainer").glob("*.wandb")
    _, _, history = read(file)
    assert [values["train/compression/step"] for values in history.values()
            if "train/compression/step" in values][:3] == [4, 10, 14]  # fmt: skip


def test_the_axis_of_the_figures_is_theirs() -> None:
    defined: dict[str, dict[str, Any]] = {}
    logged: list[dict[str, float]] = []
    run = SimpleNamespace(
        step=0,
        define_metric=lambda name, **how: defined.update({name: how}),
        log=lambda values, commit: logged.append({**values, "commit": commit}),
    )
    row = wandb_run.OpenRow()
    events = [("train/compression/dp/wire_MB", 2.0), ("train/compression/dp/error", 0.5)]
    with mock.patch.dict(sys.modules, {"wandb": SimpleNamespace(run=None)}):
        assert not row.log(events, 1)
    with mock.patch.dict(sys.modules, {"wandb": SimpleNamespace(run=run)}):
        assert row.log(events, 2) and row.log(events, 4) and not row.log([], 6)
        run.step = 1
        assert row.log(events, 8)
    assert defined["train/compression/*"] == {"step_metric": "train/compression/step"}
    assert [values["train/compression/dp/wire_MB"] for values in logged] == [2.0, 4.0, 2.0]
    assert [values["train/compression/dp/error"] for values in logged] == [0.5, 0.5, 0.5]
    assert [values["train/compression/step"] for values in logged] == [2, 4, 8]
    assert not any(values["commit"] for values in logged)


def test_wandb_runs_are_compared(folder: Path) -> None:
    words = [str(folder / name) for name in ("ours", "lossy")]
    found = compared(words, Wishes())
    assert found.comparisons[1].gap == pytest.approx(1.0)
    with pytest.raises(CompareError, match="another seed: .* no run of seed 5"):
        compared([words[0], str(folder / "neox")], Wishes())


def test_wandb_and_json_lines_can_be_mixed(folder: Path, tmp_path: Path) -> None:
    base = write_run(tmp_path / "base", 3, 1.0, model={"layers": 4}, data={"order": "x"})
    found = compared([f"base={base}", f"ours={folder / 'ours'}"], Wishes())
    assert found.aligned.axis[-1] == 3000 and len(found.aligned.axis) == 30


@pytest.mark.parametrize("name", ["samples", "rows"])
def test_parts_of_a_run_that_was_resumed_offline_are_joined(folder: Path, name: str) -> None:
    """Two folders with one run id had counted as two logs of one seed; the later part counts."""
    parts = sorted((folder / name / "wandb").glob("offline-run-*"))
    assert len(parts) == 2
    run = read_run("resumed", str(folder / name), "ledger.jsonl")
    (found,) = run.trainings
    assert found.seed == 7 and len(found.steps) == 30
    assert found.losses.tolist() == [4.0] * 15 + [3.0] * 15
    assert found.ledger["dp"]["forward"]["wire_MB"] == 30.0  # repeated steps are counted once here
    assert found.seconds is not None and (found.seconds[1:] >= found.seconds[:-1]).all()
    back = read_run("resumed", f"{parts[1]},{parts[0]}", "ledger.jsonl")
    assert back.trainings[0].losses.tolist() == found.losses.tolist()


def test_rows_without_a_place_are_appended_and_a_run_that_began_again_counts() -> None:
    first, again = {0: {"loss": 4.0}, 1: {"loss": 3.5}}, {0: {"loss": 3.0}}
    assert joined([first, again]) == {0: {"loss": 4.0}, 1: {"loss": 3.5}, 2: {"loss": 3.0}}
    first, again = {1: {"loss": 4.0}, 2: {"loss": 3.5}}, {1: {"loss": 3.0}, 2: {"loss": 2.9}}
    assert joined([first, {}, again]) == again


def theirs(path: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return a file's configuration and history by W&B's own reader (``wandb-core leet``)."""
    core = Path(wandb.__file__).parent / "bin" / "wandb-core"
    command = [str(core), "leet", "inspect", "-json", "-no-observability", "-run-file", str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    config: dict[str, Any] = {}
    history: dict[int, dict[str, Any]] = {}
    for record in map(json.loads, said.stdout.splitlines()):
        if record["type"] == "run":
            config |= record["run"]["config"]["update"]
        elif record["type"] == "history":
            history.setdefault(record["history"]["step"]["num"], {}).update(
                record["history"]["item"]
            )
    return config, history


@pytest.mark.parametrize("name", ["ours", "neox", "trainer"])
def test_the_reader_of_wandb_gives_the_same(folder: Path, name: str) -> None:
    (file,) = offline(folder, name).glob("*.wandb")
    config, _, history = read(file)
    expected_config, expected_history = theirs(file)
    assert len(history) >= 9
    assert history == expected_history
    for key, value in expected_config.items():
        if key != "_wandb":  # W&B's own, which grows during the run
            assert config[key] == value, key


def test_cut_off_and_damaged_files(folder: Path, tmp_path: Path) -> None:
    (file,) = offline(folder, "ours").glob("*.wandb")
    whole, data = list(payloads(file)), file.read_bytes()
    cut = tmp_path / "run-cut.wandb"
    cut.write_bytes(data[:-3])
    assert list(payloads(cut)) == whole[:-1]
    cut.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
    with pytest.raises(CompareError, match="damaged at byte"):
        list(payloads(cut))
    cut.write_bytes(b"not a run")
    with pytest.raises(CompareError, match="expected a file of W&B"):
        list(payloads(cut))
    cut.write_bytes(HEADER)
    with pytest.raises(CompareError, match="none of its records holds a loss"):
        read_training(tmp_path)


CHART = """
import sys
from hybridcomp.tools.commands.cli import main
sys.exit(main(["compare", *sys.argv[1:]]))
"""


def test_chart_and_final_figures_are_in_a_run_of_the_group(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = [str(folder / "ours"), str(folder / "lossy"), "--out", str(tmp_path)]
    command = [sys.executable, "-c", CHART, *words]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (place,) = tmp_path.glob("wandb/offline-run-*")
    assert f"W&B: {place}; upload it with: wandb sync {place}" in printed
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    config, about, history = read(file)
    assert (about.project, about.run_group, about.job_type) == ("p", "g", "comparison")
    assert list(config["runs"]) == ["ours", "lossy"]
    panels = config["_wandb"]["visualize"]
    for name in ("loss over tokens", "loss over seconds"):
        assert panels[name]["panel_config"]["panelDefId"] == "wandb/lineseries/v0"
    (logged,) = history.values()
    assert logged["comparison/_type"] == "table-file"
    path = file.parent / "files" / logged["loss over tokens_table/path"]
    rows = json.loads(path.read_text())["data"]
    assert {key for _, key, _ in rows} == {"ours", "lossy"} and len(rows) == 60
    figures = final_figures(compared(words[:2], Wishes()))
    assert figures["final/lossy/gap_percent"] == pytest.approx(1.0)
    assert figures["final/ours/dp/forward/wire_MB"] == 6.0
    summary = summary_of(file)
    for name, value in figures.items():
        assert summary[name] == pytest.approx(value), name


def summary_of(file: Path) -> dict[str, Any]:
    """Return the last values in W&B's summary records."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, Any] = {}
    for payload in payloads(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(payload)
        for item in record.summary.update:
            found[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return found


def test_an_error_of_wandb_is_told_with_what_to_do() -> None:
    """A job without a key had died with 40 stack frames on every rank."""
    said = wandb_run.ended_by(wandb.errors.UsageError("No API key configured.\nUse login."))
    assert said is not None and said.startswith("W&B ended this job: No API key configured.")
    assert "wandb login" in said and "WANDB_MODE=offline" in said and "\n" not in said
    assert wandb_run.ended_by(ValueError("no")) is None
