"""Long messages in rounds: same bytes, bits and residuals as in a single exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from threading import get_ident
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import Work

from hybridcomp.codecs import Bounded, make_codec
from hybridcomp.codecs.base import VALUE_DTYPES, Codec
from hybridcomp.collectives import Meter, OwnedRange, chunk_ranges
from hybridcomp.collectives.owner_plan import plan_of
from hybridcomp.collectives.wire import (
    chunking,
    exchanges,
    message_rounds,
    payload_sizes,
    transport,
)
from hybridcomp.collectives.wire.chunking import stretches
from hybridcomp.collectives.wire.encoding import settle_job
from hybridcomp.collectives.wire.group import Group
from tests.collectives.calls import all_gather, all_reduce, reduce_scatter, reduce_to_owners
from tests.collectives.common import CODECS, DAY, LOSSY, values_of
from tests.collectives.late import everything
from tests.ranks import RunRanks
from tests.selection import by_day
from tests.stand_ins import thread_groups

ALIGN = chunking.SEGMENT_ALIGN
#: per rank
ALONE = Group(cast(Any, None), 0, 1)
FIXED = [codec for codec in CODECS if codec.fixed_size]
FIXED_LOSSY = [codec for codec in LOSSY if codec.fixed_size]
CPU = torch.device("cpu")
#: no multiple of anything; four rounds for three ranks
NUMEL = 3 * 4 * ALIGN + 1003


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use segments of ALIGN elements, in ranks that are threads."""
    monkeypatch.setattr(message_rounds, "ROUND", ALIGN)
    monkeypatch.setattr(message_rounds, "HALF", ALIGN)
    with thread_groups.in_process():
        yield


