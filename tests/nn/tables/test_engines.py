"""Tables inside of models under DDP, FSDP2 and DeepSpeed: the same bits, reports, versions."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.nn import CachedEmbedding, RowOptimizer
from hybridcomp.patches.rules import ds_check
from hybridcomp.patches.torch.attach import channels_of_model
from hybridcomp.session import process
from tests.nn.tables.made import LOSSLESS, block, ranks, zipf
from tests.ranks import RunRanks, run_ranks
from tests.selection import by_day

ROWS, WIDTH = 301, 8


class Model(nn.Module):
    """A table and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = CachedEmbedding.from_embedding(
            nn.Embedding(ROWS, WIDTH), resident=80, device="cpu"
        )
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.layer(self.table(ids)).square().mean()
        return out


def stepped(model: Model, run: Any, step: Any, steps: int = 4) -> list[Tensor]:
    """Train; return the whole table on the first rank."""
    rows = RowOptimizer([model.table], lr=0.1)
    for number in range(steps):
        loss = run(zipf(ROWS, 40, 10 * number + ranks()[0]))
        step(loss)
        rows.step()
    return [weight for weight in (model.table.full_weight(),) if weight is not None]


def under_torch(engine: str, block: Any, ledger: str) -> list[Tensor]:
    model = Model()
    whole: Any = model
    if engine == "ddp":
        whole = DistributedDataParallel(model)
    else:
        fully_shard(model)
    attached = None
    if block is not None:
        attached = hybridcomp.attach(whole, {**block, "ledger": {"every": 2, "jsonl": ledger}})
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05)

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    weights = stepped(model, whole, step)
    if attached is not None:
        hybridcomp.detach(whole)
    return weights


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_lossless_rows_change_nothing_and_are_reported(
    on_ranks: RunRanks, tmp_path: Path, engine: str
) -> None:
    path = tmp_path / "ledger.jsonl"
    native = on_ranks(2, under_torch, engine, None, "")
    encoded = on_ranks(2, under_torch, engine, {"embed": "expcode", "preset": "none"}, str(path))
    assert torch.equal(native[0][0], encoded[0][0])
    record = json.loads(path.read_text().splitlines()[0])
    row = record["embed"]
    assert 0 < row["hits"] < 1 and row["asked"] > 50 and row["rows_in"] > 0
    assert set(record["dimensions"]["embed"]) == {"forward", "backward"}
    assert record["dimensions"]["embed"]["backward"]["ratio"] > 0.9


def prefetched(engine: str) -> int:
    """Fetch rows before the model's first pass; return how many messages of gradients were native.

    Table and model send through the same channels, which report into one ledger.
    """
    process.configure(None)
    hybridcomp.install({"dp": {"codec": "blockint", "bits": 4}, "min_bytes": 0})
    model = Model()
    whole: Any = DistributedDataParallel(model) if engine == "ddp" else fully_shard(model)
    rows, ids = RowOptimizer([model.table], lr=0.1), zipf(ROWS, 40, ranks()[0])
    model.table.prefetch(ids)
    whole(ids).backward()
    rows.step()
    channels = channels_of_model(whole)
    assert channels is not None and channels is process.current()
    hybridcomp.uninstall()
    process.configure(None)
    return int(channels.ledger.interval["dp", "forward"].native)


@pytest.mark.parametrize("engine", by_day(["ddp", "fsdp2"], ["ddp"]))
def test_a_model_is_attached_after_its_table_has_sent(on_ranks: RunRanks, engine: str) -> None:
    assert on_ranks(2, prefetched, engine) == [0, 0]


def published(folder: str) -> list[bool]:
    """Publish versions of a model with a table; compare the receiver's rows."""
    model = Model()
    whole = DistributedDataParallel(model)
    rows = RowOptimizer([model.table], lr=0.1)
    publisher = hybridcomp.publish(whole, folder, dtype="bf16")
    same = []
    for step in range(3):
        whole(zipf(ROWS, 40, 10 * step + ranks()[0])).backward()
        rows.step()
        publisher.publish()
        expected = model.table.full_weight()
        if expected is not None:
            receiver = hybridcomp.WeightReceiver(folder)
            receiver.update()
            got = dict(receiver.tensors())
            same.append(set(got) == {"table.weight", "layer.weight", "layer.bias"})
            same.append(torch.equal(got["table.weight"], expected.bfloat16()))
    publisher.close()
    return same


