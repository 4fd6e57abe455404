"""Mistakes with tables: one line, on all ranks, and nothing hangs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hybridcomp.errors import AgreementError, ConfigError, HybridcompError
from hybridcomp.nn import CachedEmbedding, RowOptimizer
from hybridcomp.nn.tables import making
from hybridcomp.nn.tables.host_rows import HostRows
from tests.nn.tables.made import ranks, zipf
from tests.ranks import RunRanks

CASES = (
    "range", "negative", "dtype", "other ids", "order", "forward alone", "slots", "half",
    "no optimizer", "frozen",
)  # fmt: skip


def mistake(case: str) -> str:
    """Make a mistake on rank 1; return this rank's error, after a correct batch."""
    rank, _ = ranks()
    table = CachedEmbedding(100, 4, resident=12, init="zeros")
    optimizer = None if case in ("no optimizer", "frozen") else RowOptimizer([table], lr=0.1)
    good = torch.arange(8)
    wrong = rank == 1
    said = ""
    if case == "half":
        table.half()
    if case == "frozen":
        table.requires_grad_(False)
    if case == "other ids":
        table.prefetch(good)
    try:
        if case in ("order", "forward alone") and wrong:
            table.prefetch(good) if case == "order" else CachedEmbedding.forward(table, good)
        elif case == "forward alone":
            table.prefetch(good)
        else:
            ids = {
                "range": good + 93, "negative": good - 1, "dtype": good.float(),
                "other ids": good + 1,
            }.get(case, good)  # fmt: skip
            if case == "slots":
                ids = torch.arange(0, 26, 2)  # 13 rows of rank 0, which has 12 slots
            table(ids if wrong else good)
    except (HybridcompError, IndexError) as error:
        said = f"{type(error).__name__}: {error}"
    if case in ("range", "negative", "dtype", "slots"):
        table(good).sum().backward()
        assert optimizer is not None
        optimizer.step()
    return said.replace(table.name, "T")


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_of_one_rank_is_an_error_on_all(on_ranks: RunRanks, case: str) -> None:
    first, second = on_ranks(2, mistake, case)
    assert first == second and "\n" not in first
    expected = {
        "range": "IndexError: T: rank 1 asks for row 100; expected 0 to 99; look at the ids of its "
        "batch",
        "negative": "IndexError: T: rank 1 asks for row -1; expected 0 to 99; look at the ids of "
        "its batch",
        "dtype": "ConfigError: T: found torch.float32 on rank 1; expected ids of int32 or int64",
        "other ids": "ConfigError: T: found other ids than were prefetched on rank 1; forward "
        "takes the batches in the order of prefetch; expected these ids",
        "slots": "ConfigError: T.resident: found 12; a batch asks rank 0 for 13 different rows; "
        "expected at least as many resident ones, or use smaller batches",
        "half": "ConfigError: T: found a module in fp16 on rank 0; rows have no loss scale; "
        "expected fp32 or bf16",
        "no optimizer": "ConfigError: T: found gradients that nobody takes on rank 0; no "
        "RowOptimizer has this table; give it one before a batch that trains, or call "
        "requires_grad_(False)",
        "frozen": "",
    }
    if case in expected:
        assert first == expected[case]
    else:
        assert first.startswith("AgreementError: T: rank 0:") and "rank 1:" in first


