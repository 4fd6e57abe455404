"""Touched rows of ``nn.Embedding(sparse=True)`` under DDP, and of tables that FSDP2 ignores."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.errors import ConfigError
from tests.patches.torch.trainer import digest
from tests.ranks import RunRanks
from tests.selection import by_day

ROWS, WIDTH = 600, 16
QUIET: dict[str, Any] = {"min_bytes": 0, "ledger": {"every": 1_000_000}}
LR = 0.02
B8 = {"codec": "blockint", "bits": 8}


class Tables(nn.Module):
    """Two tables with sparse gradients, one an EmbeddingBag, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(ROWS, WIDTH, sparse=True, padding_idx=3)
        self.bags = nn.EmbeddingBag(50, WIDTH, sparse=True, mode="sum")
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.one(ids).mean(1) + self.bags(ids % 50))
        return found


def batch(step: int, rank: int) -> Tensor:
    """Return ids with duplicates and padding; in step 1 rank 1 has only padding."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.rand(6, 5, generator=generator).pow(3).mul(ROWS).long()
    return ids.fill_(3) if step == 1 and rank == 1 else ids


def seeded() -> Tables:
    torch.manual_seed(0)
    return Tables()


def ddp(block: dict[str, Any] | None, steps: int = 4, **given: Any) -> tuple[str, Any]:
    """Return the parameters' digest after some steps, and the counted rows."""
    model = DistributedDataParallel(seeded(), bucket_cap_mb=0.0005, **given)
    attached = None if block is None else hybridcomp.attach(model, {**block, **QUIET})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        model(batch(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = digest(model)
    if attached is None:
        return found, None
    rows = attached.channels.ledger.interval["embed", "backward"]
    hybridcomp.detach(model)
    return found, rows


def _ddp(embed: Any, **given: Any) -> tuple[str, str, tuple[int, int, int]]:
    native, _ = ddp(None, **given)
    found, rows = ddp({"embed": embed, "dp": "none"}, **given)
    return native, found, (rows.messages - rows.native, rows.raw_nbytes, rows.wire_nbytes)


@pytest.mark.parametrize("ranks", by_day([1, 2, 4], [1, 4]))
def test_a_lossless_codec_changes_no_bit_under_ddp(on_ranks: RunRanks, ranks: int) -> None:
    for native, found, (encoded, raw, wire) in on_ranks(ranks, _ddp, "expcode"):
        assert found == native
        assert encoded == (8 if ranks > 1 else 0), "two tables, four steps"
        assert 0 < wire < raw or ranks == wire + 1 == raw + 1


def _more_ddp() -> list[tuple[str, str]]:
    kinds: list[dict[str, Any]] = [
        {"static_graph": True}, {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
    ]  # fmt: skip
    return [_ddp("expcode", **given)[:2] for given in kinds] + [_ddp("none")[:2]]


def test_other_ways_of_ddp_and_none_as_well(on_ranks: RunRanks) -> None:
    for pairs in on_ranks(2, _more_ddp):
        assert all(native == found for native, found in pairs)


def test_lossy_rows_leave_replicas_equal(on_ranks: RunRanks) -> None:
    found = on_ranks(4, _ddp, B8)
    assert len({one[1] for one in found}) == 1 and found[0][1] != found[0][0]
    _, raw, wire = found[0][2]
    assert wire < 0.45 * raw


def fsdp(block: dict[str, Any] | None, steps: int = 4) -> tuple[Tensor, Tensor, Any]:
    """Return the tables' weights after some steps under FSDP2, which ignores them."""
    model: Any = seeded()
    ignored = {model.one.weight, model.bags.weight}
    fully_shard(model, ignored_params=ignored)
    attached = None if block is None else hybridcomp.attach(model, {**block, **QUIET})
    dense = torch.optim.SGD([p for p in model.parameters() if p not in ignored], lr=LR)
    tables = torch.optim.SGD(list(ignored), lr=LR)
    for step in range(steps):
        for _ in range(2):  # micro-batches
            model(batch(step, dist.get_rank())).square().mean().backward()
        dense.step()
        tables.step()
        dense.zero_grad()
        tables.zero_grad()
    return model.one.weight.detach(), model.bags.weight.detach(), attached


def _fsdp(embed: Any) -> tuple[float, list[str], tuple[int, int]]:
    """Return the distance of FSDP2 with ignored tables from DDP, and digests."""
    model = DistributedDataParallel(seeded())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(4):
        with model.no_sync():
            model(batch(step, dist.get_rank())).square().mean().backward()
        model(batch(step, dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    one, bags, attached = fsdp({"embed": embed, "dp": "none"})
    apart = max(
        float((model.module.one.weight - one).abs().max()),
        float((model.module.bags.weight - bags).abs().max()),
    )
    rows = attached.channels.ledger.interval["embed", "backward"]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (one.tolist(), bags.tolist()))
    same = [str(found == every[0]) for found in every]
    return apart, same, (rows.messages, rows.wire_nbytes)


@pytest.mark.parametrize("ranks", by_day([2, 4], [4]))
def test_ignored_tables_are_averaged_before_the_step(on_ranks: RunRanks, ranks: int) -> None:
    for apart, same, (messages, wire) in on_ranks(ranks, _fsdp, "expcode"):
        assert apart < 1e-6 and set(same) == {"True"}
        assert messages == 8 and wire > 0


def test_ignored_tables_stay_replicas_with_a_lossy_codec(on_ranks: RunRanks) -> None:
    for apart, same, _ in on_ranks(2, _fsdp, B8):
        assert 0 < apart < 0.02 and set(same) == {"True"}


def _unused() -> str:
    """Use a table on no batch of rank 1, and then on no rank."""
    model: Any = seeded()
    fully_shard(model, ignored_params={model.one.weight, model.bags.weight})
    hybridcomp.attach(model, {"embed": B8, "dp": "none", **QUIET})
    optimizer: Any = torch.optim.SparseAdam([model.one.weight], lr=0.1)
    if dist.get_rank() == 0:
        model.one(torch.tensor([1, 5])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert model.one.weight.grad is None
    return digest(model.one)


def test_a_rank_without_gradients_takes_part_under_fsdp2(on_ranks: RunRanks) -> None:
    first, second = on_ranks(2, _unused)
    assert first == second


def _out_of_range(engine: str) -> tuple[str, list[str]]:
    """Give rank 1 an invalid id in the first of two micro-batches; return each rank's error.

    Also returns the messages in evaluation, and after the model is detached.
    """
    model: Any = seeded()
    table = model.one
    ignored = {table.weight, model.bags.weight}
    if engine == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, ignored_params=ignored)
    hybridcomp.attach(model, {"embed": "expcode", "dp": "none", **QUIET})
    optimizer = torch.optim.SGD(list(ignored), lr=0.1)
    ids, said = batch(0, dist.get_rank()), "nothing"
    if dist.get_rank() == 1:
        ids[0, 0] = ROWS + 4
    try:
        with model.no_sync() if engine == "ddp" else contextlib.nullcontext():
            model(ids).square().mean().backward()
        model(batch(1, 0)).square().mean().backward()
        optimizer.step()
    except (IndexError, RuntimeError) as error:
        said = str(error)
    plain = []
    for is_attached in (True, False):
        table.train(not is_attached)
        if not is_attached:
            hybridcomp.detach(model)
        try:
            table(torch.tensor([ROWS]))
        except IndexError as error:
            plain.append(str(error))
    return said, plain


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_an_id_out_of_range_on_one_rank_is_told_on_all(on_ranks: RunRanks, engine: str) -> None:
    for said, plain in on_ranks(2, _out_of_range, engine):
        assert "one.weight: rank 1 has row 604; expected 0 to 599" in said
        assert plain == ["index out of range in self"] * 2


def _refused() -> list[str]:
    said = []
    for block in ({"dp": B8}, {"embed": B8, "zero": B8}):
        model = DistributedDataParallel(seeded())
        try:
            hybridcomp.attach(model, {**block, **QUIET})
        except ConfigError as error:
            said.append(str(error))
    for last in ({"embed": B8}, {"memory": {"policy": "planned", "device_gb": 1}}):
        model = DistributedDataParallel(nn.Linear(2, 2))
        try:
            hybridcomp.attach(model, {**last, **QUIET})
        except ConfigError as error:
            said.append(str(error))
    return said


def test_what_cannot_act_is_refused(on_ranks: RunRanks) -> None:
    for first, _, last, memory in on_ranks(2, _refused):
        assert "compression.dp" in first and "name embed" in first
        assert "compression.embed" in last and "a job without tables" in last
        assert memory.startswith("compression.memory.policy: found 'planned'; only DeepSpeed")