@given(
    lengths=st.lists(st.lists(st.integers(1, 5 * ALIGN), max_size=4), min_size=1, max_size=4),
    start=st.integers(0, 100),
)
def test_segments_cover_every_row_in_order(lengths: list[list[int]], start: int) -> None:
    rows: list[list[chunking.Range]] = []
    position = start
    for row in lengths:
        rows.append([])
        for length in row:
            rows[-1].append((position, position + length))
            position += length
    cut = message_rounds.rounds(rows, [FIXED[0]], CPU, ALONE)
    longest = max(sum(row) for row in lengths)
    assert len(cut) == max(longest // ALIGN, 1)
    for index, ranges in enumerate(rows):
        pieces = [piece for share in cut for piece in share[index]]
        edges = [edge for piece in pieces for edge in piece]
        assert edges == sorted(edges)
        total = sum(high - low for low, high in ranges)
        assert sum(high - low for low, high in pieces) == total
        for low, high in pieces:
            first, last = next((a, b) for a, b in ranges if a <= low < b)
            assert high <= last
            assert (low - first) % ALIGN == 0
        even = total / len(cut)
        for share in cut:  # a link idles at most as long as a split may be off
            assert abs(sum(b - a for a, b in share[index]) - even) <= ALIGN


@pytest.mark.parametrize("codec", FIXED, ids=str)
@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
def test_a_cut_leaves_bytes_and_values(codec: Codec, dtype: torch.dtype) -> None:
    """ALIGN guarantees it."""
    numel = 2 * ALIGN + 777
    values = values_of(0, numel, dtype)
    values[5] = torch.nan
    parts = [values[:ALIGN], values[ALIGN : 2 * ALIGN], values[2 * ALIGN :]]
    assert codec.wire_nbytes(numel, dtype) == sum(codec.wire_nbytes(len(p), dtype) for p in parts)
    results = []
    for pieces in ([values], parts):
        out = torch.empty(numel, dtype=dtype)
        for piece, place in zip(pieces, torch.split(out, [len(p) for p in pieces]), strict=True):
            payload = torch.empty(codec.wire_nbytes(len(piece), dtype), dtype=torch.uint8)
            codec.decode(payload[: codec.encode(piece, payload)], place)
        results.append(out)
    assert torch.equal(results[0].view(torch.uint8), results[1].view(torch.uint8))


#: ``(results, residuals)`` of one collective on one rank
Found = tuple[list[Tensor], list[Tensor]]
Collective = Callable[[Any, int, int, Codec, bool, Meter], Found]


def by_all_reduce(
    group: Any, me: int, ranks: int, codec: Codec, feedback: bool, meter: Meter
) -> Found:
    tensor = values_of(me, NUMEL, torch.float32)
    low, high = chunk_ranges(NUMEL, ranks)[me]
    residuals = [values_of(me + 7, NUMEL), values_of(me + 9, high - low)] if feedback else []
    left, owner_left = residuals or (None, None)
    cuts = [1000, ALIGN + 5, 3 * ALIGN + 17] if feedback else []
    all_reduce(
        tensor, codec, group, meter=meter, residual=left, owner_residual=owner_left, cuts=cuts
    )
    return [tensor], residuals


def by_reduce_scatter(
    group: Any, me: int, ranks: int, codec: Codec, feedback: bool, meter: Meter
) -> Found:
    lengths = [4 * ALIGN + 31 * rank for rank in range(ranks)]
    shards = torch.split(values_of(me, sum(lengths), torch.bfloat16), lengths)
    left = [values_of(rank, length) for rank, length in enumerate(lengths)] if feedback else None
    total = reduce_scatter(shards, codec, group, meter=meter, residuals=left).wait()
    return [total], left or []


def to_owners(ranges: list[OwnedRange]) -> Collective:
    def reduce(
        group: Any, me: int, ranks: int, codec: Codec, feedback: bool, meter: Meter
    ) -> Found:
        low, high = chunk_ranges(NUMEL, ranks)[me]
        residuals = [values_of(me + 7, NUMEL), values_of(me + 9, high - low)] if feedback else []
        left, owner_left = residuals or (None, None)
        tensor = values_of(me, NUMEL)
        sums = reduce_to_owners(
            tensor, ranges, codec, group, meter=meter, residual=left, owner_residual=owner_left
        )
        return sums, residuals

    return reduce


#: each rank owns a third in two places; a single rank owns nearly all; two share
SIXTHS = [part * NUMEL // 6 for part in range(7)]
TURNS = [OwnedRange(SIXTHS[part], SIXTHS[part + 1], (part % 3,)) for part in range(6)]
INCAST = [OwnedRange(0, 777, (1,)), OwnedRange(777, NUMEL, (2,))]
SHARED = [OwnedRange(0, NUMEL // 2, (0, 2)), OwnedRange(NUMEL // 2, NUMEL, (1,))]
COLLECTIVES: dict[str, Collective] = {
    "all_reduce": by_all_reduce,
    "pair": by_all_reduce,
    "reduce_scatter": by_reduce_scatter,
    "direct": to_owners(TURNS),
    "balanced": to_owners(INCAST),
    "shared": to_owners(SHARED),
}


def test_ranges_take_both_plans() -> None:
    assert plan_of(tuple(TURNS), 3).kind == "direct"
    assert plan_of(tuple(INCAST), 3).kind == "balanced"


def both(
    run: Callable[[Any, int, Meter], Found], monkeypatch: pytest.MonkeyPatch, ranks: int
) -> list[list[tuple[Found, Meter]]]:
    """Run ``run`` on all ranks in rounds, and then in a single exchange."""

    def once(group: Any, me: int) -> tuple[Found, Meter]:
        meter = Meter()
        return run(group, me, meter), meter

    found = [thread_groups.run(ranks, once)]
    monkeypatch.setattr(message_rounds, "ROUND", 10 * NUMEL)
    monkeypatch.setattr(message_rounds, "HALF", 10 * NUMEL)
    return [*found, thread_groups.run(ranks, once)]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize(
    ("codec", "feedback"),
    by_day(
        [*((codec, False) for codec in FIXED), *((codec, True) for codec in FIXED_LOSSY)],
        [
            (codec, feedback)
            for codec in DAY
            for feedback in (False, True)
            if codec.fixed_size and feedback <= (codec in LOSSY)
        ],
    ),
    ids=str,
)
def test_the_same_as_in_one_piece(
    name: str, codec: Codec, feedback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ranks = COLLECTIVES[name], 2 if name == "pair" else 3
    cut, whole = both(
        lambda group, me, meter: run(group, me, ranks, codec, feedback, meter), monkeypatch, ranks
    )
    for (found, meter), (expected, one) in zip(cut, whole, strict=True):
        assert same(found[0], expected[0]), "results"
        assert same(found[1], expected[1]), "residuals"
        # slots are padded to the longest: with splits another rank's may be that in every round
        more = 16 * meter.messages if feedback and name == "all_reduce" else 0
        assert one.wire_nbytes <= meter.wire_nbytes <= one.wire_nbytes + more
        assert meter.messages >= 3 * one.messages


def test_all_messages_leave_before_a_sender_decodes_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_to_all = transport.all_to_all
    done: dict[int, list[str]] = {}  # by thread, which is a rank

    def post(*message: Any) -> Work:
        work = all_to_all(*message)
        done.setdefault(get_ident(), []).append("post")
        return work

    def settle(*job: Any) -> None:
        done[get_ident()].append("settle")
        settle_job(*job)

    monkeypatch.setattr(transport, "all_to_all", post)
    monkeypatch.setattr(exchanges, "settle_job", settle)
    thread_groups.run(
        2, lambda group, me: by_all_reduce(group, me, 2, FIXED_LOSSY[0], True, Meter())
    )
    assert len(done) == 2
    for order in done.values():
        rounds = order.count("post")
        assert rounds > 1 and order == ["post"] * rounds + ["settle"] * (len(order) - rounds)
        assert order.count("settle") >= rounds


@pytest.mark.parametrize("codec", FIXED, ids=str)
def test_gathers_are_the_same(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is posted before the first wait, after which the shard may be overwritten."""
    numel = 3 * ALIGN + 99

    def run(group: Any, me: int, meter: Meter) -> Found:
        shard = values_of(me, numel, torch.bfloat16)
        out = torch.empty(2 * numel, dtype=torch.bfloat16)
        handle = all_gather(shard, out, codec, group, meter=meter, async_op=True)
        posted = meter.messages
        shard.fill_(torch.nan)
        handle.wait()
        assert meter.messages == posted
        return [out], []

    cut, whole = both(run, monkeypatch, 2)
    for (found, meter), (expected, one) in zip(cut, whole, strict=True):
        assert same(found[0], expected[0])
        assert (meter.messages, one.messages) == (3, 1)
        assert meter.wire_nbytes == one.wire_nbytes


def test_messages_that_wait_for_sizes_stay_whole_and_those_on_gpus() -> None:
    rows, whole = [stretches(0, 8 * ALIGN, [])], [[[(0, 8 * ALIGN)]]]
    even, odd = (make_codec("radix", error_bound=1e-2, segment=n) for n in (256, 240))
    assert len(message_rounds.rounds(rows, [FIXED[0]], CPU, ALONE)) == 8
    assert message_rounds.rounds(rows, [FIXED[0]], torch.device("cuda"), ALONE) == whole
    assert message_rounds.rounds(rows, [FIXED[0], even], CPU, ALONE) == whole
    with patch.object(payload_sizes, "in_front", return_value=True):
        assert len(message_rounds.rounds(rows, [FIXED[0], even], CPU, ALONE)) == 8
        # a split inside a segment would give its parts different steps
        assert message_rounds.rounds(rows, [FIXED[0], odd], CPU, ALONE) == whole


def _short_and_whole(codec: Codec, dtype: torch.dtype) -> None:
    """On gloo: in rounds of 1024 elements and in a single exchange."""
    expected = everything(codec, dtype, True, 2)
    with ExitStack() as stack:
        stack.enter_context(patch.object(chunking, "SEGMENT_ALIGN", 512))
        for name, value in {"SEGMENT_ALIGN": 512, "ROUND": 1024, "HALF": 512}.items():
            stack.enter_context(patch.object(message_rounds, name, value))
        found = everything(codec, dtype, True, 2)
    assert [bits for bits, _ in found] == [bits for bits, _ in expected]
    more = [
        cast(int, cut[0]) > cast(int, one[0])
        for (_, cut), (_, one) in zip(found, expected, strict=True)
        if cut
    ]
    assert sum(more) >= 8, "reductions and gathers go in rounds"


@pytest.mark.parametrize("ranks", by_day([2, 3], [3]))
def test_payloads_of_variable_size_are_cut_where_nobody_notices(
    on_ranks: RunRanks, ranks: int
) -> None:
    on_ranks(ranks, _short_and_whole, make_codec("expcode"), torch.bfloat16)
    on_ranks(ranks, _short_and_whole, make_codec("mpc"), torch.float32)
    on_ranks(ranks, _short_and_whole, make_codec("radix", segment=256), torch.bfloat16)
    bound = Bounded(1e-2, segment=256, family="radix")
    on_ranks(ranks, _short_and_whole, bound, torch.float32)


def test_long_messages_have_segments_and_others_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for longest, count in {
        100: 1,
        1 << 18: 1,
        1 << 19: 2,
        1 << 21: 2,
        7 << 20: 7,
        1 << 26: 64,
    }.items():
        assert len(message_rounds.rounds([[(0, longest)], []], [FIXED[0]], CPU, ALONE)) == count
