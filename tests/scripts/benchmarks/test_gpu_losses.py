"""benchmarks/gpu_losses.py: trainings, pairs and budgets, records."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import re
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_losses
from benchmarks.training_bench import gpu_losses as losses
from benchmarks.training_bench import (
    gpu_rank,
    loss_records,
    loss_runner,
)
from benchmarks.training_bench.forked import Job, JobError
from hybridcomp.config import load_config
from tests.scripts.benchmarks.made_losses import METHOD, TINY, trained

# ---- trainings


def test_a_step_has_16k_tokens_and_evaluations_lie_in_the_last_fifth() -> None:
    assert METHOD.tokens_per_step == 16384 and METHOD.eval_batches == 32
    steps = [n for n in range(1, 801) if n >= METHOD.eval_from and n % METHOD.eval_every == 0]
    assert steps == [680, 720, 760, 800]
    assert METHOD.differences({**vars(METHOD), "lr": 1e-3}) == ["lr 0.001 there, 0.0003 here"]
    for arm in losses.BLOCKS:
        settings = losses.settings_of(losses.Case(arm, 0), METHOD, Path("ledger.jsonl"))
        assert settings["scheduler"]["params"]["warmup_type"] == "linear"
        assert (load_config(settings) is None) == (losses.BLOCKS[arm] is None)


def test_pairs_of_a_seed_come_first() -> None:
    turns = list(losses.turns_of(["baseline", "recommended", "delta"], [3, 5]))
    told = [" and ".join(map(str, turn)) for turn in turns]
    assert told == [
        "baseline seed 3 and recommended seed 3",
        "baseline seed 5 and recommended seed 5",
        "delta seed 3",
        "delta seed 5",
    ]


# ---- records


def test_a_training_is_one_small_file(tmp_path: Path) -> None:
    out, logs, said = tmp_path / "losses", tmp_path / "logs", list[str]()
    case = losses.Case("recommended", 3)
    trained(logs, case, loss=2.0, steps=800)
    loss_records.write(out, logs, case, METHOD, {"start": 1.0, "pair": 60.0})
    (file,) = out.iterdir()
    assert file.name == "recommended.seed3.json.gz" and re.fullmatch(r"[\w.-]+", file.name)
    assert file.stat().st_size < 2**17  # eight of them are below 1 MiB
    found, record = loss_records.read(file)
    assert found == case and METHOD.differences(record["method"]) == []
    assert record["log"][1]["loss"] == 2.0 + 1 / 3 and record["log"][1]["seconds"] == 0.1235
    assert str(tmp_path) not in json.dumps(record)
    (out / "baseline.seed3.json.gz").write_bytes(file.read_bytes())  # under another name
    (out / "baseline.seed4.json.gz").write_bytes(file.read_bytes()[:-20])
    (out / "baseline.seed5.json.gz.part").write_bytes(b"")  # a call ended while writing
    assert set(loss_records.kept(out, said.append)) == {case}
    assert "baseline.seed3.json.gz: damaged (it holds another training" in said[0]
    assert "baseline.seed4.json.gz: damaged (" in said[1] and len(said) == 2
    assert len(record["log"]) == 802
    trained(logs, case, loss=2.0, steps=3)  # ranks of a killed call wrote it too
    with pytest.raises(ValueError, match="expected 800 steps, each once, found 3 lines"):
        loss_records.write(out, logs, case, METHOD, {})


def test_a_rank_ends_with_the_process_that_it_obeys(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(BaseException):
        pass

    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", end)
    ours, theirs = mp.Pipe()
    seat = gpu_rank.Seat(theirs)
    ours.send(("go", 3, False))
    seat.before(None)
    seat.after({"seconds": 0.1})
    ours.close()
    with pytest.raises(Ended, match="1"):
        seat.after({"seconds": 0.1})


def test_a_study_goes_on_in_the_same_way_alone(tmp_path: Path) -> None:
    asked = Namespace(out=tmp_path, method=METHOD)
    record: dict[Any, Any] = {losses.Case("baseline", 0): {"method": vars(METHOD)}}
    gpu_losses._held_to(asked, record)
    record = {losses.Case("baseline", 0): {"method": {**vars(METHOD), "steps": 400}}}
    with pytest.raises(ValueError, match="baseline seed 0 was trained in another way .steps 400"):
        gpu_losses._held_to(asked, record)


# ---- pairs and budgets, without a training


class StandInJob:
    """Ranks that answer at once; a training takes ``seconds`` of a fake clock."""

    def __init__(self, clock: Clock, seconds: float, dies: bool) -> None:
        self._clock, self._seconds, self._dies = clock, seconds, dies
        self.timeout, self.closed, self._steps = 0.0, False, 0

    def answers(self) -> list[Any]:
        if self._steps and self._seconds > self.timeout:
            self._clock.now += self.timeout
            raise JobError(f"no answer within {self.timeout:.0f} s")
        if self._steps and self._dies:
            raise JobError("0.log: RuntimeError: out of memory")
        self._clock.now += self._seconds if self._steps else 0
        return ["over"] if self._steps else ["steps"]

    def tell(self, word: str, steps: int, empty: bool) -> None:
        assert word == "go" and not empty
        self._steps = steps

    def close(self) -> None:
        self.closed = True


class Clock:
    """Replaces the module time in the runner."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Run a study of stand-ins; return the runner, its output and the forked trainings."""
    clock = Clock()
    monkeypatch.setattr(loss_runner, "time", clock)
    jobs: list[StandInJob] = []
    forked: list[str] = []
    settings: dict[str, Any] = {}

    def specs_of(case: losses.Case, *_: Any) -> losses.Case:
        trained(tmp_path / "logs", case, loss=2.0 + (case.name != "baseline") * 1e-3, steps=40)
        return case

    def start(_: Any, case: losses.Case, timeout: float) -> StandInJob:
        forked.append(str(case))
        jobs.append(StandInJob(clock, settings["seconds"], str(case) in settings["dies"]))
        return jobs[-1]

    monkeypatch.setattr(losses, "specs_of", specs_of)
    monkeypatch.setattr(Job, "start", start)

    def run(
        budget: float, seeds: list[int], seconds: float = 2.0, dies: Sequence[str] = ()
    ) -> tuple[Any, list[str], list[str]]:
        settings.update(seconds=seconds, dies=dies)
        said: list[str] = []
        forked.clear()
        asked = Namespace(
            out=tmp_path / "out", logs=tmp_path / "logs", deadline=clock.now + budget,
            timeout=60.0, cpu=True,
        )  # fmt: skip
        turns = losses.turns_of(["baseline", "recommended"], seeds)
        found = loss_records.kept(asked.out, said.append)
        left = [own for turn in turns if (own := tuple(c for c in turn if c not in found))]
        runner = loss_runner.Runner(asked, TINY, None, left, said.append)
        runner.run()
        assert all(job.closed for job in jobs)
        return runner, said, list(forked)

    return run


