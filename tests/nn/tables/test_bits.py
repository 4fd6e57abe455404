"""``CachedEmbedding`` and ``RowOptimizer`` against torch's tables and optimizers, by the bit."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hybridcomp.nn import CachedEmbedding, RowOptimizer, ngram_keys
from hybridcomp.session import process
from tests.nn.tables.made import LOSSLESS, Pair, block, ranks, row_optimizer, zipf
from tests.ranks import RunRanks
from tests.selection import by_day

NIGHTLY = os.environ.get("HYBRIDCOMP_NIGHTLY") == "1"
METHODS = ("sgd", "adagrad", "sparse adagrad", "adam")
STEPS = 200 if NIGHTLY else 24


def trained(
    width: int, method: str, settings: Any, steps: int, ahead: int, folder: str | None
) -> tuple[bool, bool, float, int]:
    """Train both tables; return whether outputs and weights are equal, hits, rows written."""
    rank, world = ranks()
    rows, tokens = 3_001, 160
    with block(settings):
        torch.manual_seed(0)
        theirs = nn.Embedding(rows, width, padding_idx=3)
        pair = Pair(theirs, method, resident=400 // world + 150, folder=folder)
        batches = [zipf(rows, tokens, 1000 * step + rank) for step in range(steps)]
        batches[1] = batches[1].view(8, 20).to(torch.int32)
        if rank == world - 1:
            batches[2] = batches[2][:0]
        batches[3] = torch.full((tokens,), 3)  # of padding alone
        for step in range(steps):
            if step >= 4 and (step - 4) % ahead == 0:
                for batch in batches[step : step + ahead]:
                    pair.ours.prefetch(batch)
            pair.backward(batches[step], 100 * step + rank)
            pair.step()
        figures = pair.ours.figures()
        return pair.outputs_equal, pair.weights_equal(), figures.hit_rate, figures.rows_out


@pytest.mark.parametrize(
    ("world", "width", "method"),
    by_day(
        itertools.product((1, 2, 4), (7, 64, 256), METHODS),
        [(1, 64, "adagrad"), (2, 256, "sgd"), (2, 7, "sparse adagrad"), (4, 7, "adam")],
    ),
)
def test_is_torchs_table_to_the_bit(
    on_ranks: RunRanks, world: int, width: int, method: str, tmp_path: Path
) -> None:
    """With an empty rank, padding alone, rows read ahead, evicted and written meanwhile."""
    settings = None if world == 1 else LOSSLESS
    results = on_ranks(world, trained, width, method, settings, STEPS, 3, str(tmp_path))
    for outputs, weights, hits, written in results:
        assert outputs and weights
        assert 0.3 < hits < 0.95 and written > 100
    assert not list(tmp_path.iterdir()), "mapped files have no name"


def bags(mode: str) -> tuple[bool, bool]:
    rank, _ = ranks()
    torch.manual_seed(0)
    theirs = nn.EmbeddingBag(501, 16, mode=mode, padding_idx=5, include_last_offset=True)
    pair = Pair(theirs, "adagrad", resident=300)
    for step in range(8):
        ids = zipf(501, 90, 10 * step + rank)
        offsets = torch.tensor([0, 20, 20, 60, 90])
        per_sample = torch.rand(90) if mode == "sum" else None
        if step == 6 and rank == 0:
            ids, offsets = ids[:0], torch.tensor([0, 0, 0])
            per_sample = None if per_sample is None else per_sample[:0]
        pair.backward(ids, step, offsets, per_sample)
        pair.step()
    pair.backward(zipf(501, 90, rank).view(9, 10), 99)
    pair.step()
    return pair.outputs_equal, pair.weights_equal()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_torchs(on_ranks: RunRanks, mode: str) -> None:
    assert on_ranks(2, bags, mode) == [(True, True)] * 2


def accumulated() -> tuple[bool, bool]:
    """Train with four micro-batches a step, which use more rows than there are slots."""
    rank, _ = ranks()
    torch.manual_seed(0)
    pair = Pair(nn.Embedding(2_003, 12), "adagrad", resident=110)
    for step in range(6):
        for micro in range(4):
            pair.backward(zipf(2_003, 64, 100 * step + 10 * micro + rank), step + micro)
        pair.step()
    return pair.outputs_equal, pair.weights_equal()


def test_micro_batches_of_more_rows_than_slots(on_ranks: RunRanks) -> None:
    assert on_ranks(2, accumulated) == [(True, True)] * 2


def beside_a_table_of_a_part() -> bool:
    """Make a table of two ranks, then a table of all; train both."""
    part, (rank, world) = dist.new_group([0, 1]), ranks()
    groups = [part, None] if rank < 2 else [None]
    tables = [CachedEmbedding(20, 4, resident=10, group=group, init="zeros") for group in groups]
    rows = RowOptimizer(tables, "sgd", lr=1.0)
    for table in tables:
        table(torch.tensor([rank, 5])).sum().backward()
    rows.step()
    whole = tables[-1].full_weight()
    return whole is None or whole[:, 0].tolist() == [-1 / world] * 4 + [0, -1] + [0] * 14


def test_tables_of_some_ranks_and_of_all(on_ranks: RunRanks) -> None:
    assert all(on_ranks(4, beside_a_table_of_a_part))


@pytest.mark.parametrize("method", METHODS)
def test_torch_counts_no_step_without_a_backward_pass(method: str) -> None:
    """Adam's bias correction depends on the number of steps."""
    pair = Pair(nn.Embedding(50, 8), method, resident=50)
    for step in range(6):
        if step in (2, 3):
            assert not pair.optimizer.square_norm()
            pair.reference.step()
            pair.optimizer.step()
        else:
            pair.backward(zipf(50, 20, step), step)
            pair.step()
    assert pair.weights_equal()


