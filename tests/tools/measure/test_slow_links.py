"""Messages about measurements skipped because links were too slow."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hybridcomp.tools.measure import channels, command, links, messages, report
from hybridcomp.tools.measure.team import Team, TimeBudget
from hybridcomp.tools.plan.machines import cluster_file
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.estimates import Estimate
from hybridcomp.tools.plan.machines.missing import missing
from hybridcomp.tools.plan.machines.rows import Timing
from tests.ranks import RunRanks
from tests.tools.measure.test_run import cluster_ranks, little


def on_slow_links(seconds: float) -> tuple[Cluster, list[str]]:
    """Measure with ``seconds`` per message; return the measurement and the command's output.

    No section runs out of time before it begins, on any machine.
    """
    said: list[str] = []
    slow = Estimate(seconds, seconds, seconds)

    def timed(team: Team, clock: Any, run: Any, key: Any, *_: Any) -> links.TimedCase:
        return links.TimedCase(slow, slow if key.beside == "compute" else None)

    def in_turns(team: Team, clock: Any, names: list[str], *_: Any) -> dict[str, Estimate]:
        return dict.fromkeys(names, slow)

    with (
        mock.patch.object(channels, "in_turns", in_turns),
        mock.patch.object(messages, "timed", timed),
        mock.patch.object(TimeBudget, "spent", lambda self: 0.0),
        mock.patch.object(command, "say", lambda *lines: said.extend(lines)),
        tempfile.TemporaryDirectory() as folder,
        little(),
    ):
        path = Path(folder, "cluster.json")
        options = ["--out", str(path), "--seconds", "0.2", "--ranks-per-node", "1"]
        assert command.main(options) == 0
        return cluster_file.read(path) if path.exists() else Cluster(()), said


@pytest.mark.parametrize("slow", [True, False])
def test_what_links_were_too_slow_for_is_said(on_ranks: RunRanks, slow: bool) -> None:
    """The file, the command and thus a plan name dimension, size and the assumption."""
    cluster, said = on_ranks(2, on_slow_links, 100.0 if slow else 1e-9)[0]
    told = [line for line in said if line.startswith("it says ")]
    assert [f"it says {line}" for line in missing(cluster)] == told
    lines = [line for line in told if line.startswith("it says nothing about messages of")]
    if not slow:
        assert not cluster.left_out and not lines
        return
    assert {row.numel for row in (*cluster.channels, *cluster.encoded)} == {1 << 10}
    kinds = [(row.dimension, row.operation, row.numel, row.timed) for row in cluster.left_out]
    for name, operation in channels.MESSAGES:
        assert kinds.count((name, operation, 1 << 13, 1 << 10)) == 1
        factor = cluster.overhead(operation, 2, 2, "expcode()", name).factor
        assert [row.factor for row in cluster.left_out if row.dimension == name][0] == factor
        assert f" {name} {operation} (2 ranks on 2 nodes)" in lines[0]
    for operation in messages.OPERATIONS:
        assert kinds.count(("", operation, 1 << 13, 1 << 10)) == len(messages.CODECS)
        assert f" {operation} by expcode() (2 ranks on 2 nodes)" in lines[0]
    (line,) = lines
    assert "messages of 8192 values in bf16" in line and "what 1024 values took" in line
    assert "planned with 1 times what their coding and their wire take apart" in line


def test_sizes_that_links_were_too_slow_for_are_said() -> None:
    """Times printed for 4 MiB are extrapolated from shorter messages where they were skipped."""
    seconds = Estimate(1.0, 1.0, 1.0)
    for longest in (1 << 20, 1 << 22):
        rows = tuple(Timing("send", 2, 1, nbytes, seconds) for nbytes in (1 << 12, longest))
        (line,) = list(report._links(Cluster(cluster_ranks(2), rows)))
        said = "(from messages of up to 1048576 bytes; longer ones would have taken too long)"
        assert (said in line) == (longest < 1 << 22)
