"""scripts/benchmarks/bench_training.py: arms, pairing, stored cells."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks import bench_training
from benchmarks.training_bench import (
    cells,
    kept,
    machine,
    measure,
    report,
    ring,
    runners,
    session,
    turns,
    worker,
)
from hybridcomp.collectives import native_nbytes
from hybridcomp.config import load_config
from hybridcomp.dimensions import DIMENSIONS
from lab import team
from tests.paths import SCRIPTS
from tests.ranks import run_ranks
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


def test_torchs_engines_read_the_block_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


GROUPS = [None, [1, 2]]


def reduced() -> list[tuple[Any, ...]]:
    """Reduce over a ring of each group of ranks; return sums and bytes sent."""
    return [reduced_among(members) for members in GROUPS]


def reduced_among(members: list[int] | None) -> tuple[Any, ...]:
    """Reduce through each function that engines call."""
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


def test_a_ring_sums_and_sends_what_nccls_does() -> None:
    """``tests/training/test_wire.py`` checks the bytes of gloo's reduce-scatter."""
    found = run_ranks(4, reduced)
    for index, members in enumerate(GROUPS):
        own = members or list(range(4))
        total, share = sum(1 + rank for rank in own), 12 // len(own)
        for place, rank in enumerate(own):
            sent, summed, averaged = found[rank][index]
            expected = [total * float(n) for n in range(place * share, (place + 1) * share)]
            assert summed == expected and averaged == [value / len(own) for value in expected]
            assert sent == native_nbytes.reduce_scatter_nbytes(12, torch.float32, len(own))


def test_a_failed_rank_says_why() -> None:
    with pytest.raises(runners.CellError, match="status 1: ConfigError: dp: no"):
        texts = ["said nothing wrong", "Traceback\n  File x\nConfigError: dp: no\nsomething\n"]
        runners.check([team.STOPPED, 1], texts)
    with pytest.raises(runners.CellError, match=r"status 1: --tp 2: expected a multiple$"):
        runners.check([0, 1], ["", "--tp 2: expected a multiple\n"])
    runners.check([0, 0], ["noise", "Error"])


#: a rank whose steps append its name to a file; the job of FAIL_AT fails at that step
RANK = """
import argparse, os, sys, time
name, log, count, fail_at = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
sys.path.insert(0, sys.argv[5])
from benchmarks.training_bench import turns, worker
def step(self, n):
    if n == fail_at and os.environ["RANK"] == "0":
        raise SystemExit("ValueError: enough")
    time.sleep(60 if n == fail_at else 0.01)
    with open(log, "a") as file:
        file.write(f"{name}{n} ")
    return float(n)
trainer = argparse.Namespace(share=argparse.Namespace(global_batch=8))
around = worker.watched(step, turns.Seat())
for n in range(count):
    around(trainer, n)
"""


def words(name: str, log: Path, count: int, fail_at: int = -1) -> list[str]:
    return ["-c", RANK, name, str(log), str(count), str(fail_at), str(SCRIPTS)]


def states(job: turns.Job) -> list[str]:
    """Return the states of its running ranks as in proc(5): T if stopped."""
    running = [process for process in job._team._processes if process.poll() is None]
    stats = [Path(f"/proc/{process.pid}/stat").read_text() for process in running]
    return [stat.rpartition(")")[2].split()[0] for stat in stats]


def test_jobs_take_turns_and_one_that_fails_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "GRACE_S", 1.0)
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
        assert [[(s["loss"], s["sent"], s["tokens"]) for s in rank] for rank in found] == [
            [(0.0, 0.0, 8), (1.0, 0.0, 8), (2.0, 0.0, 8)]
        ] * 2
        assert all(step["seconds"] > 0 for rank in found for step in rank)
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
    options = Namespace(
        data=tmp_path / "text", out=tmp_path / "out", sizes=SIZES, seed=0, busy=0.1, patience=0,
        force=False, loopback=False, timeout=10, processes=8,
    )  # fmt: skip
    return measure.Bench(options), fakes


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
    text = report.table_of(rows, "dp2")
    assert "no such thing" in text and "4 (4.00)" in text


def test_arms_that_do_not_fit_beside_come_in_parts(bench: tuple[measure.Bench, Fakes]) -> None:
    """Eight processes: native bf16 twice and two more; it is stored once, each part has its own."""
    names = ["native fp32", "peer qgz", "peer qgz-qwz"]
    records = bench[0].run("dp2", cells.arms_of("dp2", names), [1.0], 1)
    assert [len(fake.jobs) for fake in bench[1]] == [4, 3]
    assert [record["arm"] for record in records] == [cells.REFERENCE, *names]
    bench[0].run("dp2", cells.arms_of("dp2", [*names, "peer sdp4bit"]), [1.0], 1)
    assert [len(fake.jobs) for fake in bench[1]] == [4, 3, 3]


def test_cells_of_fewer_steps_stay_and_of_too_few_are_measured_again(
    bench: tuple[measure.Bench, Fakes],
) -> None:
    arms = cells.arms_of("dp2", ["native fp32"])
    bench[0].run("dp2", arms, [1.0], 1)

    def other(steps: int) -> measure.Bench:
        sizes = replace(SIZES, warm=5, steps=steps)
        return measure.Bench(Namespace(**{**vars(bench[0].options), "sizes": sizes}))

    assert len(other(2).run("dp2", arms, [1.0], 1)) == 2 and len(bench[1]) == 1
    assert [len(cell["steps"]) for cell in other(4).kept.everything()] == [3, 3]
    other(4).run("dp2", arms, [1.0], 1)
    assert [len(cell["steps"]) for cell in bench[0].kept.everything()] == [4, 4]
    assert len(bench[1]) == 2


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


# ---- reading, and the command line


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
