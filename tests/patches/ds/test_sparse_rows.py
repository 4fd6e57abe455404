"""Touched rows of ``nn.Embedding(sparse=True)`` under DeepSpeed at ZeRO stage 0."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridcomp.channels import channels_of
from hybridcomp.errors import ConfigError
from hybridcomp.patches.common.sparse_tables import SparseTables
from tests.patches.torch.trainer import digest
from tests.ranks import RunRanks
from tests.selection import by_day
from tests.training.in_turn import start_deepspeed

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

ROWS, WIDTH, STEPS = 500, 16, 4
B8 = {"codec": "blockint", "bits": 8}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.head(self.table(ids)).square().sum() / 300
        return loss


def build(block: dict[str, Any] | None, **settings: Any) -> Any:
    import deepspeed

    import hybridcomp

    start_deepspeed()
    hybridcomp.install()
    torch.manual_seed(0)
    model = Model()
    quiet = {"min_bytes": 0, "hierarchy": "none"}
    config = {
        "train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**6,
        "zero_allow_untested_optimizer": True, **settings,
    }  # fmt: skip
    if block is not None:
        config["compression"] = {**block, **quiet}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def trained(block: dict[str, Any] | None, settings: dict[str, Any]) -> tuple[str, Any]:
    """Return the weights' digest after some steps, and the ledger's rows."""
    engine = build(block, **settings)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ids = torch.rand(300, generator=generator).pow(3).mul(ROWS).long()
        if step == 1 and dist.get_rank() == 1:
            ids = ids[:0]  # a rank without rows
        engine.backward(engine(ids))
        engine.step()
    channels, found = channels_of(engine), digest(engine.module)
    rows = None if channels is None else channels.ledger.interval["embed", "backward"]
    counts = None if rows is None else (rows.messages, rows.raw_nbytes, rows.wire_nbytes)
    engine.destroy()
    return found, counts


KINDS: list[dict[str, Any]] = [
    {}, {"prescale_gradients": True}, {"gradient_predivide_factor": 2.0},
    {"communication_data_type": "bf16"},
]  # fmt: skip


@pytest.mark.parametrize("settings", by_day(KINDS, [KINDS[0], KINDS[2], KINDS[3]]), ids=str)
def test_a_lossless_codec_changes_no_bit(module_ranks: RunRanks, settings: dict[str, Any]) -> None:
    wanted = module_ranks(2, trained, None, settings)
    for embed in ("expcode", "none"):
        found = module_ranks(2, trained, {"embed": embed, "dp": "none"}, settings)
        assert [one[0] for one in found] == [one[0] for one in wanted]
        if embed == "expcode":
            for _, (messages, raw, wire) in found:
                assert messages == STEPS and 0 < wire < raw


def test_lossy_sums_leave_four_replicas_equal(module_ranks: RunRanks) -> None:
    found = module_ranks(4, trained, {"embed": B8, "dp": "none"}, {})
    assert len({one[0] for one in found}) == 1
    assert all(wire < 0.4 * raw for _, (_, raw, wire) in found)


def _out_of_range() -> str:
    engine = build({"embed": B8, "dp": "none"})
    ids = torch.tensor([1, ROWS if dist.get_rank() else 2])
    try:
        engine.backward(engine(ids))
        engine.step()
    except IndexError as error:
        return str(error)
    finally:
        engine.destroy()
        with pytest.raises(IndexError):  # torch's own again
            engine.module.table(ids + ROWS)
    return "nothing"


def test_an_id_out_of_range_on_one_rank_is_told_on_all(module_ranks: RunRanks) -> None:
    wanted = "table.weight: rank 1 has row 500; expected 0 to 499; look at the ids of its batch"
    assert module_ranks(2, _out_of_range) == [wanted] * 2


def _refused() -> str:
    try:
        build({"embed": B8}, zero_optimization={"stage": 1})
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_stages_that_take_no_sparse_gradients_are_refused(module_ranks: RunRanks) -> None:
    for said in module_ranks(2, _refused):
        assert said.startswith("compression.embed: found Embedding(sparse=True) at ZeRO 1 to 3")


def test_an_id_is_noted_once_and_only_while_its_table_trains() -> None:
    table, wrong = nn.Embedding(4, 2, sparse=True), torch.tensor([1, 4])
    tables = SparseTables(table)
    table(wrong)
    assert [tables.wrong(table.weight) for _ in range(2)] == [4, None]
    table.weight.requires_grad_(False)
    with pytest.raises(IndexError):  # torch's own
        table(wrong)
    table.weight.requires_grad_(True)
    tables.leave()
    with pytest.raises(IndexError):
        table(wrong)
