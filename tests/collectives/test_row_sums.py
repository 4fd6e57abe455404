"""Sums of touched rows: both formats, predicted bytes, equal replicas, errors on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridcomp.codecs import make_codec
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Group, Meter, Transfer
from hybridcomp.collectives.row_sums import (
    FORMS,
    Form,
    RowError,
    TouchedRows,
    cheapest,
    gather_ids,
    gather_rows,
    sum_rows,
)
from tests.collectives.common import digest
from tests.ranks import RunRanks
from tests.selection import by_day

ROWS = 400
EXPCODE, B8 = make_codec("expcode"), make_codec("blockint", bits=8)
CPU = torch.device("cpu")


def ids_of(case: str, rank: int) -> torch.Tensor:
    """Return a rank's touched rows: some, none on one rank, none at all, one on all, every one."""
    generator = torch.Generator().manual_seed(rank)
    if case == "none" or (case == "one empty" and rank == 1):
        return torch.empty(0, dtype=torch.int64)
    if case == "one row":
        return torch.tensor([ROWS - 1])
    if case == "all":
        return torch.arange(ROWS)
    drawn = torch.rand(150, generator=generator).pow(3).mul(ROWS).long()
    found: torch.Tensor = torch.unique(drawn)
    return found


def touched(case: str, rank: int, width: int, dtype: torch.dtype) -> TouchedRows:
    ids = ids_of(case, rank)
    generator = torch.Generator().manual_seed(100 + rank)
    return TouchedRows(ids, torch.randn(len(ids), width, generator=generator).to(dtype))


