"""scripts/benchmarks/bench_training.py: arms, pairing, stored cells."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks import bench_training, count_bytes
from benchmarks.training_bench import (
    cells,
    kept,
    machine,
    measure,
    picture,
    report,
    ring,
    runners,
    session,
    turns,
    worker,
)
from doc_pages import bits
from hybridcomp.collectives import native_nbytes
from hybridcomp.config import load_config
from hybridcomp.dimensions import DIMENSIONS
from tests.paths import SCRIPTS
from tests.ranks import RankPool
from tests.scripts_on_ranks import run_python

SIZES = cells.Sizes(layers=2, width=64, length=32, divide_batch=4, warm=2, steps=3)


# ---- arms and cells


@pytest.mark.parametrize("layout", list(cells.LAYOUTS))
def test_every_block_of_a_layout_is_one_that_acts(layout: str, tmp_path: Path) -> None:
    arms = cells.arms_of(layout)
    assert arms[0].name == cells.REFERENCE and len({arm.name for arm in arms}) == len(arms)
    presets = {"bound", *cells.PRESETS} if layout != "tp2d" else {"8 bits", "lossless"}
    assert {"native fp32", *presets} <= {arm.name for arm in arms}
    peers = ("dp2", "asymmetric", "ddp", "fsdp2", "hsdp")
    assert any(arm.peer for arm in arms) == (layout in peers)
    dimensions = [name for name in DIMENSIONS if name in cells.LAYOUTS[layout].dimensions]
    assert len(dimensions) == len(cells.LAYOUTS[layout].dimensions)
    for arm in arms:
        settings = cells.settings_of(layout, arm, SIZES, tmp_path / "ledger.jsonl")
        assert settings["bf16"]["enabled"] == ("fp32" not in arm.name.split())
        block = load_config(settings)
        assert (block is None) == (arm.block is None)
        if block is not None:
            assert all(block.active(name) for name in dimensions), arm


def by_name(layout: str, name: str) -> cells.Arm:
    return next(arm for arm in cells.arms_of(layout) if arm.name == name)


def test_torchs_engines_are_told_where_the_block_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers are torch's, no deltas where nothing is kept, the block in the environment."""
    names = [arm.name for arm in cells.arms_of("fsdp2")]
    assert "delta" not in names and names[-1] == "peer bf16"
    assert "peer qgz" not in [arm.name for arm in cells.arms_of("ddp")]
    monkeypatch.delenv("HYBRIDCOMP_CONFIG", raising=False)
    config = tmp_path / "c.json"
    for name, layout in ((cells.REFERENCE, "ddp"), ("bound", "dp2"), ("bound", "fsdp2")):
        arm = by_name(layout, name)
        settings = cells.settings_of(layout, arm, SIZES, tmp_path / "ledger.jsonl")
        config.write_text(json.dumps(settings))
        worker.name_block(cells.command_of(layout, arm, SIZES, config, tmp_path / "text", 0))
        told = os.environ.pop("HYBRIDCOMP_CONFIG", None)
        assert told == (str(config) if layout == "fsdp2" else None)


def test_commands_start_what_the_arm_needs(tmp_path: Path) -> None:
    arms = {arm.name: arm for arm in cells.arms_of("dp2")}
    config, data = tmp_path / "c.json", tmp_path / "text"

    def command(name: str) -> list[str]:
        return cells.command_of("dp2", arms[name], SIZES, config, data, 0)

    assert command(cells.REFERENCE)[1] == "train_gpt"
    assert command("recommended")[:2] == ["-m", "hybridcomp.run"]
    peer = command("peer qgz")
    assert peer[1] == "benchmarks.train_peer" and peer[-6:] == [
        "--method", "qgz", "--per-node", "1", "--start", "2",
    ]  # fmt: skip
    peer = cells.command_of("ddp", by_name("ddp", "peer fp16"), SIZES, config, data, 0)
    assert peer[1] == "benchmarks.train_peer" and peer[-8:-6] == ["--engine", "ddp"]
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


