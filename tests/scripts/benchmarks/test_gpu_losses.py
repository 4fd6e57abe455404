"""benchmarks/gpu_losses.py: trainings, pairs and budgets, gaps."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_losses
from benchmarks.shared import TIME_IS_UP
from benchmarks.training_bench import forked, gpu_rank
from benchmarks.training_bench import gpu_losses as losses
from benchmarks.training_bench.forked import Job, JobError
from hybridcomp.config import load_config

METHOD = losses.Method("124M", 800, 8, 1, 3e-4, 4, 2**19, "text")
TINY = losses.Method("tiny", 40, 1, 1, 3e-4, 2, 2048, "text")


def test_a_step_has_16k_tokens_and_evaluations_lie_in_the_last_fifth() -> None:
    assert METHOD.tokens_per_step == 16384 and METHOD.eval_batches == 32
    steps = [n for n in range(1, 801) if n >= METHOD.eval_from and n % METHOD.eval_every == 0]
    assert steps == [680, 720, 760, 800]
    for arm in losses.BLOCKS:
        settings = losses.settings_of(losses.Case(arm, 0), METHOD, Path("ledger.jsonl"))
        assert settings["scheduler"]["params"]["warmup_type"] == "linear"
        assert (load_config(settings) is None) == (losses.BLOCKS[arm] is None)


def test_pairs_of_a_seed_come_first() -> None:
    pairs = losses.pairs_of(["baseline", "recommended", "delta"], [3, 5])
    assert [" and ".join(map(str, pair)) for pair in pairs] == [
        "baseline seed 3 and recommended seed 3",
        "baseline seed 5 and recommended seed 5",
        "delta seed 3",
        "delta seed 5",
    ]


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
    asked = Namespace(out=tmp_path / "out", method=METHOD)
    for _ in range(2):
        gpu_losses.hold_to_method(asked)
    asked.method = TINY
    with pytest.raises(ValueError, match="trainings differ .model '124M' there, 'tiny' here; step"):
        gpu_losses.hold_to_method(asked)


# ---- pairs and budgets, without a training


class Clock:
    """Replaces the module time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class StandInJob:
    """Ranks that answer at once; a training takes ``seconds`` of a fake clock."""

    def __init__(
        self, clock: Clock, seconds: float, dies: bool, finish: Callable[[], None]
    ) -> None:
        self._clock, self._seconds, self._dies, self._finish = clock, seconds, dies, finish
        self.timeout, self.closed, self._steps = 0.0, False, 0

    def answers(self) -> None:
        if self._steps and self._seconds > self.timeout:
            self._clock.now += self.timeout
            raise JobError(f"no answer within {self.timeout:.0f} s")
        if self._steps and self._dies:
            raise JobError("0.log: RuntimeError: out of memory")
        if self._steps:
            self._clock.now += self._seconds
            self._finish()

    def tell(self, word: str, steps: int, empty: bool) -> None:
        assert word == "go" and not empty
        self._steps = steps

    def close(self) -> None:
        self.closed = True


def write_log(folder: Path, loss: float, steps: int) -> None:
    """Write the log of a training, as its first rank does."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"run": {}}, *({"step": n} for n in range(1, steps + 1))]
    for line in lines[-2:]:
        line["valid_losses"] = [loss, loss + 0.1]
    text = "".join(json.dumps(line) + "\n" for line in [*lines, {"summary": True}])
    (folder / "loss.jsonl").write_text(text)


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Run a study of stand-ins; return its status, its lines and the forked trainings."""
    clock, jobs, asked = Clock(), list[StandInJob](), Namespace()

    def start(_: Any, case: losses.Case, timeout: float) -> StandInJob:
        def finish() -> None:
            write_log(case.folder(tmp_path), 2.0 + (case.name != "baseline") * 1e-3, TINY.steps)

        asked.forked.append(str(case))
        jobs.append(StandInJob(clock, asked.seconds, str(case) in asked.dies, finish))
        return jobs[-1]

    def run(
        budget: float, seeds: list[int], seconds: float = 2.0, dies: Sequence[str] = ()
    ) -> tuple[int, list[str], list[str]]:
        said = list[str]()
        monkeypatch.setattr(gpu_losses, "say", said.append)
        asked.__dict__.update(
            arms=["baseline", "recommended"], seeds=seeds, seconds=seconds, dies=dies, forked=[],
            budget=budget, out=tmp_path, timeout=60.0, method=TINY, cpu=True,
        )  # fmt: skip
        status = gpu_losses.main([])
        assert all(job.closed for job in jobs)
        return status, said, asked.forked

    monkeypatch.setattr(gpu_losses, "time", clock)
    monkeypatch.setattr(gpu_losses, "parse", lambda _: asked)
    monkeypatch.setattr(forked, "server", lambda timeout: None)
    monkeypatch.setattr(forked, "environment", lambda gpu: {})
    monkeypatch.setattr(losses, "specs_of", lambda case, *_: case)
    monkeypatch.setattr(Job, "start", start)
    return run


