"""scripts/bench_training.py and project_scale.py: what is run, paired, kept, fitted, projected."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_training
import project_scale
import pytest
from projection import fit, neox
from training_bench import (
    cells,
    chapters,
    kept,
    losses,
    machine,
    measure,
    paper,
    picture,
    report,
    runners,
    session,
    turns,
    worker,
)

from hybridcomp.config import load_config
from hybridcomp.policy import DIMENSIONS
from tests.paths import SCRIPTS

SIZES = cells.Sizes(layers=2, width=64, length=32, divide_batch=4, warm=2, steps=3)


# ---- what is run


@pytest.mark.parametrize("layout", list(cells.LAYOUTS))
def test_every_block_of_a_layout_is_one_that_acts(layout: str, tmp_path: Path) -> None:
    arms = cells.arms_of(layout)
    assert arms[0].name == cells.REFERENCE and len({arm.name for arm in arms}) == len(arms)
    assert {"native fp32", "bound", *cells.PRESETS} <= {arm.name for arm in arms}
    assert any(arm.peer for arm in arms) == (layout in ("dp2", "asymmetric"))
    dimensions = [name for name in DIMENSIONS if name in cells.LAYOUTS[layout].dimensions]
    assert len(dimensions) == len(cells.LAYOUTS[layout].dimensions)
    for arm in arms:
        settings = cells.settings_of(layout, arm, SIZES, tmp_path / "ledger.jsonl")
        assert settings["bf16"]["enabled"] == ("fp32" not in arm.name.split())
        block = load_config(settings)
        assert (block is None) == (arm.block is None)
        if block is not None:
            assert all(block.active(name) for name in dimensions), arm


def test_commands_start_what_the_arm_needs(tmp_path: Path) -> None:
    arms = {arm.name: arm for arm in cells.arms_of("dp2")}
    config, data = tmp_path / "c.json", tmp_path / "text"

    def command(name: str) -> list[str]:
        return cells.command_of("dp2", arms[name], SIZES, config, data, 0)

    assert command(cells.REFERENCE)[1] == "train_gpt"
    assert command("recommended")[:2] == ["-m", "hybridcomp.run"]
    peer = command("peer qgz")
    assert peer[1] == "train_peer" and peer[-6:] == [
        "--method", "qgz", "--per-node", "1", "--start", "2",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no arm 'fast'"):
        cells.arms_of("dp2", ["fast"])


def test_worker_times_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = iter(range(0, 1000, 7))
    monkeypatch.setattr(worker, "sent_nbytes", lambda _: next(counter))
    steps: list[dict[str, float]] = []
    trainer = argparse.Namespace(share=argparse.Namespace(global_batch=8))
    watched = worker.watched(lambda _, batches: float(batches), steps)
    assert watched(trainer, 3) == 3.0 and watched(trainer, 4) == 4.0
    assert [(step["sent"], step["loss"], step["tokens"]) for step in steps] == [
        (7, 3.0, 8), (7, 4.0, 8),
    ]  # fmt: skip
    assert worker.sent_nbytes is not None and all(step["seconds"] >= 0 for step in steps)


def test_a_failed_rank_says_why() -> None:
    with pytest.raises(runners.CellError, match="status 1: ConfigError: dp: no"):
        runners.parse(1, "Traceback\n  File x\nConfigError: dp: no\nsomething after\n")
    with pytest.raises(runners.CellError, match=r"status 1: --tp 2: expected a multiple$"):
        runners.parse(1, "--tp 2: expected a multiple\nBENCH []\n")
    assert runners.parse(0, 'noise\nBENCH [{"seconds": 1.0}]\n') == [{"seconds": 1.0}]


#: a rank whose step appends to a file who makes it; the job of FAIL_AT fails in that step
RANK = """
import argparse, os, sys, time
name, log, count, fail_at = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
sys.path.insert(0, sys.argv[5])
from training_bench import worker
import json
steps = []
def step(self, n):
    if n == fail_at and os.environ["RANK"] == "0":
        raise SystemExit("ValueError: enough")
    time.sleep(60 if n == fail_at else 0.01)
    with open(log, "a") as file:
        file.write(f"{name}{n} ")
    return float(n)