def reduced(members: list[int] | None) -> tuple[Any, ...]:
    """Reduce over a ring through each function that engines call; return sums and bytes sent."""
    sent = 0

    def counted(tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
        nonlocal sent
        sent += tensor.nbytes
        return isend(tensor, *rest, **named)

    isend = dist.isend
    natives = {name: getattr(dist, name) for name in ring.NAMES if hasattr(dist, name)}
    with mock.patch.multiple(dist, **natives):
        ring.install()
        group = None if members is None else dist.new_group(members)
        if members is not None and dist.get_rank() not in members:
            return 0, [], []
        ranks = dist.get_world_size(group)
        values = torch.arange(12.0) * (1 + dist.get_rank())
        one, other = torch.empty(12 // ranks), torch.empty(12 // ranks)
        with mock.patch.object(dist, "isend", counted):
            dist.reduce_scatter_tensor(one, values, group=group)
        average = {"op": dist.ReduceOp.AVG, "group": group, "async_op": True}
        assert dist.reduce_scatter_tensor(output=other, input=values, **average).wait()
        with pytest.raises(ValueError, match="expected a sum or an average"):
            dist.reduce_scatter_tensor(other.clone(), values, op=dist.ReduceOp.MAX, group=group)
    return sent, one.tolist(), other.tolist()


@pytest.mark.parametrize("members", [None, [1, 2]])
def test_a_ring_sums_and_sends_what_nccls_does(members: list[int] | None) -> None:
    """``tests/training/test_wire.py`` checks the bytes of gloo's reduce-scatter."""
    with RankPool(4) as pool:
        found = pool.run(reduced, members)
    own = list(range(4)) if members is None else members
    total = sum(1 + rank for rank in own)
    for place, rank in enumerate(own):
        sent, summed, averaged = found[rank]
        share = 12 // len(own)
        expected = [total * float(n) for n in range(place * share, (place + 1) * share)]
        assert summed == expected and averaged == [value / len(own) for value in expected]
        assert sent == native_nbytes.reduce_scatter_nbytes(12, torch.float32, len(own))


def test_headers_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"Inter-|\n face |bytes packets\n  eth0: 9 9 0 0 0 0 0 0 {1000 + 3 * 66} 3 0 0 0 0 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda _: text)
    assert (worker.sent_nbytes("eth0"), worker.payload_nbytes("eth0")) == (1198, 1000)
    assert worker.payload_nbytes("lo") == 0


def test_counted_bytes_are_held_to_what_is_told_and_expected() -> None:
    arms = {arm.name: arm for arm in cells.arms_of("hpz")}
    case = count_bytes.Case("hpz", "hpz", arms["recommended"], False)
    step, first = {"payload": 1.5e6, "inside": 0.5e6}, {"payload": 1.875e6, "inside": 0.5e6}
    told = {"wire_MB": 12.75, "raw_MB": 30.0, "inter_MB": 10.5, "inter_raw_MB": 27.0}
    records = [{"dimensions": {"dp": {"forward": told}}}, {"summary": True, "dimensions": None}]
    numel = round(8 * 1.5e6 / (12.516 / 2))
    row = count_bytes.figures(case, [[first, first, step]] * 4, records, numel, 0.0)
    assert row["link_MB"] == 3.5 and row["inside_MB"] == 1.0 and row["told_MB"] == 4.25
    assert row["off"] == pytest.approx(4.5 / 4.25 - 1) and row["native_MB"] == 10.0
    assert (row["told_link_MB"], row["native_link_MB"]) == (3.5, 9.0)
    assert row["off_expected"] == pytest.approx(0.0, abs=1e-3)
    assert count_bytes.missed([row]) == ["hpz recommended"]
    assert count_bytes.missed([{**row, "off": 0.009}]) == []
    assert count_bytes.missed([{**row, "off": 0.0, "off_expected": -0.021}]) == ["hpz recommended"]
    shown = "| ZeRO 3 with hpZ | recommended | 2x2 | 3.500 | 1.000 | 4.250 |"
    assert shown in count_bytes.table([row])


def test_secondary_copies_are_held_to_the_most_that_a_host_may_send() -> None:
    (case,) = (
        case for case in count_bytes.cases()
        if case.layout == "hpz_2x4" and case.arm.name == "secondary, 0.0001"
    )  # fmt: skip
    settings = cells.settings_of(case.layout, case.arm, SIZES, Path("ledger.jsonl"))
    assert settings["optimizer"]["params"]["lr"] == 1e-4
    assert settings["zero_optimization"]["zero_hpz_partition_size"] == 4
    assert settings["compression"]["zero"] == {"secondary": "exact"}
    steps = [{"payload": 9e6, "inside": 0.0}] * count_bytes.WARM + [{"payload": 1e6, "inside": 0.0}]
    for bits_, is_missed in ((3.55, False), (3.65, True)):
        numel = round(8 * 1e6 / bits_)
        row = count_bytes.figures(case, [steps] * 8, [], numel, 0.0)
        assert bool(count_bytes.missed([row])) == is_missed
        assert "<= 3.6" in count_bytes.table([row])


def test_what_is_counted_are_jobs_of_the_table_native_and_compressed() -> None:
    found = list(count_bytes.cases())
    counted = {name for name, job in bits.JOBS.items() if job.counted}
    assert {case.job for case in found} >= counted - {"activations"}  # those are tp's and pp's
    for layout in {case.layout for case in found}:
        own = {case.arm.name for case in found if case.layout == layout}
        assert own >= {cells.REFERENCE, "none", "recommended"}


def test_a_failed_rank_says_why() -> None:
    with pytest.raises(runners.CellError, match="status 1: ConfigError: dp: no"):
        runners.parse(1, "Traceback\n  File x\nConfigError: dp: no\nsomething after\n")
    with pytest.raises(runners.CellError, match=r"status 1: --tp 2: expected a multiple$"):
        runners.parse(1, "--tp 2: expected a multiple\nBENCH []\n")
    assert runners.parse(0, 'noise\nBENCH [{"seconds": 1.0}]\n') == [{"seconds": 1.0}]


#: a rank whose steps append its name to a file; the job of FAIL_AT fails at that step
RANK = """
import argparse, os, sys, time
name, log, count, fail_at = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
sys.path.insert(0, sys.argv[5])
from benchmarks.training_bench import worker
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
    """Return the states of its running ranks as in proc(5): T if stopped."""
    running = [process for process in job._team._processes if process.poll() is None]
    stats = [Path(f"/proc/{process.pid}/stat").read_text() for process in running]
    return [stat.rpartition(")")[2].split()[0] for stat in stats]


def test_jobs_take_turns_and_one_that_fails_ends_alone(tmp_path: Path) -> None:
    layout, log = cells.Layout("x", "2", ("dp",)), tmp_path / "log"
    with session.Session(runners.Loopback(), layout, 30) as side:
        jobs = [side.start(words(*each)) for each in (("a", log, 3), ("b", log, 3, 1))]
        none = side.start(["-c", "raise SystemExit('ValueError: not even one')"])
        assert not log.exists()  # no job begins before its turn
        assert none.over and not any(job.over for job in jobs)
        for job in (jobs[0], jobs[1], jobs[1], jobs[0]):
            job.step()
        assert log.read_text().split() == ["a0", "a0", "b0", "b0", "a1", "a1"]
        # waiting jobs are stopped, including threads; the failed one has to end
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


#: a benchmark that is killed while its rank waits, stopped
KILLED = """
import os, signal, sys
from benchmarks.training_bench import cells, runners, session
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


# ---- stored cells


class FakeJob:
    """A training whose steps take the time of their bytes."""

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
    """Eight processes: native bf16 twice and two more; it is stored once, each part has its own."""
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


# ---- reading, and the command line


def test_rounds_and_seconds_of_coding_are_those_of_a_rank_and_step(tmp_path: Path) -> None:
    row = {"codec_ms": 600.0, "messages": 24, "native_messages": 4}
    ways = {"forward": {**row, "codec": "blockint(bits=8)"}, "backward": {**row, "codec": "mpc"}}
    file = tmp_path / "ledger.jsonl"
    summary = {"summary": True, "step": 5, "dimensions": {"tp": ways}}
    file.write_text("{}\n" + json.dumps(summary) + "\n")
    assert measure.coded(file, 2) == pytest.approx({"codec_s": 0.12, "rounds": 2 + 2})
    assert measure.coded(tmp_path / "none", 2) == {"codec_s": 0.0, "rounds": 0.0}


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text_train.idx").touch()
    found = bench_training.parse(["--data", str(tmp_path / "text"), "--loopback"])
    assert found.r == [] and found.unshaped and "3d" not in found.layouts
    with pytest.raises(SystemExit):
        bench_training.parse(["--data", str(tmp_path / "none")])
    assert "prepare_data.py writes one" in capsys.readouterr().err


# ---- bf16 without CPU instructions


PRODUCTS = """
import torch
import torch.nn.functional as F
from benchmarks.training_bench import products

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
    """In a separate process, since the override stays installed."""
    assert not run_python("-c", PRODUCTS, cwd=SCRIPTS).returncode
