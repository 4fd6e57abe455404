"""benchmarks/gpu_losses.py: trainings, pairs and budgets, records."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import re
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_losses
from benchmarks.training_bench import gpu_losses as losses
from benchmarks.training_bench import (
    gpu_rank,
    loss_cost,
    loss_pair,
    loss_records,
    loss_runner,
)
from benchmarks.training_bench.forked import JobError
from hybridcomp.config import load_config
from tests.scripts.benchmarks.made_losses import METHOD, TINY, trained

# ---- trainings


def test_a_step_has_16k_tokens_and_evaluations_lie_in_the_last_fifth() -> None:
    assert METHOD.tokens_per_step == 16384 and METHOD.eval_batches == 32
    steps = [n for n in range(1, 801) if n >= METHOD.eval_from and n % METHOD.eval_every == 0]
    assert steps == [680, 720, 760, 800]
    shorter = METHOD.shorter(505.5)
    assert shorter.steps == 500 and shorter.steps % shorter.eval_every == 0
    assert METHOD.differences({**vars(METHOD), "lr": 1e-3}) == ["lr 0.001 there, 0.0003 here"]
    for schedule, name in losses.SCHEDULES.items():
        method = losses.Method(**{**vars(METHOD), "schedule": schedule})
        for arm in losses.BLOCKS:
            settings = losses.settings_of(losses.Case(arm, 0), method, Path("ledger.jsonl"))
            assert settings["scheduler"]["type"] == name
            assert settings["scheduler"]["params"]["warmup_type"] == "linear"
            assert (load_config(settings) is None) == (losses.BLOCKS[arm] is None)


def test_pairs_of_a_seed_come_first() -> None:
    turns = list(losses.turns_of(["baseline", "recommended", "delta"], [3, 5], nccl=True))
    told = [" and ".join(map(str, turn)) for turn in turns]
    assert told == [
        "baseline seed 3 over NCCL and recommended seed 3 over NCCL",
        "baseline seed 3 and recommended seed 3",
        "baseline seed 5 and recommended seed 5",
        "delta seed 3",
        "delta seed 5",
    ]


def test_cost_is_that_of_the_arithmetic() -> None:
    assert loss_cost.parameters("124M", 50257) == pytest.approx(123.6e6, rel=1e-3)
    # 6 x 123.6 M weights and 57 M of attention for each of 16,384 tokens
    assert loss_cost.step_flops(METHOD, 50257) == pytest.approx(13.1e12, rel=0.01)
    assert loss_cost.step_seconds(METHOD, 50257, 2, 0.35) == pytest.approx(0.0756, rel=0.01)
    assert loss_cost.equal_steps(METHOD) == 800 + 4 * 32 / 3
    assert "4 pairs of 800 steps" in loss_cost.told(METHOD, 50257, 4)


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
    nccl = losses.Case("recommended", 3, nccl=True)
    trained(logs, nccl, loss=2.0, steps=4)
    loss_records.write(out, logs, nccl, METHOD, {"start": 1.0, "pair": 6.0})
    (out / "baseline.seed3.json.gz").write_bytes(file.read_bytes())  # under another name
    (out / "baseline.seed4.json.gz").write_bytes(file.read_bytes()[:-20])
    (out / "baseline.seed5.json.gz.part").write_bytes(b"")  # a call ended while writing
    assert set(loss_records.kept(out, said.append)) == {case, nccl}
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


def test_losses_through_memory_are_held_against_nccls() -> None:
    def log(*values: float) -> dict[str, Any]:
        steps = [{"step": n, "loss": value} for n, value in enumerate(values, 1)]
        return {"log": [{"run": {}}, *steps]}

    records = {
        losses.Case("recommended", 0, nccl=True): log(3.0, 2.5),
        losses.Case("baseline", 0, nccl=True): log(3.0, 2.4),
        losses.Case("baseline", 0): log(3.0, 2.5, 1.0),
    }
    one = "baseline seed 0 over NCCL: the same loss through memory in 1 of 2 steps"
    # time ran out before recommended was trained through GPU memory
    assert loss_records.held_against_nccl(records) == [one]
    records[losses.Case("recommended", 0)] = log(3.0, 2.5, 1.0)
    assert "in 2 of 2 steps" in loss_records.held_against_nccl(records)[0]


def test_a_study_goes_on_in_the_same_way_alone(tmp_path: Path) -> None:
    asked = Namespace(out=tmp_path, method=METHOD, fit=0)
    record = {losses.Case("baseline", 0): {"method": vars(METHOD.shorter(400))}}
    with pytest.raises(ValueError, match="baseline seed 0 was trained in another way .steps 400"):
        gpu_losses.going_on(asked, record)
    asked.fit = 4
    assert gpu_losses.going_on(asked, record).steps == 400 and asked.fit == 0


# ---- pairs and budgets, without a training


class StandInJob:
    """Ranks that answer at once; a step takes ``seconds`` of a fake clock."""

    def __init__(
        self, clock: Clock, steps: int, seconds: float, slower: float, dies_at: int
    ) -> None:
        """``slower``: extra seconds per step after the timed steps."""
        self._clock, self._left, self._seconds, self._dies_at = clock, steps, seconds, dies_at
        self._slower = slower
        ours, self._theirs = mp.Pipe()
        self.pipes, self.timeout, self.closed = [ours], 0.0, False
        self._done = 0
        self._theirs.send(("steps", []))

    def answers(self) -> list[Any]:
        word = self.pipes[0].recv()
        if word[0] == "dies":
            raise JobError("0.log: RuntimeError: out of memory")
        return [word, word]

    def tell(self, word: str, steps: int, empty: bool) -> None:
        assert word == "go" and not empty
        seconds = self._seconds * (self._slower if self._done else 1)
        self._clock.now += steps * seconds / 2  # both trainings of a pair run at once
        self._done += steps
        self._left -= steps
        if self._dies_at and self._done >= self._dies_at:
            self._theirs.send(("dies",))
        elif self._left:
            self._theirs.send(("steps", [{"seconds": self._seconds}] * steps))
        else:
            self._theirs.send(("over", {}))

    def close(self) -> None:
        self.closed = True


class Clock:
    """Replaces the module time in the modules that run pairs."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Run a study of stand-ins; return the runner, its output and every forked pair."""
    clock = Clock()
    for module in (loss_pair, loss_runner):
        monkeypatch.setattr(module, "time", clock)
    jobs: list[StandInJob] = []
    forked: list[tuple[tuple[losses.Case, ...], int]] = []

    def pair_of(_: Any, cases: Any, specs: Any, steps: int, __: float) -> loss_pair.Pair:
        forked.append((cases, steps))
        own: dict[Any, Any] = {}
        for case in cases:
            dies = settings["dies"].get((case.name, case.seed), 0)
            seconds, slower = settings["seconds"], settings["slower"]
            own[case] = StandInJob(clock, steps, seconds, slower, dies)
            jobs.append(own[case])
            loss = 2.0 + (case.name != "baseline") * 1e-3
            trained(tmp_path / "logs", case, loss=loss, steps=steps)
        return loss_pair.Pair(own, steps, last_gate=False)

    settings: dict[str, Any] = {}
    monkeypatch.setattr(loss_pair, "pair_of", pair_of)
    monkeypatch.setattr(losses, "specs_of", lambda *_: [])

    def run(budget: float, seeds: list[int], **more: Any) -> tuple[Any, list[str], Any]:
        for name, usual in (("seconds", 0.1), ("slower", 1.0), ("dies", {})):
            settings[name] = more.pop(name, usual)
        said: list[str] = []
        forked.clear()
        asked = Namespace(
            out=tmp_path / "out", logs=tmp_path / "logs", deadline=clock.now + budget, beside=1,
            fit=0, timeout=60.0, cpu=True, nccl_steps=0, vocabulary=257,
        )  # fmt: skip
        vars(asked).update(more)
        turns = losses.turns_of(["baseline", "recommended"], seeds, nccl=False)
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
    # a pair of 40 steps of 0.1 s takes 4 s, and 8 s are reserved for the end
    runner, said, forked = runs(18.0, [0, 1, 2, 3])
    assert runner.time_is_up and not runner.failed
    assert len(forked) == 2 and "would need" in said[-1] and "for a later call" in said[-1]
    assert seeds_in(tmp_path / "out") == [
        "baseline.seed0", "baseline.seed1", "recommended.seed0", "recommended.seed1",
    ]  # fmt: skip
    (tmp_path / "out/recommended.seed0.json.gz").write_bytes(b"damaged")
    runner, said, forked = runs(1000.0, [0, 1, 2, 3])
    assert not runner.time_is_up and "recommended.seed0.json.gz: damaged" in said[0]
    assert [cases for cases, _ in forked] == [
        (losses.Case("recommended", 0),),
        *((losses.Case("baseline", seed), losses.Case("recommended", seed)) for seed in (2, 3)),
    ]
    assert len(seeds_in(tmp_path / "out")) == 8
    assert not list((tmp_path / "logs").glob("*/*/seed*"))  # no second copy is kept
    for _, record in loss_records.kept(tmp_path / "out", said.append).items():
        assert record["seconds"]["pair"] > 0
    lines = gpu_losses.verdicts(loss_records.kept(tmp_path / "out", said.append))
    assert lines == ["recommended: gap +0.049 ± 0.000 % over 4 seeds; at most 0.1 %: met"]