trainer = argparse.Namespace(share=argparse.Namespace(global_batch=8))
around = worker.watched(step, steps)
for n in range(count):
    around(trainer, n)
print(worker.PREFIX + json.dumps(steps))
"""


def words(name: str, log: Path, count: int, fail_at: int = -1) -> list[str]:
    return ["-c", RANK, name, str(log), str(count), str(fail_at), str(SCRIPTS)]


def states(job: turns.Job) -> list[str]:
    """Of its ranks that have not ended, as proc(5) has them: T where stopped."""
    running = [process for process in job._team._processes if process.poll() is None]
    stats = [Path(f"/proc/{process.pid}/stat").read_text() for process in running]
    return [stat.rpartition(")")[2].split()[0] for stat in stats]


def test_jobs_take_turns_and_one_that_fails_ends_alone(tmp_path: Path) -> None:
    layout, log = cells.Layout("x", "2", ("dp",)), tmp_path / "log"
    with session.Session(runners.Loopback(), layout, 30) as side:
        jobs = [side.start(words(*each)) for each in (("a", log, 3), ("b", log, 3, 1))]
        none = side.start(["-c", "raise SystemExit('ValueError: not even one')"])
        assert not log.exists()  # nobody begins before it is told so
        assert none.over and not any(job.over for job in jobs)
        for job in (jobs[0], jobs[1], jobs[1], jobs[0]):
            job.step()
        assert log.read_text().split() == ["a0", "a0", "b0", "b0", "a1", "a1"]
        # who waits is stopped, threads and all; the one that failed has to end
        assert states(jobs[0]) == ["T", "T"] and "T" not in states(jobs[1])
        assert jobs[1].over and not jobs[0].over
        assert [[step["loss"] for step in rank] for rank in jobs[0].said] == [[0.0, 1.0]] * 2
        for job in jobs:
            job.step()
        assert not jobs[0].over and states(jobs[0]) == ["T", "T"]  # even after its last step
        found = side.steps(jobs[0])
        assert jobs[0].over
        assert [[(s["loss"], s["sent"]) for s in rank] for rank in found] == [
            [(0.0, 0.0), (1.0, 0.0), (2.0, 0.0)]
        ] * 2
        with pytest.raises(runners.CellError, match="status 1: ValueError: enough"):
            side.steps(jobs[1])
        with pytest.raises(runners.CellError, match="not even one"):
            side.steps(none)


#: a bench that is killed while its rank waits, stopped
KILLED = """
import os, signal, sys
from training_bench import cells, runners, session
with session.Session(runners.Loopback(), cells.Layout("x", "1", ("dp",)), 30) as side:
    job = side.start(sys.argv[1:])
    print(job._team._processes[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_rank_outlives_a_bench_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, *words("a", tmp_path / "log", 3)]
    ended = subprocess.run(command, cwd=SCRIPTS, stdout=subprocess.PIPE, text=True)
    stat, deadline = Path("/proc", ended.stdout.strip(), "stat"), time.monotonic() + 60
    assert ended.returncode == -signal.SIGKILL
    while alive := stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert not alive


def test_trainings_that_wait_end_with_the_bench(tmp_path: Path) -> None:
    layout = cells.Layout("x", "1", ("dp",))
    with session.Session(runners.Loopback(), layout, 30) as side:
        job = side.start(words("a", tmp_path / "log", 3))
        assert not job.over
        job.close()
        with pytest.raises(runners.CellError, match="the bench ended before"):
            job.over = True
            side.steps(job)


# ---- what is kept


class FakeJob:
    """A training of which every step takes what its bytes take."""

    def __init__(self, command: list[str], network: FakeNetwork) -> None:
        self.command, self._network = command, network
        self.said: list[runners.Steps] = [[], []]
        self.fails = "hybridcomp.run" in command

    def step(self) -> None:
        network = self._network
        wire = 8e6 / network.rate if network.rate else 0.0
        network.turns.append((self, network.rate))
        for rank, steps in enumerate(self.said):
            steps.append({"seconds": 1.0 + rank + wire, "sent": 1e6, "loss": 2.0, "tokens": 8})


class FakeNetwork:
    """A runner and its session."""

    def __init__(self) -> None:
        self.rate: int | None = None
        self.jobs: list[FakeJob] = []
        self.turns: list[tuple[FakeJob, int | None]] = []

    def shape(self, rate: int | None) -> None:
        self.rate = rate

    def start(self, command: list[str]) -> FakeJob:
        self.jobs.append(FakeJob(command, self))
        return self.jobs[-1]

    def steps(self, job: FakeJob) -> list[runners.Steps]:
        if job.fails:
            raise runners.CellError("status 1: no such thing")
        return job.said


Fakes = list[FakeNetwork]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[measure.Bench, Fakes]:
    fakes: Fakes = []

    @contextmanager
    def network(*_: Any) -> Iterator[FakeNetwork]:
        fakes.append(FakeNetwork())
        yield fakes[-1]

    @contextmanager
    def side_by_side(runner: FakeNetwork, *_: Any) -> Iterator[FakeNetwork]:
        yield runner

    monkeypatch.setattr(measure, "network", network)
    monkeypatch.setattr(measure, "Session", side_by_side)
    monkeypatch.setattr(machine, "busy", lambda: 0.01)
    options = measure.Options(
        data=tmp_path / "text", out=tmp_path / "out", sizes=SIZES, seed=0, busy=0.1, patience=0,
        force=False, loopback=False, timeout=10, processes=8,
    )  # fmt: skip
    return measure.Bench(options, lambda _: None), fakes


def test_arms_take_turns_and_are_measured_once(bench: tuple[measure.Bench, Fakes]) -> None:
    arms = cells.arms_of("dp2", ["native fp32", "recommended"])
    records = bench[0].run("dp2", arms, [None, 0.25, 4.0], 2)
    # a step takes as long as its slowest rank, 2 s; 1 MB in r times that
    assert {r["ratio"]: r["rate"] for r in records} == {None: None, 0.25: 16e6, 4.0: 1e6}
    assert len(bench[1]) == 6 and all(len(fake.jobs) == 4 for fake in bench[1][2:])
    free, reference, wide, failing = bench[1][2].jobs
    order = bench[1][2].turns
    looks = SIZES.warm + measure.LOOKS
    assert order[:looks] == [(free, None)] * looks
    one = [(free, None), *((job, 16e6) for job in (reference, wide, failing))]
    assert order[looks:][:8] == [*one, one[0], *one[:0:-1]]
    assert len(order) == looks + 4 * (SIZES.warm + SIZES.steps)
    (found,) = [r for r in records if (r["arm"], r["ratio"], r["repetition"]) == (
        "native fp32", 4.0, 0)]  # fmt: skip
    assert found["steps"] == found["native"] == [10.0] * 3 and found["compute"] == [2.0] * 3
    assert bench[0].run("dp2", arms, [None, 0.25, 4.0], 2) == records and len(bench[1]) == 6
    there = bench[0].kept.everything()
    assert sorted(map(str, there)) == sorted(map(str, records)) and there[0]["ratio"] is None
    rows = report.rows_of(there)
    assert [row["arm"] for row in rows if "failed" in row] == ["recommended"] * 3
    assert "no such thing" in report.table(rows, "dp2") and "4 (4.00)" in report.table(rows, "dp2")


def test_arms_that_do_not_fit_beside_come_in_parts(bench: tuple[measure.Bench, Fakes]) -> None:
    """Eight processes: native bf16 twice and two more; it is kept once, each part has its own."""
    names = ["native fp32", "peer ddp", "peer qgz"]
    records = bench[0].run("dp2", cells.arms_of("dp2", names), [1.0], 1)
    assert [len(fake.jobs) for fake in bench[1]] == [4, 3]
    assert [record["arm"] for record in records] == [cells.REFERENCE, *names]
    bench[0].run("dp2", cells.arms_of("dp2", [*names, "peer loco"]), [1.0], 1)
    assert [len(fake.jobs) for fake in bench[1]] == [4, 3, 3]


def test_cells_of_fewer_steps_stay_and_of_too_few_are_measured_again(
    bench: tuple[measure.Bench, Fakes],
) -> None:
    arms = cells.arms_of("dp2", ["native fp32"])
    bench[0].run("dp2", arms, [1.0], 1)

    def other(steps: int) -> measure.Bench:
        sizes = replace(SIZES, warm=5, steps=steps)
        return measure.Bench(replace(bench[0].options, sizes=sizes), bench[0].say)

    assert len(other(2).run("dp2", arms, [1.0], 1)) == 2 and len(bench[1]) == 1
    assert [len(cell["steps"]) for cell in other(4).kept.everything()] == [3, 3]
    other(4).run("dp2", arms, [1.0], 1)
    assert [len(cell["steps"]) for cell in bench[0].kept.everything()] == [4, 4]
    assert len(bench[1]) == 2


def test_a_long_session_says_how_far_it_is(
    bench: tuple[measure.Bench, Fakes], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    bench[0].say = said.append
    bench[0].run("dp2", cells.arms_of("dp2", []), [1.0], 1)
    assert len(said) == 2 and "side by side" in said[0] and said[1].startswith("1/1 dp2 r1")
    monkeypatch.setattr(measure, "QUIET_S", 0.0)
    bench[0].run("dp2", cells.arms_of("dp2", ["native fp32"]), [4.0], 1)
    assert "dp2 r4: 1 of 2 started" in said and "dp2 r4: 5 of 5 steps" in said


def test_links_of_another_kind_are_measured_again(
    bench: tuple[measure.Bench, Fakes], monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = cells.arms_of("dp2", [])
    bench[0].run("dp2", arms, [1.0], 1)
    assert len(bench[0].kept.everything()) == 1
    monkeypatch.setattr(kept, "BURST_S", 1e-3)
    assert bench[0].kept.everything() == []
    bench[0].run("dp2", arms, [1.0], 1)
    assert len(bench[1]) == 2 and len(bench[0].kept.everything()) == 1


def test_a_reference_that_fails_ends_the_bench(
    bench: tuple[measure.Bench, Fakes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "command_of", lambda *_: ["hybridcomp.run"])
    with pytest.raises(runners.CellError, match="dp2: native bf16 itself fails: status 1: no such"):
        bench[0].run("dp2", cells.arms_of("dp2", []), [None], 1)


def test_a_busy_machine_is_not_timed(
    bench: tuple[measure.Bench, Fakes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "busy", lambda: 0.5)
    with pytest.raises(SystemExit, match="50% of the cores are busy"):
        bench[0].run("dp2", cells.arms_of("dp2", []), [None], 1)
    assert machine.wait_until_quiet(0.1, 0, force=True) == 0.5
    assert machine.room() >= 2


def test_bytes_are_of_the_busiest_node_and_seconds_of_the_slowest_rank() -> None:
    steps = [[{"seconds": 1.0 + rank + 9 * (n < 1), "sent": 10.0 * rank, "loss": 1.0, "tokens": 8}
              for n in range(3)] for rank in range(4)]  # fmt: skip
    found = measure.summary(steps, per_node=2, length=32)
    assert found.pop("steps") == [13.0, 4.0, 4.0]
    assert found == {"seconds": 4.0, "sent": 20.0, "tokens": 256, "loss": 1.0}
    with pytest.raises(runners.CellError, match="found none that is timed"):
        measure.summary([[], []], per_node=1, length=32)


def test_own_arms_have_the_same_color_in_every_picture() -> None:
    few = picture.colors_of(["recommended", cells.REFERENCE])
    many = picture.colors_of([arm.name for arm in cells.arms_of("dp2")])
    assert all(few[arm] == many[arm] for arm in picture.OWN)
    assert len(set(many.values())) == len(many)
    named = {arm.name for layout in cells.LAYOUTS for arm in cells.arms_of(layout)}
    assert set(picture.OWN) <= named


# ---- the table


def record(
    arm: str, steps: list[float], sent: float, ratio: float | None = 4.0, n: int = 0
) -> dict[str, Any]:
    return {
        "layout": "dp2", "arm": arm, "ratio": ratio, "repetition": n, "steps": steps,
        "sent": sent, "rate": 8_000_000 if ratio else None, "tokens": 100, "loss": 2.0,
        "codec_s": 0.0, "rounds": 0.0, "busy": 0.0, "burst_ms": 0.25, "native_sent": 4e6,
        "native": [5.0, 10.0, 20.0][: len(steps)], "compute": [1.0, 1.0, 4.0],
    }  # fmt: skip


def test_speed_ups_are_of_the_same_turn_and_held_against_the_ideal() -> None:
    assert report.ideal(4.0, 4.0) == 2.5 and report.ideal(1.0, 1.0) == 1.0
    records = [
        record(cells.REFERENCE, [5.0, 10.0, 20.0], 4e6),
        record("recommended", [2.5, 4.0, 10.0], 1e6),
        record("recommended", [5.0, 4.0], 1e6, n=1),
    ]  # fmt: skip
    native, row = report.rows_of(records)
    assert (row["low"], row["speed_up"], row["high"]) == (1.0, 2.0, 2.5)
    assert (row["pairs"], row["repetitions"], row["seconds"]) == (5, 2, 4.0)
    # 4 MB at 1 MB/s take 4 s, the compute of these turns 1 s
    assert row["r_measured"] == native["r_measured"] == 4.0 and row["compute_s"] == 1.0
    assert row["saving"] == 4.0 and row["share"] == pytest.approx(2.0 / 2.5)
    text = report.table([native, row], "dp2")
    assert "| pairs |" in text and text.splitlines()[-1].endswith("| 5 |")
    assert "2.00x (1.00 to 2.50) | 2.50: 80%" in text and "1.00x | 1.00: 100%" in text
    (uncounted,) = report.rows_of([record(cells.REFERENCE, [5.0], 0.0, ratio=None)])
    assert uncounted["saving"] is None and "share" not in uncounted
    assert "| - |" in report.table([uncounted], "dp2")


@pytest.mark.parametrize(("count", "out"), [(1, 0), (5, 0), (8, 0), (9, 1), (16, 3), (20, 5)])
def test_interval_of_a_median_leaves_out_what_chance_allows(count: int, out: int) -> None:
    """Half of the values lie below the median: how many do is binomial."""
    assert report.outside(count) == out


# ---- losses at equal bytes


def loss_row(label: str, sent: float, gap: float, half: float | None = 0.1) -> dict[str, Any]:
    shift = 0.05 * len(label) / 10  # what seeds do to one run they do about as much to another
    return {
        "label": label, "gap": gap, "gap_interval": half, "steps": 1000,
        "seeds": [0] if half is None else [0, 1, 2],
        "gaps": [gap] if half is None else [gap - shift, gap, gap + shift],
        "ledger": {name: {"forward": {"wire_MB": sent / 2}} for name in ("dp", "zero")},
    }  # fmt: skip


def test_ours_is_chosen_by_bytes_before_losses() -> None:
    rows = [
        loss_row("recommended", 100, 0.0), loss_row("3 bits, deltas 3", 50, 0.5),
        loss_row("2 bits, deltas 3", 40, 0.1), loss_row("peer qgz", 60, 1.0),
        loss_row("peer sdp4bit", 45, 0.14), loss_row("peer powersgd-4", 10, 3.0),
        loss_row("peer loco", 55, 0.2), loss_row("peer onebit-adam", 70, -3.0),
        loss_row("peer onebit-adam-exact", 200, -3.5),
    ]  # fmt: skip
    found = {duel["peer"]: duel for duel in losses.duels_of(rows)}
    assert found["qgz"]["ours"] == "3 bits, deltas 3" and found["qgz"]["winner"] == "ours"
    assert found["sdp4bit"]["winner"] == "neither" and found["loco"]["winner"] == "peer"
    assert found["powersgd-4"]["ours"] is None
    assert "all of ours send more" in losses.table(list(found.values()))
    assert "onebit-adam-exact" not in found and found["onebit-adam"]["winner"] == "peer"
    (said,) = losses.optimizers(list(found.values()))
    assert "Uncompressed it ends at -3.50 ± 0.10 %, so its compression costs +0.50 %" in said
    assert found["qgz"]["further_gap"] == pytest.approx(0.5)
    assert (found["qgz"]["seeds_ours"], found["loco"]["seeds_ours"]) == (3, 0)
    alone = losses.apart(loss_row("a", 1, 0.0, None), loss_row("b", 1, 1.0, None))
    assert (alone["winner"], alone["further_interval"]) == ("one seed", None)


# ---- the cost model


def measured(layout: str, r: float, arm: str, sent: float, codec: float) -> dict[str, Any]:
    compute, slowdown = {"dp2": (1.0, 1.1), "pp2": (0.5, 1.4)}[layout]
    rate, rounds = 8 * 4e6 / (r * compute), {"recommended": 3, "naive-zfp": 9}.get(arm, 0)
    seconds = compute + slowdown * 8 * sent / rate + 0.8 * codec + 0.01 * rounds
    return {"layout": layout, "r": r, "arm": arm, "rate": rate, "sent_MB": sent / 1e6,
            "codec_s": codec, "rounds": rounds, "seconds": seconds,
            "compute_s": 1.25 * compute}  # fmt: skip


def rows() -> list[dict[str, Any]]:
    sizes = {cells.REFERENCE: (4e6, 0.0), "recommended": (0.5e6, 0.05), "naive-zfp": (1e6, 0.2)}
    return [
        measured(layout, r, arm, *size)
        for layout in ("dp2", "pp2") for r in (0.25, 1.0, 4.0) for arm, size in sizes.items()
    ]  # fmt: skip


def test_model_finds_the_constants_and_is_checked_on_other_cells() -> None:
    alone = {**rows()[0], "layout": "3d"}
    unshaped = {**rows()[0], "r": None, "rate": None}
    fitted, held = fit.split(fit.usable([*rows(), alone, unshaped]))
    assert len(fitted) == 12 and len(held) == 6
    assert not any(row in held for row in fitted)
    model = fit.fit(fitted)
    assert model.base == pytest.approx({"dp2": 0.8, "pp2": 0.8}, rel=1e-4)
    assert model.slowdown == pytest.approx({"dp2": 1.1, "pp2": 1.4}, rel=1e-4)
    assert (model.coding, model.round) == pytest.approx((0.8, 0.01), rel=1e-4)
    assert model.overlap == 0
    held[0]["seconds"] *= 2
    found = fit.report(model, fitted, held)
    assert found["fitted"]["worst"] < 1e-4 and found["held_out"]["within_15_percent"] == 5
    assert found["held_out"]["worst"] == pytest.approx(0.5, abs=1e-3)
    with pytest.raises(ValueError, match="expected at least 7 cells"):
        fit.fit(fitted[:3] + fitted[6:9])


def test_rounds_and_seconds_of_coding_are_those_of_a_rank_and_step(tmp_path: Path) -> None:
    row = {"codec_ms": 600.0, "messages": 24, "native_messages": 4}
    ways = {"forward": {**row, "codec": "blockint(bits=8)"}, "backward": {**row, "codec": "mpc"}}
    file = tmp_path / "ledger.jsonl"
    file.write_text("{}\n" + json.dumps({"summary": True, "dimensions": {"tp": ways}}) + "\n")
    assert measure.coded(file, 10) == pytest.approx({"codec_s": 0.12, "rounds": 2 + 2})
    assert measure.coded(tmp_path / "none", 10) == {"codec_s": 0.0, "rounds": 0.0}


def test_negative_constants_are_not_found() -> None:
    import numpy as np

    table = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert fit.non_negative(table, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])


def test_projection_has_the_volumes_of_the_model() -> None:
    cluster, base = neox.Cluster(latency=0.0), neox.Scheme("baseline")
    one = neox.step(cluster, 24, base, 32, 1.0, 0.0, 1.0)
    two = neox.step(cluster, 48, base, 32, 1.0, 0.0, 1.0)
    assert one.dp == 0 and two.samples == 2 * one.samples
    # 856 M gradients a GPU, half of them to the other replica and back, at a quarter of 25 GB/s
    assert two.dp == pytest.approx(2 * 0.5 * 20.55e9 / 24 * 4 / 6.25e9)
    # a boundary is 12.58 M values, cut over four tensor ranks, forward and backward
    assert one.pp == pytest.approx(32 * 2 * 2048 * 6144 / 4 * 4 / 6.25e9)
    short = neox.step(cluster, 48, base, 16, 1.0, 0.0, 1.0)
    assert short.dp == pytest.approx(two.dp / 2) and short.compute == two.compute
    for width in (32, 16):
        naive = next(s for s in neox.schemes(width, 1, 1, 1) if s.name == "naive-zfp")
        saved = neox.step(cluster, 48, naive, width, 1.0, 0.0, 0.0)
        assert saved.dp == pytest.approx((two if width == 32 else short).dp * 8 / width)
    assert next(s for s in neox.schemes(16, 1, 1, 1) if s.name == "zhybrid").tp is None
    with pytest.raises(ValueError, match="multiple of 24"):
        neox.step(cluster, 30, base, 32, 1.0, 0.0, 1.0)


def test_projection_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench_training.json"
    file.write_text(json.dumps([*rows(), {"layout": "dp2", "arm": "x", "failed": "why"}]))
    assert project_scale.main([str(file), "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "held out: 6 cells" in said and "the paper, up to 192" in said
    made = json.loads((tmp_path / "out" / "projection.json").read_text())
    assert (
        len(made["projected"]) == 2 * 4 * 5 and (tmp_path / "out" / "projection.png").stat().st_size
    )
    wrong = [
        {**row, "seconds": row["seconds"] * (3 if row["arm"] == "naive-zfp" else 1)}
        for row in rows()
    ]
    file.write_text(json.dumps(wrong))
    assert project_scale.main([str(file), "--out", str(tmp_path / "out")]) == 2


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text_train.idx").touch()
    found = bench_training.parse(["--data", str(tmp_path / "text"), "--loopback"])
    assert found.r == [] and found.unshaped and "3d" not in found.layouts
    with pytest.raises(SystemExit):
        bench_training.parse(["--data", str(tmp_path / "none")])
    assert "prepare_data.py writes one" in capsys.readouterr().err


# ---- chapters


def bench_rows() -> list[dict[str, Any]]:
    cells_ = [record(cells.REFERENCE, [5.0], 4e6), record("recommended", [2.0], 1e6),
              record("naive-zfp", [4.0], 2e6), record("native fp32", [4.0], 8e6),
              record("fp32 naive-zfp", [3.2], 2e6)]  # fmt: skip
    return report.rows_of([{**cell, "layout": "3d"} for cell in cells_])


def test_chapters_say_what_was_measured(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    for chapter in (chapters.speed_chapter, paper.paper_chapter, chapters.equal_bytes_chapter):
        with pytest.raises(FileNotFoundError, match="run scripts/bench_training.py"):
            chapter(source, out)
    (source / "bench_training.json").write_text(json.dumps(bench_rows()))
    speed = chapters.speed_chapter(source, out)
    assert "1 of 2 compressed cells reach it" not in speed and "of 3 compressed cells" in speed
    assert "Not measured: dp2, " in speed and "![" not in speed  # one rate: nothing to draw
    schemes = paper.paper_chapter(source, out)
    assert "| 4 | naive-zfp | +25.0 % | +25.0 % | not trained | +23.6 %, +22.5 %" in schemes
    assert "| 4 | zhybrid | not measured | not measured |" in schemes
    (source / "losses" / "3d").mkdir(parents=True)
    assert "Losses were not trained." in schemes
    gap = {"label": "naive-zfp", "gap": 0.5, "gap_interval": 0.25}
    ways = {"pp": {"forward": {"raw_MB": 5.0, "wire_MB": 5.0}},
            "tp": {"forward": {"raw_MB": 5.0, "wire_MB": 5.0},
                   "backward": {"raw_MB": 5.0, "wire_MB": 2.0}}}  # fmt: skip
    runs = [{**gap, "steps": 300, "seeds": [0], "ledger": ways}, {**gap, "ledger": {}}]
    (source / "losses" / "3d" / "comparison.json").write_text(json.dumps({"runs": runs}))
    schemes = paper.paper_chapter(source, out)
    assert "+25.0 % | +0.50 ± 0.25 |" in schemes and "of 300 steps" in schemes
    assert "seed 0 only" in schemes and "messages of pp are below `min_bytes`" in schemes
    (source / "losses" / "equal_bytes.json").write_text(
        json.dumps(losses.duels_of([loss_row("recommended", 5, 0.0), loss_row("peer qgz", 6, 1.0)]))
    )
    assert "| qgz | 6 | +1.00 ± 0.10 | recommended | 5 |" in chapters.equal_bytes_chapter(
        source, out
    )
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows()))
    assert project_scale.main([str(file), "--out", str(source)]) == 0
    assert "| held out | 6 | 6 |" in chapters.projection_chapter(source, out)


def test_what_was_not_measured_anew_stays_in_the_chapter(tmp_path: Path) -> None:
    """Whole tables of a layout and rate are replaced, and pictures follow."""
    pytest.importorskip("matplotlib")

    def measured(layout: str, ratio: float | None, arms: dict[str, float]) -> list[dict[str, Any]]:
        made = [record(arm, [seconds], 4e6, ratio) for arm, seconds in arms.items()]
        return report.rows_of([{**cell, "layout": layout} for cell in made])

    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    arms = {cells.REFERENCE: 5.0, "recommended": 2.0, "bound": 3.0}
    before = [
        row for layout in ("dp2", "pp2") for r in (1.0, 4.0) for row in measured(layout, r, arms)
    ]
    (source / "bench_training.json").write_text(json.dumps(before))
    assert "![tokens a second, dp2](speed_dp2.png)" in chapters.speed_chapter(source, out)
    pictures = {name: (out / f"speed_{name}.png").read_bytes() for name in ("dp2", "pp2")}
    fresh = [*measured("pp2", 4.0, {cells.REFERENCE: 5.0, "recommended": 1.0}),
             *measured("pp2", None, {cells.REFERENCE: 5.0})]  # fmt: skip
    (source / "bench_training.json").write_text(json.dumps(fresh))
    speed = chapters.speed_chapter(source, out)
    written = json.loads((out / "speed.json").read_text())
    assert [(row["layout"], row["r"], row["arm"]) for row in written] == [
        *(("dp2", r, arm) for r in (1.0, 4.0) for arm in arms),
        ("pp2", None, cells.REFERENCE),
        *(("pp2", 1.0, arm) for arm in arms),
        ("pp2", 4.0, cells.REFERENCE),
        ("pp2", 4.0, "recommended"),
    ]
    assert written[-1]["seconds"] == 1.0 and "## dp2" in speed
    assert (out / "speed_dp2.png").read_bytes() == pictures["dp2"]
    assert (out / "speed_pp2.png").read_bytes() != pictures["pp2"]


# ---- bf16 without instructions for it


PRODUCTS = """
import torch
import torch.nn.functional as F
from training_bench import products

torch.manual_seed(0)
left, right, bias = torch.randn(7, 9), torch.randn(9, 5), torch.randn(5)
query = torch.randn(1, 2, 6, 8, dtype=torch.bfloat16)
short = [values.bfloat16().requires_grad_() for values in (left, right, bias)]
wide = [values.detach().float().requires_grad_() for values in short]
mixed = F.scaled_dot_product_attention(*[query.float()] * 3, is_causal=True).bfloat16()
double = torch.mm(left.double(), right.double())
wide_of, seen = products._wide, []
products._wide = lambda values: (seen.append(values.dtype), wide_of(values))[1]
products.install()
for function in (torch.mm, lambda a, b: torch.bmm(a[None], b[None])[0]):
    assert function(*short[:2]).equal(torch.mm(*wide[:2]).bfloat16())
found, expected = torch.addmm(short[2], *short[:2]), torch.addmm(wide[2], *wide[:2]).bfloat16()
assert found.dtype == torch.bfloat16 and found.equal(expected)
found.sum().backward()
expected.sum().backward()
assert all(a.grad.equal(b.grad.bfloat16()) for a, b in zip(short, wide))
assert F.scaled_dot_product_attention(*[query] * 3, is_causal=True).equal(mixed)
assert torch.mm(left.double(), right.double()).equal(double)
assert {torch.bfloat16, torch.float32, torch.float64} == set(seen)
assert seen.count(torch.bfloat16) >= 8
"""


def test_bf16_products_are_those_of_fp32_rounded_once() -> None:
    """In a process of its own: what is installed stays."""
    subprocess.run([sys.executable, "-c", PRODUCTS], cwd=SCRIPTS, check=True)