@pytest.mark.parametrize("world", by_day([1, 2, 3], [1, 2]))
def test_versions_have_the_rows(on_ranks: RunRanks, tmp_path: Path, world: int) -> None:
    assert on_ranks(world, published, str(tmp_path))[0] == [True] * 6


def under_deepspeed(stage: int, block: Any, backend: str | None = None) -> list[Tensor]:
    """Train under DeepSpeed; ``backend``: of ``torch.compile``, called by DeepSpeed."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes a minute
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **({} if block is None else {"compression": block}),
    }
    hybridcomp.install()
    engine, *_ = deepspeed.initialize(model=model, config=config)
    if backend is not None:
        engine.compile(backend=backend)

    def step(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    weights = stepped(model, engine, step)
    if block is not None:
        channels = process.current()
        assert channels is not None
        assert channels.ledger.interval["embed", "backward"].messages > 0
    engine.destroy()
    return weights


def compiled_under_deepspeed(backend: str) -> tuple[list[Tensor], list[Tensor]]:
    block = {"embed": "expcode", "preset": "none"}
    return under_deepspeed(1, block), under_deepspeed(1, block, backend)


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)]
)
def test_zero_1_with_a_compiled_model(backend: str) -> None:
    """The lookup and its collectives run between graphs and give the same rows."""
    eager, compiled = run_ranks(2, compiled_under_deepspeed, backend)[0]
    assert torch.equal(eager[0], compiled[0]) or backend == "inductor"
    assert torch.allclose(eager[0], compiled[0], atol=1e-6)


def of_deepspeed() -> list[list[Tensor]]:
    blocks: tuple[Any, ...] = (None, {"embed": "expcode", "preset": "none"})
    return [under_deepspeed(stage, block)
            for stage, block in ((0, blocks[0]), (1, blocks[1]), (3, blocks[1]))]  # fmt: skip


def test_under_deepspeed(on_ranks: RunRanks) -> None:
    native, zero_1, three = run_ranks(2, of_deepspeed)[0]
    assert torch.equal(native[0], zero_1[0]) and torch.allclose(native[0], three[0], atol=1e-6)


def test_a_job_without_tables_refuses_the_key() -> None:
    block = CompressionConfig.parse({"embed": "expcode"})
    with pytest.raises(ConfigError, match=r"embed: found a job without tables"):
        list(ds_check.check(block, {"zero_optimization": {"stage": 1}}, tables=False))
    preset = CompressionConfig.parse({"preset": "recommended"})
    assert not preset.active("embed")


@pytest.mark.filterwarnings("ignore")
def test_compiled_models(capsys: pytest.CaptureFixture[str]) -> None:
    """The lookup ends a graph; a backend that does nothing compiles the rest."""
    model, ids, graphs = Model(), zipf(ROWS, 20, 3), list[Any]()

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model.table.requires_grad_(False)
    out = torch.compile(model, backend=backend)(ids)
    assert torch.allclose(out, model(ids)) and graphs
    assert "torch.compile ends a graph at the lookup" in capsys.readouterr().out


def reported_beside_a_deleted_table() -> Mapping[str, float] | None:
    """Report two tables, of which one is deleted; only rank 1 has collected it."""
    gc.disable()
    with block(LOSSLESS), torch.no_grad():
        for _ in range(2):
            table = CachedEmbedding(ROWS, WIDTH, resident=80)
            vars(table)["itself"] = table  # a cycle, as engines have
            table(torch.arange(4))
            if ranks()[0]:
                del table
                gc.collect()
        session = process.session()
        assert session is not None
        (row,) = [one.row() for one in session.followers if one.name == "embed"]
        return row


def test_reports_do_not_depend_on_when_a_rank_frees_tables() -> None:
    first, second = run_ranks(2, reported_beside_a_deleted_table, timeout=60)
    assert first == second is not None and first["asked"] == 8