def checkpointed(reentrant: bool) -> tuple[bool, bool]:
    """Train under activation checkpointing, which looks up again in the backward pass."""
    rank, _ = ranks()
    torch.manual_seed(0)
    whole = nn.Embedding(401, 8)
    tables = [CachedEmbedding.from_embedding(whole, resident=150) for _ in range(2)]
    optimizers = [row_optimizer("adagrad", table) for table in tables]
    for step in range(5):
        ids, more = zipf(401, 50, 9 * step + rank), torch.ones(1, requires_grad=True)
        tables[0].prefetch(ids)
        outputs = []
        for number, table in enumerate(tables):

            def body(scale: Tensor, table: CachedEmbedding = table, ids: Tensor = ids) -> Tensor:
                out: Tensor = (table(ids) * scale).tanh() + table(ids)
                return out

            is_first = number == 0
            out = checkpoint(body, more, use_reentrant=reentrant) if is_first else body(more)
            outputs.append(out)
            out.square().sum().backward()
        if not torch.equal(*outputs):
            return False, False
        for optimizer in optimizers:
            optimizer.step()
    kept, two = (table.full_weight() for table in tables)
    return True, kept is None or two is None or torch.equal(kept, two)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(on_ranks: RunRanks, reentrant: bool) -> None:
    assert on_ranks(2, checkpointed, reentrant) == [(True, True)] * 2


def lossy(settings: Any) -> tuple[bool, bool, Any, int]:
    """Look up in 8 bits; return whether rows are near and equal, and the ledger."""
    rank, _ = ranks()
    with block(settings):
        torch.manual_seed(0)
        pair = Pair(nn.Embedding(1_000, 64), "sgd", resident=1.0)
        channels = process.current()
        assert channels is not None
        ids = zipf(1_000, 200, rank)
        theirs, ours = pair.theirs(ids), pair.ours(ids)
        near = bool((theirs - ours).abs().max() < 0.02)
        ours.sum().backward()
        unique = torch.unique(ids)
        foreign = int((unique % 2 != rank).sum())
        entries = {
            way: (entry.raw_nbytes, entry.wire_nbytes, entry.messages)
            for (name, way), entry in channels.ledger.interval.items()
            if name == "embed"
        }
        return near, torch.equal(theirs, ours), entries, foreign


def test_eight_bits_are_near_and_counted(on_ranks: RunRanks) -> None:
    settings = {"embed": {"codec": "blockint", "bits": 8}, "preset": "none"}
    results = on_ranks(2, lossy, settings)
    for (near, equal, entries, foreign), other in zip(results, reversed(results), strict=True):
        assert near and not equal
        raw, wire, messages = entries["forward"]
        answered = other[3]  # rows for the other rank, and the ids of this one's
        assert raw == 256 * answered + 8 * foreign and messages == 2
        assert 66 * answered < wire < 66.1 * answered + 1.3 * foreign + 200
        assert entries["backward"][0] == 256 * foreign
        assert 66 * foreign < entries["backward"][1] < 66.1 * foreign + 64


def mixed_precision() -> tuple[str, bool]:
    """Train a bf16 module over fp32 rows; return the output's dtype, and if rows are exact."""
    torch.manual_seed(0)
    table = CachedEmbedding(101, 8, resident=50)
    optimizer = RowOptimizer([table], "sgd", lr=1e-3)
    table.to(torch.bfloat16)
    ids = torch.arange(20)
    before = table.full_weight()
    out = table(ids)
    out.sum().backward()
    optimizer.step()
    after = table.full_weight()
    moved = before is None or after is None or torch.equal(before[:20] - 1e-3, after[:20])
    return str(out.dtype), moved


