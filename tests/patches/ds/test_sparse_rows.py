"""Touched rows of ``nn.Embedding(sparse=True)`` under DeepSpeed at ZeRO stage 0."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridcomp.channels import channels_of
from hybridcomp.errors import ConfigError
from tests.patches.torch.trainer import digest
from tests.ranks import RankPool, run_ranks
from tests.training.in_turn import start_deepspeed

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

ROWS, WIDTH = 500, 16
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


def trained(block: dict[str, Any] | None, steps: int = 5, **settings: Any) -> tuple[str, Any]:
    """Return the weights' digest after some steps, and the ledger's rows."""
    engine = build(block, **settings)
    for step in range(steps):
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


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_a_lossless_codec_changes_no_bit(pool: RankPool, settings: dict[str, Any]) -> None:
    steps = 5 if settings else 50
    native = pool.run(trained, None)
    for embed in ("expcode", "none"):
        found = pool.run(_with, {"embed": embed, "dp": "none"}, steps, settings)
        wanted = pool.run(_with, None, steps, settings)
        assert [one[0] for one in found] == [one[0] for one in wanted]
        if embed == "expcode":
            for _, (messages, raw, wire) in found:
                assert messages == steps and 0 < wire < raw
    assert native[0][0] == native[1][0]


def _with(block: dict[str, Any] | None, steps: int, settings: dict[str, Any]) -> tuple[str, Any]:
    return trained(block, steps, **settings)


def test_lossy_sums_leave_four_replicas_equal() -> None:
    found = run_ranks(4, trained, {"embed": B8, "dp": "none"})
    assert len({one[0] for one in found}) == 1
    assert all(wire < 0.4 * raw for _, (_, raw, wire) in found)


def _out_of_range() -> str:
    engine = build({"embed": B8, "dp": "none"})
    ids = torch.tensor([1, ROWS + 2 if dist.get_rank() else 2])
    try:
        engine.backward(engine(ids))
        engine.step()
    except IndexError as error:
        return str(error)
    finally:
        engine.destroy()
    return "nothing"


def test_an_id_out_of_range_on_one_rank_is_told_on_all(pool: RankPool) -> None:
    wanted = "table.weight: rank 1 has row 502; expected 0 to 499; look at the ids of its batch"
    assert pool.run(_out_of_range) == [wanted] * 2


def _refused() -> str:
    try:
        build({"embed": B8}, zero_optimization={"stage": 1})
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_stages_that_take_no_sparse_gradients_are_refused(pool: RankPool) -> None:
    for said in pool.run(_refused):
        assert said.startswith("compression.embed: found Embedding(sparse=True) at ZeRO 1 to 3")
