"""Measurements in which one step fails on one rank: all ranks end, name it, and leave nothing."""

from __future__ import annotations

import contextlib
import io
import logging
import random
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from hybridcomp.errors import PeerError
from hybridcomp.job import agreement, peer_liveness
from hybridcomp.session import closing
from hybridcomp.tools.measure import command
from hybridcomp.tools.measure.run import measure
from hybridcomp.tools.plan.machines import cluster_file
from hybridcomp.tools.plan.machines.cluster import Cluster
from tests.job.failing import Steps, steps
from tests.ranks import run_ranks
from tests.tools.measure.test_run import cluster_ranks, little

#: seconds that nobody waits longer than, by night
LIMIT_S = 10.0


def measured(
    path: str, stages: tuple[int, ...], rank: int, step: int | None
) -> tuple[int, str, float, Steps, list[str]]:
    """Measure; return status, what stderr has, when it ended, steps, what is left behind."""
    agreement.LOOK_S = 0.05
    told, counted = io.StringIO(), Steps()
    level, threads = logging.getLogger("hybridcomp").level, threading.enumerate()
    words = ["--out", path, "--seconds", "1", "--ranks-per-node", "1"]

    def injected(*args: Any, **more: Any) -> Any:
        nonlocal counted
        with steps(step if dist.get_rank() == rank else None) as counted:
            return measure(*args, **more)

    with (
        mock.patch.object(command, "measure", injected), little(stages),
        contextlib.redirect_stderr(told),
    ):  # fmt: skip
        status = command.main(words)
    left = [*map(str, closing._accounts)]
    for one in threading.enumerate():
        if one not in threads and not one.daemon:  # one that is told to end may take a moment
            one.join(LIMIT_S)
            left += [one.name] * one.is_alive()
    left += ["log level"] * (logging.getLogger("hybridcomp").level != level)
    return status, told.getvalue(), time.time(), counted, left


@pytest.mark.parametrize(
    ("stages", "count", "most"),
    [((), 2, 2000), pytest.param((2,), 40, 0, marks=pytest.mark.nightly)],
)
def test_a_step_that_fails_on_one_rank_ends_a_measurement_on_all(
    stages: tuple[int, ...], count: int, most: int, tmp_path: Path
) -> None:
    """The others are in a message then, in front of which no gate may stand.

    ``most``: of which steps; 0: of all that there are.
    """
    path, draw, failed = tmp_path / "cluster.json", random.Random(1), 0
    if not most:
        ((*_, whole, left), *_) = run_ranks(3, measured, str(path), stages, 0, None)
        assert path.is_file() and not left
        path.unlink()
        most = whole.found
    for _ in range(count):
        rank, step = draw.randrange(3), draw.randrange(most)
        every = run_ranks(3, measured, str(path), stages, rank, step)
        where = every[rank][3].where
        if all(status == 0 for status, *_ in every):  # a step that did not come again
            path.unlink()
            continue
        failed += 1
        for status, told, _, _, left in every:
            assert status == command.NOT_STARTED and not left, (where, told, left)
            assert f": rank {rank}: " in told, (where, told)
        ended = [row[2] for row in every]
        assert max(ended) - min(ended) <= (LIMIT_S if stages else 60.0), where
        assert not list(tmp_path.iterdir())
    print(f"measure: {failed} of {count}, {most} steps")
    assert failed > count // 2


def unwritten(path: str) -> tuple[int, str]:
    """What a rank ends with where rank 0 cannot write the file."""
    told = io.StringIO()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", path)

    with (
        mock.patch.object(command, "measure", return_value=Cluster(cluster_ranks(2))),
        mock.patch.object(command, "lines", return_value=[]),
        mock.patch.object(command, "missing", return_value=[]),
        mock.patch.object(cluster_file, "write", full), contextlib.redirect_stderr(told),
    ):  # fmt: skip
        return command.main(["--out", path]), told.getvalue()


def test_a_file_that_cannot_be_written_is_an_error_of_all(tmp_path: Path) -> None:
    for status, told in run_ranks(2, unwritten, str(tmp_path / "cluster.json")):
        assert status == command.NOT_STARTED
        assert "--out: found" in told and "No space left on device" in told
        assert told.count("\n") == 1


def test_a_file_that_is_cut_replaces_none(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text("measured before")
    cut: Any = OSError(28, "No space left on device")
    with mock.patch.object(Path, "replace", side_effect=cut), pytest.raises(OSError, match="space"):
        cluster_file.write(Cluster(cluster_ranks(2)), path)
    assert path.read_text() == "measured before" and list(tmp_path.iterdir()) == [path]


def test_a_rank_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends say that a connection was closed, and not whose."""
    gone = PeerError("rank 1 (process 7 on node1) has ended")
    monkeypatch.setattr(peer_liveness, "lost", lambda error, where: gone)
    with pytest.raises(PeerError, match="rank 1 .* has ended"), command._naming_the_lost():
        raise RuntimeError("gloo: Connection reset by peer")