def differing(settings: dict[str, Any]) -> str:
    rank, _ = ranks()
    mine = {"resident": 4, **(settings if rank == 1 else {})}
    try:
        CachedEmbedding(mine.pop("rows", 20), 4, **mine)
    except (ConfigError, AgreementError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rows": 21}, ".rows: found 21 on rank 1; expected 20, as on rank 0"),
        ({"mode": "sum"}, ".mode: found sum on rank 1; expected None, as on rank 0"),
        ({"folder": "/no/such"}, "CachedEmbedding.folder: found '/no/such'; No such file"),
        ({"dtype": torch.float16}, "rows have no loss scale; use fp32 or bf16"),
        ({"resident": 1.5}, "CachedEmbedding.resident: found 1.5; expected rows of this rank"),
    ],
)
def test_tables_that_differ_or_cannot_be_made(
    on_ranks: RunRanks, settings: dict[str, Any], words: str
) -> None:
    first, second = on_ranks(2, differing, settings)
    assert first == second and words in first and "\n" not in first


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: CachedEmbedding(5, 4, resident=0), "resident: found 0"),
        (lambda: CachedEmbedding(0, 4, resident=1), "found 0 rows of 4"),
        (lambda: CachedEmbedding(5, 4, resident=1, padding_idx=5), "padding_idx: found 5"),
        (lambda: CachedEmbedding(5, 4, resident=1, padding_idx=1, hashed=True), "none with hashed"),
        (lambda: CachedEmbedding(5, 4, resident=1, mode="avg"), "mode: found 'avg'"),  # type: ignore[arg-type]
        (lambda: CachedEmbedding(5, 4, resident=1, frequency=torch.ones(4)), "found (4,)"),
        (
            lambda: CachedEmbedding.from_embedding(nn.Embedding(5, 4, max_norm=1.0), resident=1),
            "max_norm: found 1.0; expected None",
        ),
        (
            lambda: CachedEmbedding.from_embedding(
                nn.EmbeddingBag(5, 4, scale_grad_by_freq=True), resident=1
            ),
            "scale_grad_by_freq: found True; expected False",
        ),
    ],
)
def test_a_table_that_cannot_be(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "adamw"}, "RowOptimizer.method: found 'adamw'; it moves rows that no batch"),
        ({"method": "lamb"}, "expected one of sgd, adagrad, rowwise_adagrad, adam"),
        ({"weight_decay": 0.1}, "RowOptimizer.weight_decay: found 0.1; it moves rows"),
        ({"method": "sgd", "momentum": 0.9}, "momentum: found 0.9; it moves rows"),
        ({"method": "adam", "sparse_formula": True}, "the other methods have one formula"),
        ({"betas": (0.9, 0.99)}, "; adagrad has none; leave it out"),
        ({"method": "sgd", "eps": 1e-8}, "RowOptimizer.eps: found 1e-08; sgd has none"),
        ({"method": "adam", "betas": (0.9, 1.0)}, "betas: found 1.0; expected 0 to below 1"),
        ({"eps": -1e-8}, "RowOptimizer.eps: found -1e-08; expected 0 to below inf"),
        ({"lr": -0.1}, "RowOptimizer.lr: found -0.1; expected 0 to below inf"),
    ],
)
def test_settings_that_are_not_the_methods(settings: dict[str, Any], words: str) -> None:
    table = CachedEmbedding(5, 4, resident=5)
    with pytest.raises(ConfigError) as caught:
        RowOptimizer([table], **{"lr": 0.1, **settings})
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("first", [False, True], ids=["by step", "unscaled first"])
def test_a_scaler_of_gradients(first: bool) -> None:
    """It would divide the anchor's gradient, and rows would take steps 65,536 times as long."""
    table = CachedEmbedding(5, 4, resident=5)
    rows, scaler = RowOptimizer([table], lr=0.1), torch.amp.GradScaler("cpu")
    before = table.full_weight()
    assert before is not None
    before = before.clone()
    scaler.scale(table(torch.arange(3)).sum()).backward()
    if first:
        scaler.unscale_(rows)
    with pytest.raises(ConfigError, match="found a GradScaler; rows have no loss scale; train in"):
        scaler.step(rows)
    assert torch.equal(table.host.states["weight"], before)
    rows.zero_grad()
    table(torch.arange(3)).sum().backward()
    rows.step()


def test_a_table_has_one_optimizer() -> None:
    table = CachedEmbedding(5, 4, resident=5)
    optimizer = RowOptimizer([table], lr=0.1)
    for tables in ([table], [nn.Embedding(5, 4)]):
        with pytest.raises(ConfigError, match="tables: found"):
            RowOptimizer(tables, lr=0.1)  # type: ignore[arg-type]
    del optimizer
    RowOptimizer([table], "adam", lr=0.1)
    assert set(table.host.states) == {"weight", "exp_avg", "exp_avg_sq"}


def test_room_is_checked_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(making, "room", lambda folder: ("this host: memory", 10_000))
    monkeypatch.setattr(HostRows, "add", lambda *_: pytest.fail("made"))
    with pytest.raises(ConfigError, match=r"0.2 GB are needed, 0.0 GB are free; use fewer rows"):
        CachedEmbedding(1_000_000, 50, resident=10)
    monkeypatch.undo()
    table = CachedEmbedding(1_000, 50, resident=10, folder=tmp_path)
    monkeypatch.setattr(making, "room", lambda folder: ("this host: disk", 10_000))
    with pytest.raises(ConfigError, match="this host: disk"):
        RowOptimizer([table], lr=0.1)


def test_what_a_cut_table_cannot_do() -> None:
    table = CachedEmbedding(5, 4, resident=5)
    assert not hasattr(table, "weight")
    with pytest.raises(AttributeError, match="do not tie a head to it"):
        nn.Linear(4, 5).weight = table.weight
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match="found a deepcopy or pickle; its rows are on"):
            make(table)
        with pytest.raises(ConfigError, match="RowOptimizer: found a deepcopy or pickle; its st"):
            make(RowOptimizer([table], lr=0.1))


def made_before() -> str:
    """Look up after the process group has changed."""
    table = CachedEmbedding(50, 4, resident=5)
    table.owners.group = dist.new_group([dist.get_rank()])
    try:
        table(zipf(50, 3, 0))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_group_that_changes(on_ranks: RunRanks) -> None:
    for said in on_ranks(2, made_before):
        assert "found another process group than when it was made" in said
