"""Checkpoints that are not whole are skipped and named; what does not fit is refused, unchanged."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hybridcomp
from hybridcomp.elastic.checkpoints import SavedJob, newest_in
from hybridcomp.errors import CheckpointError, ConfigError
from hybridcomp.patches.ds.checkpoint import replanned as of_deepspeed
from hybridcomp.patches.mcore import replanned
from hybridcomp.patches.torch import replanned as of_torch
from hybridcomp.tools.commands import cli
from tests.elastic import megatron
from tests.elastic.jobs import (
    LENGTH,
    MOST,
    SAMPLES,
    Case,
    build_deepspeed,
    build_torch,
    run,
)
from tests.ranks import RankPool, run_ranks
from tests.tools.plan.answer.test_command import CLUSTER

pytest.importorskip("deepspeed")

CASES = [Case("zero1"), Case("ddp")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with steps 4 and 6 of a job of two ranks, under DeepSpeed and DDP."""
    folder = tmp_path_factory.mktemp("saved")
    with RankPool(2) as pool:
        for steps in (4, 6):
            pool.run(run, CASES, str(folder), steps)
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


OPTIMIZER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def test_an_unfinished_checkpoint_is_skipped_and_named(saved: Path, tmp_path: Path) -> None:
    place = tmp_path / "ds"
    shutil.copytree(saved / "zero1_none", place)
    shutil.copytree(place / "global_step6", place / "global_step9")
    (place / "global_step9" / OPTIMIZER).unlink()
    job, skipped = of_deepspeed.find(place)
    assert job is not None and (job.step, job.ranks, job.samples) == (6, 2, SAMPLES)
    (line,) = skipped
    assert line.startswith(f"{place}/global_step9 was not finished: ")
    cut(place / "global_step6" / OPTIMIZER)
    job, skipped = of_deepspeed.find(place)
    assert job is not None and job.step == 4
    assert skipped[1] == f"{place}/global_step6 is not whole: {OPTIMIZER} is cut off"
    note = place / "global_step4" / "hybridcomp_checkpoint.json"
    lists = {**json.loads(note.read_text()), "files": {"residuals_rank_*.pt": "residuals"}}
    note.write_text(json.dumps(lists))
    with pytest.raises(CheckpointError, match=r"not whole: residuals_rank_00000\.pt is missing"):
        of_deepspeed.find(place)
    note.unlink()
    (place / "global_step4" / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"no whole checkpoint: .*global_step6 is not whole"):
        of_deepspeed.find(place)
    (place / "latest").unlink()  # as where the first save was cut off: the job begins
    job, skipped = of_deepspeed.find(place)
    assert job is None and len(skipped) == 2 and "there is no" in skipped[0]


def test_a_folder_that_is_not_there_yet_has_no_checkpoint(tmp_path: Path) -> None:
    for find in (of_deepspeed.find, of_torch.find):
        assert find(tmp_path / "later") == (None, [])


def test_the_largest_number_is_the_newest_checkpoint(tmp_path: Path) -> None:
    for name in ("step6", "step10", "step7", "notes99"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "done").touch()
    for place, name in ((tmp_path, "step10"), (tmp_path / "step6", "step6")):
        job, skipped = newest_in(place, lambda path: path.name.startswith("step"), "done", SavedJob)
        assert job is not None and job.folder.name == name and skipped == []


def test_files_of_an_earlier_save_on_more_ranks_do_not_count(saved: Path, tmp_path: Path) -> None:
    tag = tmp_path / "global_step6"
    shutil.copytree(saved / "zero1_none" / "global_step6", tag)
    shutil.copy(tag / OPTIMIZER, tag / OPTIMIZER.replace("rank_1", "rank_2"))
    job, _ = of_deepspeed.find(tag)
    assert job is not None and job.replicas == 2
    assert OPTIMIZER in job.files and OPTIMIZER.replace("rank_1", "rank_2") not in job.files


def test_the_same_of_torchs_checkpoints(saved: Path, tmp_path: Path) -> None:
    place = tmp_path / "torch"
    shutil.copytree(saved / "ddp_none", place)
    shutil.copytree(place / "step6", place / "step10")
    (place / "step10" / ".metadata").unlink()
    job, skipped = of_torch.find(place)
    assert job is not None and (job.step, job.ranks) == (6, 2)
    assert skipped == [f"{place}/step10 was not finished: it has no .metadata"]
    cut(place / "step6" / "__0_0.distcp")
    job, skipped = of_torch.find(place)
    assert job is not None and job.step == 4
    assert skipped[1] == f"{place}/step6 is not whole: __0_0.distcp is cut off"
    cut(place / "step4" / ".metadata")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        of_torch.find(place)