def test_a_call_begins_only_pairs_that_end_in_its_budget(
    study: Callable[..., Any], tmp_path: Path
) -> None:
    # a pair takes 4 s, and 8 s are reserved for the end
    status, said, trained = study(18.0, [0, 1, 2, 3])
    assert status == TIME_IS_UP and len(trained) == 4
    assert said[-2] == "10 s are left: 2 pairs are for a later call"
    assert said[-1] == "recommended: 2 seeds have both trainings, an interval needs 3"
    (tmp_path / "recommended/seed0/loss.jsonl").write_text('{"step": 1}\n{"st')
    status, said, trained = study(1000.0, [0, 1, 2, 3])
    assert status == 0 and trained == [
        "recommended seed 0",
        *(f"{name} seed {seed}" for seed in (2, 3) for name in ("baseline", "recommended")),
    ]
    assert said[-1] == "recommended: gap +0.049 ± 0.000 % over 4 seeds; at most 0.1 %: met"
    assert study(1000.0, [0, 1, 2, 3])[0] == 0 and not study(1000.0, [0, 1, 2, 3])[2]


def test_a_pair_that_time_cuts_off_is_made_anew(study: Callable[..., Any]) -> None:
    for seeds in ([0], [0, 1]):
        status, said, _ = study(25.0, seeds, seconds=50.0)
        assert status == TIME_IS_UP
        assert "time is up: baseline seed 0 and recommended seed 0 ended" in said


def test_a_rank_that_dies_ends_its_pair_and_two_of_them_the_call(
    study: Callable[..., Any],
) -> None:
    status, said, trained = study(1e6, [0, 1], dies=["baseline seed 0"])
    assert status == 1 and len(trained) == 4
    told = "baseline seed 0 and recommended seed 0 FAILED: 0.log: RuntimeError"
    assert any(line.startswith(told) for line in said), said
    every = [f"recommended seed {seed}" for seed in range(9)]
    status, said, trained = study(1e6, [2, 3, 4, 5], dies=every)
    assert status == 1 and "2 pairs failed: no other one begins" in said and len(trained) == 4


@pytest.mark.parametrize(("gaps", "word"), [
    ([0.30, 0.32, 0.31], "refuted"), ([-0.30, -0.32, -0.31], "met"),
    ([-0.05, 0.05, 0.15], "undecided"),
])  # fmt: skip
def test_verdicts(gaps: list[float], word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_losses, "gaps", lambda *_: gaps)
    assert gpu_losses.verdict("delta", Namespace()).endswith(
        f" over 3 seeds; at most 0.1 %: {word}"
    )


# ---- the script, on CPUs


def test_what_does_not_fit_is_said_before_anything_runs(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--cpu", "--tiny", "--data", str(data), "--out", str(tmp_path / "out")]
    assert gpu_losses.parse(words).eval_tokens < gpu_losses.EVAL_TOKENS
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
def test_losses_on_cpus(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Native and lossless trainings of two seeds, in a second call only what is missing."""
    words = ["--cpu", "--tiny", "--steps", "20", "--samples", "1", "--data", str(data), "--out",
        str(tmp_path), "--evaluations", "2", "--eval-tokens", "2048", "--arms", "baseline",
        "lossless", "again", "--seeds"]  # fmt: skip
    assert gpu_losses.main([*words, "0", "1", "--budget", "0"]) == TIME_IS_UP
    assert gpu_losses.main([*words, "0", "1"]) == 0
    assert gpu_losses.main([*words, "0", "1", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count("baseline seed 0") == said.count("baseline seed 2") == 1
    for name in ("lossless", "again"):  # the order of sums is fixed on a CPU
        assert f"{name}: gap +0.000 ± 0.000 % over 3 seeds; at most 0.1 %: met" in said
    ledger = (tmp_path / "lossless/seed0/ledger.jsonl").read_text().splitlines()
    summary = json.loads(ledger[-1])
    assert summary["summary"] and summary["dimensions"]["zero"]["forward"]["ratio"] > 1.2