def test_a_pair_that_proves_too_slow_is_ended_at_once(
    runs: Callable[..., Any], tmp_path: Path
) -> None:
    runner, said, forked = runs(20.0, [0, 1], seconds=1.0)
    assert runner.time_is_up and len(forked) == 1 and not (tmp_path / "out").exists()
    assert "1000 ms a step: a pair takes" in said[-1] and "4 trainings are for a later" in said[-1]


def test_a_pair_that_time_cuts_off_is_made_anew(runs: Callable[..., Any], tmp_path: Path) -> None:
    runner, said, _ = runs(25.0, [0, 1], slower=20.0)
    assert runner.time_is_up and not (tmp_path / "out").exists()
    assert said[-1].startswith("time is up: baseline seed 0 and recommended seed 0 ended")
    runner, said, forked = runs(1000.0, [0, 1])
    assert not runner.time_is_up and len(forked) == 2 and len(seeds_in(tmp_path / "out")) == 4


def test_fit_takes_fewer_steps_and_says_so(runs: Callable[..., Any], tmp_path: Path) -> None:
    runner, said, forked = runs(100.0, [0, 1], seconds=1.0, fit=2)
    assert runner.method.steps < 40 and runner.method.steps % 10 == 0
    assert any("steps for 40, so that 2 pairs end" in line for line in said), said
    assert [steps for _, steps in forked][0] == 40
    assert {steps for _, steps in forked[1:]} == {runner.method.steps}
    record = loss_records.kept(tmp_path / "out", said.append)[losses.Case("baseline", 0)]
    assert record["method"]["steps"] == runner.method.steps
    runner, said, forked = runs(120.0, [5], seconds=10.0, fit=2)  # not enough for a fifth of them
    assert runner.time_is_up and runner.method.steps == 40 and "a pair takes" in said[-1]


