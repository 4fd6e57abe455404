"""A complete small measurement on real ranks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hybridcomp.channels.accounting.time_saved import TimeSaved
from hybridcomp.codecs import make_codec
from hybridcomp.collectives.topology import Nodes
from hybridcomp.errors import ConfigError, HybridcompError
from hybridcomp.job.together import ending
from hybridcomp.session import closing
from hybridcomp.tools.commands import cli, doctor
from hybridcomp.tools.measure import (
    channels,
    clock,
    coders,
    command,
    kernels,
    links,
    messages,
    options,
    report,
    run,
    trainings,
)
from hybridcomp.tools.measure.block import BlockSize, TransformerBlock
from hybridcomp.tools.measure.clock import HostCallClock, Run
from hybridcomp.tools.measure.run import measure
from hybridcomp.tools.measure.team import MeasuredPart, Team, TimeBudget, sites_of
from hybridcomp.tools.plan.machines import cluster_file
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.rows import Coding, Copy, Rank
from tests.ranks import RunRanks, run_ranks
from tests.tools.measure.test_clock import Told

SMALL = kernels.TimedSizes((32,), (BlockSize(1, 32, 64),), (1 << 12,), (1 << 12,))


@contextlib.contextmanager
def little(stages: tuple[int, ...] = ()) -> Iterator[None]:
    """Use few and small cases, so that a measurement takes a second."""
    codecs = [make_codec("blockint", bits=4), make_codec("blockint"), make_codec("expcode")]
    with (
        mock.patch.object(kernels, "CPU", SMALL),
        mock.patch.object(coders, "settings", lambda: codecs),
        mock.patch.dict(coders.NUMELS, {"cpu": (1 << 10, 1 << 12, 1 << 14)}),
        mock.patch.dict(coders.COPIES, {"cpu": (1 << 12,)}),
        mock.patch.dict(coders.SIDE, {"cpu": 64}),
        mock.patch.object(clock, "LEAST", 1),
        mock.patch.object(clock, "MOST", 2),
        mock.patch.object(links, "LEAST", 1),
        mock.patch.object(links, "MOST", 2),
        mock.patch.object(links, "SIZES", (1 << 12, 1 << 14)),
        mock.patch.object(links, "BUSY_SIZES", (1 << 14,)),
        mock.patch.object(messages, "NUMELS", (1 << 10, 1 << 13)),
        mock.patch.dict(channels.NUMELS, {"cpu": (1 << 10, 1 << 13)}),
        mock.patch.object(trainings, "ZERO_STAGES", stages),
        mock.patch.object(trainings, "LEAST", 1),
    ):
        yield


def measured(ranks_per_node: int, stages: tuple[int, ...] = ()) -> Cluster:
    with little(stages):
        return measure(torch.device("cpu"), 0.3, hierarchy=ranks_per_node)


@pytest.mark.nightly
def test_two_ranks(on_ranks: RunRanks, tmp_path: Path) -> None:
    cluster, other = on_ranks(2, measured, 2, (2,))
    assert cluster == other
    assert (cluster.world_size, cluster.nodes) == (2, 1)
    operations = {row.operation for row in cluster.links}
    assert operations == {"send", *links.COLLECTIVES} == {row.operation for row in cluster.encoded}
    assert {row.beside for row in cluster.links} == {"alone", "compute"}  # no other group
    assert {(row.dimension, row.operation) for row in cluster.channels} == set(channels.MESSAGES)
    assert {row.setting for row in cluster.channels} == {"none", "blockint(bits=8)", "expcode()"}
    assert all(row.seconds.value > 0 < row.direct.value for row in cluster.channels)
    assert {row.setting for row in cluster.codecs} == {
        "blockint(bits=4)", "blockint(bits=8)", "expcode()",
    }  # fmt: skip
    assert {row.rank for row in cluster.kernels} == {0, 1}
    assert all(row.seconds.value > 0 for row in (*cluster.links, *cluster.encoded))
    assert all(rank.flops["fp32"].value > 0 for rank in cluster.ranks)
    assert cluster.made["backend"] == "gloo"
    kept = [row.kept_nbytes for row in cluster.kernels if row.kind == "block_forward"]
    assert min(kept) > 14 * 32 * 64 * 2
    assert [(row.zero_stage, row.blocks, bool(row.block)) for row in cluster.trainings] == [
        (2, trainings.FEW, False), (2, trainings.MANY, False),
        *[(2, trainings.MANY, True)] * len(trainings.STYLES),
    ]  # fmt: skip
    assert all(row.micro.value > 0 and row.last.value > 0 for row in cluster.trainings)
    path = tmp_path / "cluster.json"
    cluster_file.write(cluster, path)
    again = cluster_file.read(path)
    assert cluster_file.to_json(again) == cluster_file.to_json(cluster)
    assert not again.overhead("all_reduce", 2, 1, "expcode()").host.assumed
    parts = again.encoded_parts("all_reduce", "expcode()", "bf16", 5000, 4000, 2, 1)
    assert min(part.value for part in parts) > 0
    extra = again.overhead("send", 2, 1, "expcode()", "pp")
    assert extra != again.overhead("send", 2, 1, "expcode()")  # separate rows from the collectives'


def links_alone(hierarchy: Any) -> Cluster:
    """Measure links, uplinks and channels alone."""
    rows: dict[str, Any] = dict.fromkeys(("kernel_rows", "coding_rows", "copy_rows"), lambda *_: [])
    with little(), mock.patch.multiple(run, message_rows=lambda *_: ([], []), **rows):
        return measure(torch.device("cpu"), 0.3, hierarchy=hierarchy)


def test_four_ranks_on_two_nodes(on_ranks: RunRanks) -> None:
    cluster = on_ranks(4, links_alone, 2)[0]
    assert [rank.node for rank in cluster.ranks] == [0, 0, 1, 1]
    assert {(row.ranks, row.nodes) for row in cluster.links} == {(2, 1), (2, 2), (4, 2)}
    busy = {(row.ranks, row.nodes) for row in cluster.links if row.beside == "groups"}
    assert busy == {(2, 1), (2, 2)}  # the whole job is one group
    of_channels = {(row.ranks, row.nodes, row.beside) for row in cluster.channels}
    assert of_channels == {
        (2, 1, "alone"), (2, 1, "groups"), (2, 2, "alone"), (2, 2, "groups"), (4, 2, "alone")
    }  # fmt: skip
    left = [row.compute_left for row in cluster.links if row.beside == "compute"]
    assert all(one is not None and 0 <= one.low <= one.value <= one.high <= 1 for one in left)
    text = "\n".join(report.lines(cluster))
    assert "4 ranks on 2 nodes" in text
    assert "2 ranks inside a node" in text


def of_hosts() -> list[Coding]:
    """Return a GPU rank's additional fields; here the host is the device."""
    team = Team(torch.device("cpu"), Nodes([0, 0], "the test"))
    with little(), mock.patch.object(coders, "HOST_NUMELS", (1 << 10, 1 << 12)):
        return coders.host_rows(team, TimeBudget(0.2, team).part(1.0, "hosts"))