def tried(engine: Any, place: Path, **given: Any) -> tuple[str, bool]:
    """Resume; return the error, and whether the weights are unchanged."""
    module = engine if isinstance(engine, torch.nn.Module) else getattr(engine, "module", None)
    weights = [] if module is None else list(module.parameters())
    before = [one.detach().clone() for one in weights]
    try:
        hybridcomp.resume(engine, place, **given)
    except (ConfigError, CheckpointError) as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = ""
    return said, all(map(torch.equal, before, weights))


def refused(folder: str) -> list[tuple[str, bool]]:
    """Return the error of each wrong call, and whether the weights are unchanged."""
    place = Path(folder, "zero1_none")
    engine = build_deepspeed(CASES[0], 4)
    found = [tried(engine, place, lr="linear")]
    engine.destroy()
    engine = build_deepspeed(CASES[0], train_batch_size=2 * SAMPLES)
    found += [tried(engine, place), tried(engine, place, lr="cubic")]
    where = hybridcomp.resume(engine, place, lr="linear")
    rates = {group["lr"] for group in engine.optimizer.param_groups}
    found.append((f"factor {where.lr_factor} rates {rates} step {where.step}", True))
    engine.destroy()
    engine = build_deepspeed(CASES[0])
    sampler, more, other = (
        hybridcomp.ElasticSampler(LENGTH, samples, seed=seed, tail="keep")
        for samples, seed in ((SAMPLES, 0), (2 * SAMPLES, 0), (SAMPLES, 1))
    )
    found += [tried(engine, place, sampler=other), tried(engine, place, sampler=more),
              tried(engine, place, optimizer=1)]  # fmt: skip
    engine.destroy()
    for other_engine in (Case("zero3"), Case("pipe")):  # on as many ranks
        engine = build_deepspeed(other_engine)
        found.append(tried(engine, place))
        engine.destroy()
    place = Path(folder, "ddp_none")
    model, optimizer = build_torch(CASES[1], 4)
    found.append(tried(model, place, optimizer=optimizer, sampler=sampler))
    hybridcomp.detach(model)
    model, optimizer = build_torch(CASES[1])
    found.append(tried(model, place, sampler=sampler))
    where = hybridcomp.resume(model, place, optimizer=optimizer, sampler=more, lr="sqrt")
    rate = optimizer.param_groups[0]["lr"]
    found.append((f"factor {where.lr_factor:.4f} rate {rate:.7f} step {where.step}", True))
    hybridcomp.detach(model)
    return [*found, tried([model], place), tried(torch.nn.Linear(2, 2), place)]


def test_what_does_not_fit_is_refused_on_all_ranks_with_nothing_changed(saved: Path) -> None:
    first, second = run_ranks(2, refused, str(saved))
    assert first == second
    assert all(unchanged for _, unchanged in first)
    said = [text for text, _ in first]
    for text, part in zip(
        said,
        [
            "CheckpointError: resuming a checkpoint: rank 0: ",
            f"ConfigError: samples of a step: found {2 * SAMPLES}; the checkpoint's steps had "
            f"{SAMPLES}: keep these, or name",
            "ConfigError: lr: found 'cubic'; expected one of linear, sqrt, keep",
            "factor 2.0 rates {0.002} step 6",
            "ConfigError: ElasticSampler.seed: found 1; the checkpoint's is 0",
            f"ConfigError: ElasticSampler.samples: found {2 * SAMPLES}; the engine's steps have "
            f"{SAMPLES} samples",
            "ConfigError: hybridcomp.resume: optimizer: found one; the engine has it",
            "ConfigError: hybridcomp.resume: found ZeRO 3; expected ZeRO 1, which saved it",
            f"ConfigError: hybridcomp.resume: found {saved}/zero1_none/global_step6 of 2 replicas "
            "of 1 ranks; a PipelineModule is resumed by a PipelineModule",
            "CheckpointError: resuming a checkpoint: rank 0: ",
            "ConfigError: hybridcomp.resume: optimizer: found nothing; give the model's",
            "factor 1.4142 rate 0.0014142 step 6",
            "ConfigError: hybridcomp.resume: optimizer: found nothing; give Megatron's",
            "ConfigError: hybridcomp.resume: found Linear; expected an engine of DeepSpeed",
        ],
        strict=True,
    ):
        assert text.startswith(part), text
        assert "\n" not in text
    for text in (said[0], said[9]):
        assert "is of another model: 0.down is (16, 48) there and (16, 64) here" in text


