"""Channels: codec choice and accounting around a collective."""

from __future__ import annotations

import contextlib
import io
import json
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hybridcomp.channels import AllGather, AllReduce, Channels, known_groups
from hybridcomp.channels.accounting.guard import Trip
from hybridcomp.channels.messages import all_reduce as sums
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.collectives import Group
from hybridcomp.config import CompressionConfig
from hybridcomp.dimensions import Dimension
from hybridcomp.session.reporter import Reporter
from tests.channels import sent
from tests.ranks import RunRanks

NUMEL = 256


def reduce_scatter(async_op: bool) -> dict[str, Any]:
    """Send a backward reduce-scatter, also with residuals; return results and ledger entries."""
    both = {"codec": "blockint", "bits": 4}
    block = {"dp": {**both, "error_feedback": True}, "tp": both, "min_bytes": 0}
    channels = Channels(CompressionConfig.parse(block))
    rank = dist.get_rank()
    shards = [torch.linspace(-1, 1, NUMEL) * (rank + 1 + 2 * to) for to in range(2)]
    exact = sum(torch.linspace(-1, 1, NUMEL) * (r + 1 + 2 * rank) for r in range(2))
    found: dict[str, Any] = {}
    for name in ("tp", "dp"):
        channel = channels[name]
        codec = channel.codec(2 * NUMEL, torch.float32, None, "forward")
        assert codec is not None
        handle = sent.reduce_scatter(
            channel,
            shards,
            codec,
            None,
            pieces=[[Piece(f"p{to}", 0, NUMEL)] for to in range(2)],
            direction="backward" if name == "tp" else "forward",
            async_op=async_op,
        )
        found[f"{name} done"] = handle.is_completed()
        found[f"{name} error"] = float((handle.wait() - exact).abs().max())
    entries = {key: entry for key, entry in channels.ledger.interval.items() if entry.messages}
    found["sampled"] = {key: entry.error for key, entry in entries.items()}
    found["residual"] = channels.residuals.norm()
    return found


def test_reduce_scatter_in_either_direction_and_asynchronous(on_ranks: RunRanks) -> None:
    for async_op in (False, True):
        for found in on_ranks(2, reduce_scatter, async_op):
            assert found["tp done"] is found["dp done"] is not async_op
            for name in ("tp", "dp"):
                assert 0 < found[f"{name} error"] < 0.5
            assert set(found["sampled"]) == {("tp", "backward"), ("dp", "forward")}
            assert all(0.001 < error < 0.5 for error in found["sampled"].values())
            assert found["residual"] > 0  # only dp keeps residuals


def report() -> list[tuple[str, float]]:
    channels = Channels(CompressionConfig.parse({"tp": "blockint"}))
    channels["tp"].count_native(1000 * (1 + dist.get_rank()), "backward")
    return Reporter(channels, None, torch.device("cpu")).report(1)


def test_every_rank_gets_the_events_of_all(on_ranks: RunRanks) -> None:
    first, second = on_ranks(2, report)
    assert first == second
    assert dict(first)["train/compression/tp/backward/raw_MB"] == 0.003


def times_of_records(folder: str) -> list[float]:
    """Return the times of two reports and the summary, between the clock's before and after."""
    channels = Channels(CompressionConfig.parse({"tp": "blockint"}))
    file, before = Path(folder, "ledger.jsonl"), time.time()
    reporter = Reporter(channels, file, torch.device("cpu"))
    reporter.report(1)
    reporter.report(2)
    reporter.close()
    if dist.get_rank():
        return []
    written = [json.loads(text)["time"] for text in file.read_text().splitlines()]
    return [before, *written, time.time()]


def test_records_say_when_they_were_written(on_ranks: RunRanks, tmp_path: Path) -> None:
    """Readers can compute the seconds between two reports and thus Mb/s."""
    times, _ = on_ranks(2, times_of_records, str(tmp_path))
    assert len(times) == 5
    assert all(b > a - 0.01 for a, b in zip(times, times[1:], strict=False)), times


def ended_early(folder: str) -> tuple[dict[str, Any], str]:
    channels = Channels(CompressionConfig.parse({"tp": "blockint"}))
    channels["tp"].count_native(1000, "backward")
    file = Path(folder, "ledger.jsonl")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        Reporter(channels, file, torch.device("cpu")).close()
    return json.loads(file.read_text()) if dist.get_rank() == 0 else {}, said.getvalue()


def test_a_run_without_a_report_says_so(on_ranks: RunRanks, tmp_path: Path) -> None:
    (record, said), (_, silent) = on_ranks(2, ended_early, str(tmp_path))
    assert record["summary"] and record["step"] == 0 and record["unreported_messages"] == 1
    assert "before its first report" in said and not silent