def test_hosts_of_gpus_code_and_step(on_ranks: RunRanks) -> None:
    rows = on_ranks(2, of_hosts)[0]
    assert {(row.direction, row.dtype) for row in rows} == {
        (direction, dtype) for direction in ("encode", "decode") for dtype in ("fp32", "bf16")
    }
    assert all(row.seconds.value > 0 and row.beside == "alone" for row in rows)
    cluster = Cluster((Rank(0, "a GPU"),), host_codecs=tuple(rows))
    assert cluster.coding("expcode()", "bf16", 1 << 11, "decode", on_host=True).value > 0
    kinds = [{case.kind for case in kernels._cases(torch.device(kind), ())}
             for kind in ("cpu", "cuda")]  # fmt: skip
    assert kinds[1] - kinds[0] == {"host_adam"}


def of_drives(folder: Path, broken: int | None) -> tuple[list[Copy], str]:
    """Files of both ranks; rank ``broken`` cannot write."""
    team = Team(torch.device("cpu"), Nodes([0, 0], "the test"))
    own = folder / "none" if team.rank == broken else folder
    try:
        with mock.patch.object(coders, "FILES", (1 << 12, 1 << 16)), ending("measure"):
            return coders.drive_rows(team, TimeBudget(0.2, team).part(1.0, "files"), own), ""
    except HybridcompError as error:
        return [], str(error)


def test_files_of_a_drive(on_ranks: RunRanks, tmp_path: Path) -> None:
    (rows, _), _ = on_ranks(2, of_drives, tmp_path, None)
    cases = {(row.direction, row.nbytes) for row in rows}
    assert cases == {(way, n) for way in ("to_drive", "from_drive") for n in (1 << 12, 1 << 16)}
    assert all(row.seconds.value > 0 for row in rows) and not list(tmp_path.iterdir())
    cluster = Cluster((Rank(0, "a GPU"),), drives=tuple(rows))
    assert cluster.copy("from_drive", 1 << 14).value > 0 and not cluster.copies
    assert "drive: a rank's files of 0.0655 MB" in "\n".join(report.lines(cluster))


