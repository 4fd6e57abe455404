"""Statements through a store: a rank's requests do not grow with the number of ranks."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hybridcomp.job import statements
from hybridcomp.job.statements import StatementRound, absent
from tests.stand_ins.counted_store import CountedStore


def exchange(store: Any, ranks: int, number: int, same: bool = False) -> list[CountedStore]:
    """Run a round of simulated ranks in turn; return each rank's requests."""
    asked = [CountedStore(store) for _ in range(ranks)]
    rounds = [
        StatementRound(rank_store, f"round {number}", i, range(ranks))
        for i, rank_store in enumerate(asked)
    ]
    for this in rounds:
        assert not this.is_told()
        this.state(json.dumps({"rank": 0 if same else this.rank, "round": number}))
    for this in rounds:
        assert this.is_told(1.0)
        texts, order = this.read()
        assert [texts[place]["rank"] for place in order] == [0 if same else r for r in range(ranks)]
        assert len(texts) == (1 if same else ranks) and texts[-1]["round"] == number
        if number:
            StatementRound(this.store, f"round {number - 1}", this.rank, range(ranks)).forget()
    return asked


@pytest.mark.parametrize("ranks", [8, 600])
def test_requests_do_not_grow_with_ranks(ranks: int) -> None:
    store = HashStore()
    first, second = exchange(store, ranks, 0), exchange(store, ranks, 1, same=True)
    for asked, deleted in ((first, 0), (second, 1)):
        for rank_store in asked[1:-1]:
            assert sum(rank_store.calls.values()) == 6 + deleted
        last = asked[-1].calls
        assert last["multi_get"] == -(-ranks // statements.AT_ONCE) and last["set"] == 3
        assert sum(last.values()) == 8 + last["multi_get"] + deleted
    assert sum(second[0].calls.values()) == 11  # it deletes the shared keys


def test_a_round_is_deleted_after_the_next() -> None:
    store, counts = HashStore(), []
    for number in range(4):
        exchange(store, 5, number)
        counts.append(store.num_keys())
    assert counts == [8] * 4


def test_statements_too_long_for_one_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statements, "PIECE_NBYTES", 100)
    store = HashStore()
    pair = [StatementRound(store, "long", rank, (3, 7)) for rank in (3, 7)]
    texts = [json.dumps({"text": os.urandom(200).hex()}) for _ in pair]
    for this, text in zip(pair, texts, strict=True):
        this.state(text)
    statements_read, order = pair[0].read()
    assert [json.dumps(statement) for statement in statements_read] == texts and order == [0, 1]
    keys = store.num_keys()
    for this in pair:
        this.forget()
    assert keys > 6 and store.num_keys() == 0


def test_who_is_missing() -> None:
    store = CountedStore(HashStore())
    this = StatementRound(store, "x", 1, range(64))
    for rank in range(64):
        if rank not in (0, 40, 41):
            StatementRound(store, "x", rank, range(64)).state("{}")
    store.calls.clear()
    assert this.missing_ranks() == [0, 40, 41] and this.first_heard()
    assert store.calls["check"] < 30
    assert not StatementRound(store, "x", 5, range(64)).first_heard()
    assert absent(store, [], str) == []


def test_the_last_rank_ends_before_it_collects() -> None:
    """Any other rank can collect, and collecting twice is harmless."""
    store = HashStore()
    this = StatementRound(store, "x", 0, range(2))
    this.state('{"a": 1}')
    store.set("x/1", '{"a": 2}')
    store.add("x/stated", 1)
    assert not this.is_told() and not this.missing_ranks()
    this.collect()
    this.collect()
    assert this.is_told() and this.read() == ([{"a": 1}, {"a": 2}], [0, 1])


def test_waiting_asks_again_and_never_lets_the_store_wait() -> None:
    """torch prints a line at each timeout of such a wait, which would be two per second."""
    store = CountedStore(HashStore())
    this = StatementRound(store, "x", 0, range(2))
    this.state("{}")
    assert not this.is_told(0.3)
    assert store.calls["wait"] == 0 and 3 < store.calls["check"] < 30