@pytest.mark.parametrize(
    ("block", "step", "sent", "why"),
    [
        ({"sync": {"islands": 2, "every": 30}}, 5, set(), "no meeting was held"),
        ({"sync": {"islands": 2, "every": 30, "codec": "bf16"}}, 5, set(), "no meeting was held"),
        ({"dp": "none", "zero": "none"}, 5, {"dp"}, "the block names no codec for any dimension"),
        ({"publish": {"to": "file:///x"}}, 5, set(), "the block names no codec for any dimension"),
        ({"tp": "bf16"}, 5, set(), "the job sends nothing in the dimensions of the block (tp)"),
        ({"dp": "bf16"}, 0, set(), "it ended before its first optimizer step"),
        ({"dp": "bf16", "start_step": 3}, 0, {"dp"}, "it ended before its first optimizer step"),
        ({"dp": "bf16", "start_step": 9}, 5, {"dp"}, "it ended at step 5, and start_step is 9"),
        ({"dp": "bf16"}, 5, {"dp"}, "no message had min_bytes, 65536, and a dtype"),
        ({"dp": "bf16"}, 0, {"dp"}, "no message had min_bytes, 65536, and a dtype"),
        (
            {"dp": "bf16", "zero": "bf16"}, 5, {"dp"},
            "dp: no message had min_bytes, 65536, and a dtype that codecs take; zero: it sent no",
        ),
    ],
)  # fmt: skip
def test_why_nothing_was_compressed(
    block: dict[str, Any], step: int, sent: set[Dimension], why: str
) -> None:
    channels = Channels(CompressionConfig.parse(block))
    if block.get("tp"):
        channels.leave_out(["tp"])
    assert channels.tuner.idle_reason(step, sent).startswith(why)


def test_a_guard_is_the_reason_with_its_step() -> None:
    channels = Channels(CompressionConfig.parse({"dp": "bf16"}))
    channels.guard.trips["dp"] = Trip(7, "error", 0.5, 0.1)
    assert channels.tuner.idle_reason(9, {"dp"}) == "the guard has made it native since step 7"


def test_native_of_islands_is_the_job_without_them(on_ranks: RunRanks) -> None:
    """One all-reduce a step over all ranks, and gathers of all weights, by NCCL's formulas."""
    found = on_ranks(2, spared)
    for entries in found:
        for (kind, islands), raw in entries.items():
            ranks = 2 * islands
            wanted = {"sum": 2 * (ranks - 1) / ranks * 4000, "gather": (ranks - 1) / ranks * 4000}
            assert raw["all"] == pytest.approx(wanted[kind], abs=16), (kind, islands)
            assert (raw["sync"] == 0) == (islands == 1)


def spared() -> dict[tuple[str, int], dict[str, int]]:
    """Return native bytes of an all-reduce and a gather of 1000 values under two-rank islands."""
    found = {}
    for islands in (1, 3):
        for kind in ("sum", "gather"):
            channels = Channels(CompressionConfig.parse({"preset": "none"}))
            channels.islands = islands
            tensor, out = torch.zeros(500), torch.zeros(1000)
            message: Any = AllGather(
                numel=500, dtype=torch.float32, group=None, shard=tensor, out=out, async_op=False
            )
            if kind == "sum":
                message = AllReduce(numel=1000, dtype=torch.float32, group=None, values=out)
            name: Dimension = "dp" if kind == "sum" else "zero"
            channels[name].run(message, native=lambda: None, encoded=lambda _: None)
            rows = channels.ledger.interval
            sync = round(rows["sync", "forward"].raw_nbytes)
            own = round(rows[name, "forward"].raw_nbytes)
            found[kind, islands] = {"all": sync + own, "sync": sync}
    return found


def test_pieces_of_a_message_are_cut_once_and_go_with_their_group() -> None:
    group, pieces = Group(cast(Any, None), 1, 2), (Piece("a", 0, 40), Piece("b", 0, 60))
    first = sums._parts(pieces, group)
    assert sums._parts(pieces, group) is first and len(group.plans) == 1
    assert sums._parts(list(pieces), group) == first and len(group.plans) == 1
    assert first == (pieces, (Piece("b", 24, 36),))
    gone = weakref.ref(group)
    del group
    assert gone() is None, "nothing else keeps a destroyed group"


def test_pieces_of_many_ranks_do_not_push_each_other_out() -> None:
    """DDP splits parameters for each of 4,096 ranks: all 24 messages stay cached."""
    group = Group(cast(Any, None), 1, 2)
    every = [tuple(Piece(f"p{n}", rank, 1) for rank in range(1 << 12)) for n in range(24)]
    found = [sums._parts(pieces, group) for pieces in every]
    assert all(sums._parts(a, group) is b for a, b in zip(every, found, strict=True))


def test_groups_made_before_nodes_were_found_are_forgotten() -> None:
    made: list[tuple[object, bool]] = []

    class Placed:
        """Places ranks on nodes."""

        def group(self, group: object, *, two_levels: bool) -> object:
            made.append((group, two_levels))
            return object()

    state: Any = SimpleNamespace(nodes=None, policy=SimpleNamespace(low_rank={"dp"}))
    first: Any = object()
    with (
        patch.object(known_groups, "exists", lambda group: group is first),
        patch.object(Group, "of", lambda group: object()),
    ):
        known: Any = known_groups.KnownGroups("dp", state)
        before = known[first, None]
        assert known[first, None] is before and len(known) == 1
        nodes = Placed()
        assert known[first, nodes] is not before and list(known) == [(first, nodes)]
        assert made == [(first, False)], "low rank sums whole messages, on one level"
        gone: Any = object()
        assert known[gone, nodes] is known[gone, nodes]
        assert known[first, nodes] and list(known) == [(first, nodes), (gone, nodes)]
        other: Any = object()
        assert known[other, nodes] and list(known) == [(first, nodes), (other, nodes)]


def test_suspended_inside_of_suspended_ends_with_the_outer_one() -> None:
    channel = Channels(CompressionConfig.parse({"zero": "bf16"}))["zero"]
    with channel.suspended():
        with channel.suspended():
            assert channel.is_suspended
        assert channel.is_suspended
    assert not channel.is_suspended