def test_a_drive_that_takes_no_files_is_named(tmp_path: Path) -> None:
    """By all ranks, of which the others wait for the figures of the one that fails."""
    for _, said in run_ranks(2, of_drives, tmp_path, 1):
        assert said.startswith("measure: rank 1: --drive: ") and "\n" not in said
        assert "can be written there: No such file or directory; name another folder" in said


class Worked(HostCallClock):
    """Measures this thread's CPU time, which other programs do not affect."""

    def seconds(self, run: Run, times: int = 1) -> float:
        start = time.thread_time()
        for _ in range(times):
            run()
        return (time.thread_time() - start) / times


def slow_last() -> tuple[float, ...]:
    """Measure speeds with a last rank that runs every operation five times."""
    team = Team(torch.device("cpu"), Nodes([0, 0], "the test"))
    forward = TransformerBlock.forward
    times = 5 if team.rank == 1 else 1

    def repeated(self: TransformerBlock, hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(times):
            out = forward(self, hidden)
        return out

    sizes = kernels.TimedSizes((), (BlockSize(2, 64, 128),), (), ())
    with (
        mock.patch.object(TransformerBlock, "forward", repeated),
        mock.patch.object(kernels, "CPU", sizes),
    ):
        part = TimeBudget(2.0, team).part(1.0, "blocks")
        own = kernels.kernel_rows(team, Worked(), part)
    rows = [row for rows in team.gather(own) for row in rows if row.kind == "block_forward"]
    return Cluster(cluster_ranks(2), kernels=tuple(rows)).speeds


class NoTime(MeasuredPart):
    """A part whose time is over."""

    def __init__(self) -> None:
        """Have no budget."""

    def allowances(self, count: int) -> Iterator[float]:
        yield from [0.0] * count


def in_no_time() -> list[list[tuple[Any, str]]]:
    """Measure blocks, named and by default, when the time is over."""
    team = Team(torch.device("cpu"), Nodes([0, 0], "the test"))
    sizes = BlockSize(1, 16, 64), BlockSize(2, 16, 64)
    found = []
    for named in (sizes, ()):
        with mock.patch.object(kernels, "CPU", kernels.TimedSizes((), sizes, (), (64, 128))):
            rows = kernels.kernel_rows(team, Told(1.0), NoTime(), named)
        found.append([(row.kind, row.note) for row in rows if row.dtype == "fp32"])
    return found


def test_blocks_that_the_user_names_are_timed_in_any_time(on_ranks: RunRanks) -> None:
    """Plans of another width than was timed scale seconds by FLOP, which misses by tens of %."""
    named, default = on_ranks(2, in_no_time)[0]
    small, large = (f"batch {count}, length 16, width 64" for count in (1, 2))
    kinds = ("block_forward", "block_backward")
    assert {(kind, note) for kind in kinds for note in (small, large)} <= set(named)
    assert {note for kind, note in default if kind in kinds} == {small}
    assert sum(kind == "adam" for kind, _ in named) == 1, "a size that takes long is left out"


def cluster_ranks(count: int) -> tuple[Any, ...]:
    return (Rank(0, "CPU"),) * count


def test_a_slow_rank_is_seen(on_ranks: RunRanks) -> None:
    speeds = on_ranks(2, slow_last)[0]
    assert speeds[0] == 1.0
    assert speeds[1] < 0.6


def started(path: str) -> tuple[int, bool]:
    """Start it as DeepSpeed's launcher does, with the rank among the arguments.

    Returns the status, and whether the bytes of its trainings stay unsaid: they had been printed
    after "wrote cluster.json", as if of a job.
    """
    closing.open_account(TimeSaved(), "of a small training")
    with little():
        local = f"--local_rank={os.environ['LOCAL_RANK']}"
        words = [local, "--out", path, "--seconds", "0.3", "--ranks-per-node", "1"]
        return command.main(words), not closing._accounts


def test_the_command_writes_a_file_that_doctor_shows(
    on_ranks: RunRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.json"
    assert on_ranks(2, started, str(path)) == [(0, True)] * 2
    assert cluster_file.read(path).nodes == 2
    told = list(doctor._cluster(path))
    # messages skipped as too slow, and trainings, which this measurement lacks
    lacks = ("it says nothing about messages of 8192", "it says nothing about small trainings")
    assert all(mark == doctor.OK or text.startswith(lacks) for mark, text in told)
    assert told[0][1].startswith("cluster measured: 2 ranks on 2 nodes: 2 x ")


def test_doctor_on_missing_bad_and_foreign_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ((mark, text),) = doctor._cluster(None)
    assert mark == doctor.INFO
    assert "hybridcomp measure" in text
    ((mark, text),) = doctor._cluster(tmp_path / "none.json")
    assert mark == doctor.FAIL
    foreign = Cluster(cluster_ranks(2))
    cluster_file.write(foreign, "cluster.json")
    *_, (mark, text) = doctor._cluster(None)
    assert (mark, "not of machines like this one" in text) == (doctor.INFO, True)
    lacks = [line for mark, line in doctor._cluster(None) if line.startswith("it says no")]
    assert "channels" in lacks[0]  # as in a file of an earlier version


def test_alone_it_says_how_it_is_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert cli.main(["measure"]) == command.NOT_STARTED
    assert capsys.readouterr().out == options.HOW


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--seconds", "0"], "--seconds: found 0.0; expected a number above 0"),
        (["--seconds", "inf"], "--seconds: found inf"),
        (["--seconds", "nan"], "--seconds: found nan"),
        (["--nodes-per-site", "1"], "--nodes-per-site: found '1'; expected 2 or more, or"),
        (["--ranks-per-node", "0"], "--ranks-per-node: found 0; expected 1 or more"),
        (["--block", "8x128"], "--block: found '8x128'"),
        (["--out", "."], "--out: found '.'; expected a file, and it is a folder"),
        (["--out", "none/cluster.json"], "none is no folder to write into"),
        ([], "the ranks cannot meet: "),
    ],
)
def test_what_it_cannot_do_is_said_before_it_measures(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("DS_ACCELERATOR", "cpu")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert cli.main(["measure", *more]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def too_large() -> str:
    with pytest.raises(ConfigError) as caught:
        measure(torch.device("cpu"), 1.0, blocks=[BlockSize(1, 8, 1 << 24)])
    return str(caught.value)


def test_a_block_that_no_rank_has_room_for_is_refused(on_ranks: RunRanks) -> None:
    assert all("take 2.7e+07 GB, more than a rank has" in said for said in on_ranks(2, too_large))


def test_uplinks_of_sites_are_timed_and_planned_with(on_ranks: RunRanks, tmp_path: Path) -> None:
    """Four single-rank nodes on two sites: both ranks of a site send at once."""
    cluster, *others = on_ranks(4, links_alone, [1, 2])
    assert all(other == cluster for other in others) and cluster.nodes_per_site == 2
    assert {(row.operation, row.beside) for row in cluster.uplinks} == {("send", "groups")}
    assert {row.nbytes for row in cluster.uplinks} <= {2 << 12, 2 << 14}
    assert (2 << 12) in {row.nbytes for row in cluster.uplinks}
    assert any(line.startswith("uplink of a site of 2 nodes: ") for line in report.lines(cluster))
    file = tmp_path / "cluster.json"
    cluster_file.write(cluster, file)
    found = cluster_file.read(file)
    for read, row in zip(found.uplinks, cluster.uplinks, strict=True):
        assert (read.operation, read.nbytes) == (row.operation, row.nbytes)
        assert read.seconds.value == pytest.approx(row.seconds.value, rel=1e-3)
    assert found.sites_of(range(4)) == 2
    slow = replace(found, uplinks=tuple(
        replace(row, seconds=row.seconds.times(1e6)) for row in found.uplinks))  # fmt: skip
    near, far = (slow.seconds("all_reduce", 1 << 14, 2, 2, sites=sites).value for sites in (1, 2))
    assert far > 100 * near


def test_nodes_of_sites_that_do_not_follow_each_other_are_refused() -> None:
    assert sites_of(Nodes([0, 1, 2, 3], "test", [0, 0, 1, 1])) == (0, 0, 1, 1)
    assert sites_of(Nodes([0, 1, 2, 3], "test")) == ()
    for sites in ([0, 1, 0, 1], [0, 0, 0, 1]):
        with pytest.raises(ConfigError, match="numbered one after the other"):
            sites_of(Nodes([0, 1, 2, 3], "test", sites))