def expected(case: str, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the table of sums, fp32 in rank order, and each element's sum of magnitudes."""
    total = torch.zeros(ROWS, width)
    for rank in range(dist.get_world_size()):
        ids, values = touched(case, rank, width, dtype)
        total[ids] += values.float()
    return total.to(dtype)


def _sums(codec: Codec, width: int, dtype: torch.dtype) -> list[str]:
    me, group, found = dist.get_rank(), Group.of(None), []
    for case in ("some", "one empty", "none", "one row", "all"):
        mine = touched(case, me, width, dtype)
        meter = Meter()
        every = gather_ids(mine.ids, ROWS, None, CPU, group, meter)
        assert not isinstance(every, RowError)
        assert all(torch.equal(one, ids_of(case, rank)) for rank, one in enumerate(every))
        most = max((float(touched(case, r, width, dtype).values.abs().max())
                    for r in range(len(every)) if len(every[r])), default=0.0)  # fmt: skip
        wanted = expected(case, width, dtype)
        for form in FORMS:
            summed = sum_rows(mine, every, form, Transfer(codec, group, Meter()))
            assert torch.equal(summed.ids, torch.unique(torch.cat(every)))
            assert summed.values.dtype == dtype and summed.values.shape[1] == width
            if codec.lossless:
                assert torch.equal(summed.values, wanted[summed.ids]), (case, form)
            elif len(summed.ids):
                apart = (summed.values - wanted[summed.ids]).float().abs().max()
                assert float(apart) <= 0.02 * most * len(every), (case, form)
            found.append(digest(summed.values.view(-1)))
        behind = gather_rows(mine, every, Transfer(codec, group, Meter()))
        assert torch.equal(behind.ids, torch.cat(every))
        found.append(digest(behind.values.view(-1)))
    return found


@pytest.mark.parametrize("codec", [EXPCODE, B8], ids=str)
@pytest.mark.parametrize("ranks", by_day([1, 2, 4], [1, 4]))
def test_every_form_gives_the_same_sums_on_all_ranks(
    on_ranks: RunRanks, ranks: int, codec: Codec
) -> None:
    for width, dtype in ((7, torch.float32), (64, torch.float32), (16, torch.bfloat16)):
        first, *others = on_ranks(ranks, _sums, codec, width, dtype)
        assert len(first) == 15 and all(other == first for other in others)


def _bytes(codec: Codec, width: int) -> list[tuple[Form, dict[Form, int], dict[Form, int]]]:
    me, group, found = dist.get_rank(), Group.of(None), []
    for case in ("some", "one empty", "one row", "all"):
        mine = touched(case, me, width, torch.float32)
        every = gather_ids(mine.ids, ROWS, None, CPU, group, Meter())
        assert not isinstance(every, RowError)
        form, told = cheapest(every, width, codec, torch.float32)
        sent: dict[Form, int] = {}
        for one in FORMS:
            meter = Meter()
            sum_rows(mine, every, one, Transfer(codec, group, meter))
            sent[one] = meter.wire_nbytes
        found.append((form, told, sent))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_form_of_the_fewest_bytes_is_taken(on_ranks: RunRanks, ranks: int) -> None:
    """All ranks send the predicted bytes, and choose the same, smallest format."""
    results: list[Any] = on_ranks(ranks, _bytes, B8, 32)
    chosen = set()
    for every in zip(*results, strict=True):
        form, told, _ = every[0]
        assert all(one[:2] == (form, told) for one in every)
        sent = {one: sum(found[2][one] for found in every) for one in FORMS}
        assert sent == told and sent[form] == min(sent.values())
        chosen.add(form)
    assert chosen == ({"gather"} if ranks == 2 else {"owner"})


def test_owners_send_at_most_what_an_all_reduce_of_the_table_does() -> None:
    """Gathering, as DeepSpeed and gloo do, sends more on many ranks with long batches."""
    weights = torch.arange(1, 2001, dtype=torch.float64).pow(-1.05)
    for ranks in (2, 8, 32):
        dense = 2 * (ranks - 1) * ranks * B8.wire_nbytes(2000 * 64 // ranks, torch.float32)
        drawn = torch.multinomial(weights.expand(ranks, -1), 32768, replacement=True)
        every = [torch.unique(one) for one in drawn]
        form, sent = cheapest(every, 64, B8, torch.float32)
        assert sent[form] <= dense and form == ("gather" if ranks == 2 else "owner")
        all_rows = [torch.arange(2000)] * ranks
        assert cheapest(all_rows, 64, B8, torch.float32)[1]["owner"] <= 1.001 * dense
    assert sent["gather"] > 5 * dense


def _costs(codec: Codec) -> tuple[float, float]:
    """Return bytes per row number, and total over row bytes: Zipf's law 1.1, 2,048 ids."""
    weights = torch.arange(1, 20_001, dtype=torch.float64).pow(-1.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    drawn = torch.multinomial(weights, 2048, replacement=True, generator=generator)
    places = torch.randperm(20_000, generator=torch.Generator().manual_seed(9))
    ids, meter, group = torch.unique(places[drawn]), Meter(), Group.of(None)
    mine = TouchedRows(ids, torch.randn(len(ids), 64, generator=generator))
    every = gather_ids(ids, 20_000, None, CPU, group, meter)
    assert not isinstance(every, RowError)
    numbers = meter.wire_nbytes
    sum_rows(mine, every, "gather", Transfer(codec, group, meter))
    rows = codec.wire_nbytes(64 * len(ids), torch.float32)
    return numbers / len(ids), meter.wire_nbytes / rows


def test_numbers_of_rows_cost_little(on_ranks: RunRanks) -> None:
    """At most 1.3 bytes per number, and at most 1.02 times the row bytes for rows of 64 values."""
    for number, whole in on_ranks(2, _costs, B8):
        assert number <= 1.3 and whole <= 1.02


def _wrong() -> RowError | None:
    wrong = ROWS + 7 if dist.get_rank() == 1 else None
    found = gather_ids(torch.tensor([1, 2]), ROWS, wrong, CPU, Group.of(None), Meter())
    return found if isinstance(found, RowError) else None


def test_all_ranks_hear_of_a_number_out_of_range(on_ranks: RunRanks) -> None:
    assert on_ranks(2, _wrong) == [RowError(1, ROWS + 7)] * 2


def _not_finite(codec: Codec) -> list[bool]:
    mine = touched("some", dist.get_rank(), 32, torch.float32)
    if dist.get_rank() == 0:
        mine.values[3, 5] = float("nan")
    every = gather_ids(mine.ids, ROWS, None, CPU, Group.of(None), Meter())
    assert not isinstance(every, RowError)
    return [
        not sum_rows(mine, every, form, Transfer(codec, Group.of(None), Meter()))
        .values.isfinite().all()
        for form in FORMS
    ]  # fmt: skip


@pytest.mark.parametrize("codec", [EXPCODE, B8], ids=str)
def test_what_is_not_finite_stays_so(on_ranks: RunRanks, codec: Codec) -> None:
    assert on_ranks(2, _not_finite, codec) == [[True] * 2] * 2