def test_a_rank_that_dies_ends_its_pair_and_two_of_them_the_call(
    runs: Callable[..., Any], tmp_path: Path
) -> None:
    runner, said, forked = runs(1e6, [0, 1], dies={("recommended", 0): 10})
    assert runner.failed == 1 and len(forked) == 2
    told = "baseline seed 0 and recommended seed 0 FAILED: recommended seed 0: 0.log: RuntimeError"
    assert any(line.startswith(told) for line in said), said
    assert seeds_in(tmp_path / "out") == ["baseline.seed1", "recommended.seed1"]
    every = {("recommended", seed): 1 for seed in range(9)}
    runner, said, forked = runs(1e6, [2, 3, 4, 5], dies=every)
    assert runner.failed == 2 and "2 pairs failed: no other one begins" in said[-1]
    assert len(forked) < 4


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
    assert gpu_losses.main([*words, "--plan"]) == 0
    assert "8 pairs of 800 steps" in capsys.readouterr().out
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
    arms = ["--nccl-steps", "3", "--arms", "baseline", "lossless", "again"]
    assert gpu_losses.main([*words, *arms, "--budget", "0"]) == gpu_losses.TIME_IS_UP
    go_on = loss_pair.Pair.go_on

    def killing(pair: loss_pair.Pair) -> None:
        go_on(pair)
        case = next(iter(pair.jobs))
        if pair.told == pair.steps and case == losses.Case("baseline", 0):
            pair.jobs[case].processes[1].kill()

    with monkeypatch.context() as patch:
        patch.setattr(loss_pair.Pair, "go_on", killing)
        assert gpu_losses.main([*words, *arms]) == 1
    said = capsys.readouterr().out
    assert "baseline seed 0 and lossless seed 0 FAILED: baseline seed 0" in said
    assert seeds_in(out) == [
        "again.seed0", "again.seed1", "baseline.seed1", "lossless.seed1", "nccl.baseline.seed0",
        "nccl.lossless.seed0",
    ]  # fmt: skip
    (out / "lossless.seed1.json.gz").write_bytes(b"damaged")
    assert gpu_losses.main([*words, *arms]) == 0
    said = capsys.readouterr().out
    assert "baseline seed 1 is over" not in said and "lossless seed 1 is over" in said
    for name in ("lossless", "again"):  # the order of sums is fixed on a CPU
        assert f"{name}: gap +0.000 ± 0.000 % over 2 seeds; at most 0.1 %: met" in said
    assert sum(file.stat().st_size for file in out.iterdir()) < 2**17
    for name in ("baseline", "lossless"):  # here gloo replaces NCCL
        assert f"{name} seed 0 over NCCL: the same loss through memory in 3 of 3 steps" in said
    summary = loss_records.read(out / "lossless.seed0.json.gz")[1]["ledger"][-1]
    assert summary["summary"] and summary["dimensions"]["zero"]["forward"]["ratio"] > 1.2
    began = time.monotonic()
    assert gpu_losses.main([*words, *arms]) == 0  # nothing is trained twice
    assert "begin" not in capsys.readouterr().out and time.monotonic() - began < 60