def test_a_module_in_bf16_keeps_rows_in_fp32(on_ranks: RunRanks) -> None:
    assert on_ranks(2, mixed_precision) == [("torch.bfloat16", True)] * 2


def test_schedulers_and_clipping() -> None:
    table = CachedEmbedding(50, 4, resident=10, init="zeros")
    optimizer = RowOptimizer([table], "sgd", lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(2):
        table(torch.tensor([7, 7, 9])).sum().backward()
        table(torch.tensor([9])).sum().backward()
        assert float(optimizer.square_norm()) == 4 * (2**2 + 2**2)
        optimizer.scale_gradients(0.5)
        optimizer.step()
        scheduler.step()
    weight = table.full_weight()
    assert weight is not None
    assert weight[7].tolist() == weight[9].tolist() == [-1.5] * 4 and weight.count_nonzero() == 8
    table(torch.tensor([1])).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(table.full_weight(), weight)  # type: ignore[arg-type]


def test_rowwise_adagrad_keeps_one_number_a_row() -> None:
    table = CachedEmbedding(50, 4, resident=10, init="zeros")
    optimizer = RowOptimizer([table], "rowwise_adagrad", lr=0.5)
    gradient = torch.tensor([1.0, 2.0, 3.0, 4.0])
    expected, total = torch.zeros(4), torch.zeros(())
    for _ in range(3):
        (table(torch.tensor([8])) * gradient).sum().backward()
        optimizer.step()
        total += gradient.square().mean()
        expected -= 0.5 * gradient / (total.sqrt() + 1e-10)
    weight = table.full_weight()
    assert weight is not None and torch.allclose(weight[8], expected)
    assert table.host.states["sum"].shape == (50,)


def test_a_row_with_nan_stays_so() -> None:
    table = CachedEmbedding(9, 4, resident=5)
    optimizer = RowOptimizer([table], "adagrad", lr=0.1)
    (table(torch.tensor([2, 3])) * torch.tensor([[float("nan")], [1.0]])).sum().backward()
    optimizer.step()
    weight = table.full_weight()
    assert weight is not None and weight[2].isnan().all() and weight[3].isfinite().all()


def hashed() -> tuple[bool, bool, int]:
    """Look up n-grams in fewer rows than keys: colliding keys share a row."""
    rank, _ = ranks()
    tokens = torch.randint(40, (4, 30), generator=torch.Generator().manual_seed(rank))
    keys = ngram_keys(tokens, 3)
    table = CachedEmbedding(97, 8, resident=60, hashed=True)
    optimizer = RowOptimizer([table], lr=0.1)
    out = table(keys)
    again = table(keys.flip(0))
    out.sum().backward()
    again.sum().backward()
    optimizer.step()
    return torch.equal(out.flip(0), again), out.shape == (4, 30, 8), len(torch.unique(keys))


def test_hashed_tables_take_any_key(on_ranks: RunRanks) -> None:
    for same, shape, keys in on_ranks(2, hashed):
        assert same and shape and keys > 97


def test_keys_of_ngrams_see_what_is_before() -> None:
    tokens = torch.tensor([[1, 2, 3, 1, 2, 3], [9, 2, 3, 1, 2, 4]])
    single, two, three = (ngram_keys(tokens, n) for n in (1, 2, 3))
    assert torch.equal(single[0, :3], single[0, 3:]) and single[1, 0] != single[0, 0]
    assert two[0, 2] == two[0, 5] == two[1, 2] and two[0, 1] != two[1, 1]
    assert three[0, 2] == three[0, 5] != three[1, 2]
    assert len(torch.unique(ngram_keys(torch.arange(5000)[None], 2))) == 5000


def tied_groups() -> list[float]:
    """Train a table on each of two groups of two ranks, with summed gradients."""
    rank, _ = ranks()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    table = CachedEmbedding(10, 2, resident=5, init="zeros", group=groups[rank // 2], average=False)
    optimizer = RowOptimizer([table], "sgd", lr=1.0)
    table(torch.tensor([3 + rank // 2])).sum().backward()
    optimizer.step()
    weight = table.full_weight()
    return [] if weight is None else weight[:, 0].tolist()


def test_groups_have_tables_of_their_own(on_ranks: RunRanks) -> None:
    first, second = [0.0] * 10, [0.0] * 10
    first[3], second[4] = -2.0, -2.0
    assert on_ranks(4, tied_groups) == [first, [], second, []]
