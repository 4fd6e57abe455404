"""Channels: what a patch is given around a collective."""

from __future__ import annotations

import contextlib
import io
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist

from hybridcomp.channels import Channels, known_groups, sums
from hybridcomp.channels.pieces import Piece
from hybridcomp.collectives import Group
from hybridcomp.config import CompressionConfig
from hybridcomp.session.reporter import Reporter
from tests.channels import sent
from tests.ranks import run_ranks

NUMEL = 256


def reduce_scatter(async_op: bool) -> dict[str, Any]:
    """A backward reduce-scatter, and one with residuals; what came and what was written down."""
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


def test_reduce_scatter_in_either_direction_and_asynchronous() -> None:
    for async_op in (False, True):
        for found in run_ranks(2, reduce_scatter, async_op):
            assert found["tp done"] is found["dp done"] is not async_op
            for name in ("tp", "dp"):
                assert 0 < found[f"{name} error"] < 0.5
            assert set(found["sampled"]) == {("tp", "backward"), ("dp", "forward")}
            assert all(0.001 < error < 0.5 for error in found["sampled"].values())
            assert found["residual"] > 0  # only dp keeps what was left out


def report() -> list[tuple[str, float]]:
    channels = Channels(CompressionConfig.parse({"tp": "blockint"}))
    channels["tp"].count_native(1000 * (1 + dist.get_rank()), "backward")
    return Reporter(channels, None, torch.device("cpu")).report(1)


def test_every_rank_gets_the_events_of_all() -> None:
    first, second = run_ranks(2, report)
    assert first == second
    assert dict(first)["train/compression/tp/backward/raw_MB"] == 0.003


def ended_early(folder: str) -> tuple[dict[str, Any], str]:
    channels = Channels(CompressionConfig.parse({"tp": "blockint"}))
    channels["tp"].count_native(1000, "backward")
    file = Path(folder, "ledger.jsonl")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        Reporter(channels, file, torch.device("cpu")).close()
    return json.loads(file.read_text()) if dist.get_rank() == 0 else {}, said.getvalue()


def test_a_run_without_a_report_says_so(tmp_path: Path) -> None:
    (record, said), (_, silent) = run_ranks(2, ended_early, str(tmp_path))
    assert record["summary"] and record["step"] == 0 and record["unreported_messages"] == 1
    assert "before its first report" in said and not silent


def test_islands_without_a_codec_are_told_in_the_last_line() -> None:
    sync = {"islands": 2, "every": 30}
    exact = Channels(CompressionConfig.parse({"sync": sync}))
    told = exact.payoff.idle_reason(5)
    assert told == "islands sent at their meetings alone, and sync has no codec"
    coded = Channels(CompressionConfig.parse({"sync": {**sync, "codec": "blockint", "bits": 4}}))
    assert "no message had min_bytes" in coded.payoff.idle_reason(5)


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
    """DDP cuts parameters for each of 4,096 ranks: 24 such messages are known in the next step."""
    group = Group(cast(Any, None), 1, 2)
    every = [tuple(Piece(f"p{n}", rank, 1) for rank in range(1 << 14)) for n in range(24)]
    found = [sums._parts(pieces, group) for pieces in every]
    assert all(sums._parts(a, group) is b for a, b in zip(every, found, strict=True))


def test_groups_made_before_nodes_were_found_are_forgotten() -> None:
    made: list[tuple[object, bool]] = []

    class Placed:
        """Nodes of a job."""

        def group(self, group: object, *, two_levels: bool) -> object:
            made.append((group, two_levels))
            return object()

    state: Any = SimpleNamespace(nodes=None, policy=SimpleNamespace(low_rank={"dp"}))
    first: Any = object()
    with (
        patch.object(known_groups, "_exists", lambda group: group is first),
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