def seeds_in(out: Path) -> list[str]:
    return sorted(file.name.removesuffix(".json.gz") for file in out.iterdir())


def test_a_call_begins_only_pairs_that_end_in_its_budget(
    runs: Callable[..., Any], tmp_path: Path
) -> None:
    # a pair takes 4 s, and 8 s are reserved for the end
    runner, said, forked = runs(18.0, [0, 1, 2, 3])
    assert runner.time_is_up and not runner.failed and len(forked) == 4
    assert said[-1] == "10 s are left: 4 trainings are for a later call"
    assert len(seeds_in(tmp_path / "out")) == 4
    (tmp_path / "out/recommended.seed0.json.gz").write_bytes(b"damaged")
    runner, said, forked = runs(1000.0, [0, 1, 2, 3])
    assert not runner.time_is_up and "recommended.seed0.json.gz: damaged" in said[0]
    assert forked == [
        "recommended seed 0",
        *(f"{name} seed {seed}" for seed in (2, 3) for name in ("baseline", "recommended")),
    ]
    assert len(seeds_in(tmp_path / "out")) == 8
    assert not list((tmp_path / "logs").glob("*/*/seed*"))  # no second copy is kept
    for _, record in loss_records.kept(tmp_path / "out", said.append).items():
        assert record["seconds"]["pair"] > 0
    lines = gpu_losses.verdicts(loss_records.kept(tmp_path / "out", said.append))
    assert lines == ["recommended: gap +0.049 ± 0.000 % over 4 seeds; at most 0.1 %: met"]