def test_a_pipeline_in_bf16_without_zero_is_refused_before_it_trains(tmp_path: Path) -> None:
    case = Case("pipe0", stages=2, dtype="bf16")
    for (one,) in run_ranks(2, run, [case], str(tmp_path), 4):
        assert one.refused == (
            "ConfigError: hybridcomp.resume: found a pipeline in bf16 without ZeRO; DeepSpeed "
            "cannot load what it saves of one; take ZeRO 1, whose it can"
        )
    assert not list((tmp_path / case.name).iterdir())


def test_replan_writes_what_goes_on(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, out = tmp_path / "ds", tmp_path / "out"
    shutil.copytree(saved / "zero1_none", place)
    words = ["--out", str(out), "--", "run", "-n", "{ranks}", "{config}", "{checkpoint}", "{x}"]
    assert cli.main(["replan", str(place), "--ranks", "4", *words]) == 0
    told = json.loads((out / "replan.json").read_text())
    assert told["now"] == {"ranks": 4, "stages": 1, "tensor": 1, "micro_batch": MOST,
                           "accumulation": 1, "samples": SAMPLES}  # fmt: skip
    assert (told["step"], told["samples_seen"]) == (6, 6 * SAMPLES)
    universal = place / "global_step6_universal"
    assert told["checkpoint"] == str(universal) and (universal / "zero").is_dir()
    assert (place / "latest_universal").read_text() == universal.name
    assert not list(place.glob("*.part"))
    written = json.loads((out / "ds_config.json").read_text())
    assert "train_batch_size" not in written and written["checkpoint"] == {"load_universal": True}
    assert written["compression"] == CASES[0].block
    start = (out / "start.sh").read_text()
    assert start.endswith(f"\nexec run -n 4 {out}/ds_config.json {universal} '{{x}}'\n")
    before = (universal / "zero").stat().st_ino
    assert cli.main(["replan", str(place), "--ranks", "1", *words]) == 0
    assert (universal / "zero").stat().st_ino == before  # it is not made again
    assert json.loads((out / "replan.json").read_text())["now"]["accumulation"] == 4
    assert cli.main(["replan", str(place), "--ranks", "2", *words]) == 0
    written = json.loads((out / "ds_config.json").read_text())
    assert written["checkpoint"] == {"load_universal": False}
    assert capsys.readouterr().out.count("converting a checkpoint") == 1


def test_replan_plans_on_the_cluster(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(
        {"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
         "num_hidden_layers": 4, "num_attention_heads": 4}
    ))  # fmt: skip
    described = {**CLUSTER, "tflops": {"bf16": 50, "fp32": 20}}
    (tmp_path / "cluster.json").write_text(json.dumps(described))
    words = ["--model", str(model), "--length", "64", "--out", str(tmp_path / "out")]
    words += ["--cluster", str(tmp_path / "cluster.json")]
    assert cli.main(["replan", str(saved / "ddp_none"), "--ranks", "4", *words]) == 0
    told = json.loads((tmp_path / "out" / "replan.json").read_text())
    assert told["plan"]["seconds"] > 0 and told["now"]["samples"] == SAMPLES
    assert told["now"]["micro_batch"] * told["now"]["accumulation"] * 4 == SAMPLES
    assert not (tmp_path / "out" / "ds_config.json").exists()
    assert "planned: " in capsys.readouterr().out
    assert cli.main(["replan", str(saved / "ddp_none"), "--ranks", "4", *words,
                     "--frozen", "2"]) == 0  # fmt: skip
    frozen = json.loads((tmp_path / "out" / "replan.json").read_text())
    assert frozen["plan"]["seconds"] < told["plan"]["seconds"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "3"], "16; does not divide by 3 data-parallel ranks: take 15 or 18"),
        (["--ranks", "0"], "expected a multiple of 1"),
        (["--ranks", "4", "--stages", "2"], "the model is no PipelineModule"),
        (["--ranks", "4", "--samples", "32"], "or name what becomes of the learning rate"),
        (["--ranks", "4", "--model", "m"], "needed with --model"),
        (["--ranks", "4", "--frozen", "2"], "--frozen: found 2; needed with it: --model"),
    ],
)
def test_replan_refuses_in_one_line_and_writes_nothing(
    words: list[str], message: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, out = tmp_path / "ds", tmp_path / "out"
    shutil.copytree(saved / "zero1_none", place)
    before = sorted(place.rglob("*"))
    assert cli.main(["replan", str(place), *words, "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(place.rglob("*")) == before and not out.exists()


def test_replan_refuses_folders_that_hold_no_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (tmp_path, tmp_path / "none"):
        assert cli.main(["replan", str(place), "--ranks", "2"]) == 2
        assert "expected checkpoints of DeepSpeed, megatron-core or of" in capsys.readouterr().err


def test_a_conversion_is_of_one_save(tmp_path: Path) -> None:
    """Saved again under the same name, a checkpoint is converted again."""
    from hybridcomp.patches.ds.checkpoint import conversion

    name = "mp_rank_00_model_states.pt"
    job: Any = SimpleNamespace(folder=tmp_path / "step6", files=(name, "x_optim_states.pt"))
    for folder in (job.folder, tmp_path / "target"):
        folder.mkdir()
        (folder / name).write_bytes(b"one")
    assert conversion._is_of(tmp_path / "target", job)
    (job.folder / name).write_bytes(b"two")
    os.utime(job.folder / name, (0, 0))
    assert not conversion._is_of(tmp_path / "target", job)


@pytest.mark.nightly
def test_a_conversion_that_fails_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    from hybridcomp.patches.ds.checkpoint import conversion

    place = tmp_path / "ds"
    shutil.copytree(saved / "zero1_none", place)
    tag = place / "global_step6"
    shutil.copy(tag / "mp_rank_00_model_states.pt", tag / OPTIMIZER)  # whole, and no optimizer's
    job = of_deepspeed.read(tag)
    with pytest.raises(CheckpointError, match=r"DeepSpeed cannot convert .*global_step6: \w+"):
        conversion.convert(job)
    assert not list(place.glob("*universal")) and not list(place.glob("*.part"))


def of_megatron(folder: str) -> tuple[str, list[str], list[tuple[str, bool]]]:
    """Return the newest checkpoint, those skipped, and what ``tried`` says of jobs that do not fit.

    They have another layout, another model, and a scheduler of which nothing was saved.
    """
    from tests.training import mcore_trainer

    case, place = Case("megatron-sharded", samples=12), Path(folder, "megatron-sharded_none")
    found = []
    for changes in ({"tp": 2}, {"layers": 2}, {}):
        mcore_trainer.prepare()
        other = replace(megatron.job_of(case), **changes)  # type: ignore[arg-type]
        with mcore_trainer.armed(other):
            mcore_trainer.initialize(other)
            chunks, optimizer = mcore_trainer.build(other)
            scheduler = None if changes else object()
            found.append(tried(chunks[0], place, optimizer=optimizer, scheduler=scheduler))
    job_of_files, skipped = replanned.find(place)
    assert job_of_files is not None
    return str(job_of_files.folder.name), skipped, found


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_megatron_resumes_where_only_replicas_change(tmp_path: Path) -> None:
    case = Case("megatron-sharded", samples=12)
    place = tmp_path / case.name
    with RankPool(2) as two, RankPool(1) as alone:
        for pool, steps in ((two, 2), (alone, 3)):
            pool.run(run, [case], str(tmp_path), steps)
        shutil.copytree(place / "iter_0000003", place / "iter_0000005")
        (place / "iter_0000005" / "metadata.json").unlink()
        first, second = two.run(of_megatron, str(tmp_path))
    assert first == second
    name, skipped, errors = first
    assert all(unchanged for _, unchanged in errors)
    layout, model, scheduler = (text for text, _ in errors)
    assert name == "iter_0000003"
    assert skipped == [f"{place}/iter_0000005 was not finished: it has no metadata.json"]
    assert layout.startswith("ConfigError: hybridcomp.resume: found ")
    assert "tp 1, pp 1, ep 1; this job has tp 2, pp 1, ep 1: only the number" in layout
    assert "is of another model: decoder.layers." in model and "nothing was loaded" in model
    assert scheduler.startswith("ConfigError: hybridcomp.resume: scheduler: found none in ")
    words = ["replan", str(place), "--ranks", "2", "--out", str(tmp_path / "out")]
    assert cli.main(words) == 0
    told = json.loads((tmp_path / "out" / "replan.json").read_text())
    assert (told["step"], told["samples_seen"], told["before"]["ranks"]) == (3, 36, 1)
    assert told["now"]["micro_batch"] * told["now"]["accumulation"] == 6