def test_a_pair_that_time_cuts_off_is_made_anew(runs: Callable[..., Any], tmp_path: Path) -> None:
    for seeds in ([0], [0, 1]):
        runner, said, _ = runs(25.0, seeds, seconds=50.0)
        assert runner.time_is_up and not runner.failed and not (tmp_path / "out").exists()
        assert "time is up: baseline seed 0 and recommended seed 0 ended" in said
    runner, said, forked = runs(1000.0, [0, 1])
    assert not runner.time_is_up and len(forked) == 4 and len(seeds_in(tmp_path / "out")) == 4


def test_a_rank_that_dies_ends_its_pair_and_two_of_them_the_call(
    runs: Callable[..., Any], tmp_path: Path
) -> None:
    runner, said, forked = runs(1e6, [0, 1], dies=["baseline seed 0"])
    assert runner.failed == 1 and len(forked) == 4
    told = "baseline seed 0 and recommended seed 0 FAILED: 0.log: RuntimeError"
    assert any(line.startswith(told) for line in said), said
    assert seeds_in(tmp_path / "out") == ["baseline.seed1", "recommended.seed1"]
    every = [f"recommended seed {seed}" for seed in range(9)]
    runner, said, forked = runs(1e6, [2, 3, 4, 5], dies=every)
    assert runner.failed == 2 and "2 pairs failed: no other one begins" in said[-1]
    assert len(forked) < 8


# ---- the script, on CPUs


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import prepare_data

    prefix = tmp_path_factory.mktemp("data") / "text"
    words = ["--output", str(prefix), "--max-bytes", "60000", "--valid-fraction", "0.2"]
    assert prepare_data.main(words) == 0
    return prefix


def test_what_does_not_fit_is_said_before_anything_runs(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--cpu", "--tiny", "--data", str(data), "--out", str(tmp_path / "out")]
    asked = gpu_losses.parse(words)
    assert asked.eval_tokens == asked.text.valid < gpu_losses.EVAL_TOKENS
    for more, said in (
        (["--eval-tokens", "9999999"], "expected at most"),
        (["--steps", "50", "--evaluations", "3", "--eval-tokens", "64"], "a multiple of 3"),
        (["--arms", "recommended"], "expected baseline first"),
        (["--data", str(tmp_path / "none")], "no such file"),
    ):
        with pytest.raises(SystemExit):
            gpu_losses.parse([*words, *more])
        assert said in capsys.readouterr().err


@pytest.mark.nightly
def test_losses_on_cpus(
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Resumed calls: time ran out, a rank died, a file was damaged; nothing is trained twice."""
    out = tmp_path / "losses"
    words = ["--cpu", "--tiny", "--steps", "20", "--seeds", "0", "1", "--samples", "1", "--data",
        str(data), "--out", str(out), "--evaluations", "2", "--eval-tokens", "2048"]  # fmt: skip
    arms = ["--arms", "baseline", "lossless", "again"]
    assert gpu_losses.main([*words, *arms, "--budget", "0"]) == gpu_losses.TIME_IS_UP
    begin = loss_runner.Pair.begin

    def killing(pair: loss_runner.Pair) -> None:
        begin(pair)
        if losses.Case("baseline", 0) in pair.jobs:
            pair.jobs[losses.Case("baseline", 0)].processes[1].kill()

    with monkeypatch.context() as patch:
        patch.setattr(loss_runner.Pair, "begin", killing)
        assert gpu_losses.main([*words, *arms]) == 1
    said = capsys.readouterr().out
    assert "baseline seed 0 and lossless seed 0 FAILED: " in said
    assert seeds_in(out) == ["again.seed0", "again.seed1", "baseline.seed1", "lossless.seed1"]
    (out / "lossless.seed1.json.gz").write_bytes(b"damaged")
    assert gpu_losses.main([*words, *arms]) == 0
    said = capsys.readouterr().out
    assert "baseline seed 1" not in said and "lossless seed 1 is over" in said
    for name in ("lossless", "again"):  # the order of sums is fixed on a CPU
        assert f"{name}: gap +0.000 ± 0.000 % over 2 seeds; at most 0.1 %: met" in said
    assert sum(file.stat().st_size for file in out.iterdir()) < 2**17
    summary = loss_records.read(out / "lossless.seed0.json.gz")[1]["ledger"][-1]
    assert summary["summary"] and summary["dimensions"]["zero"]["forward"]["ratio"] > 1.2
    began = time.monotonic()
    assert gpu_losses.main([*words, *arms]) == 0  # nothing is trained twice
    assert "begin" not in capsys.readouterr().out and time.monotonic() - began < 60
