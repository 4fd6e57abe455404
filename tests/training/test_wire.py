"""The ledger's bytes, and README's table, against bytes sent by the ranks' sockets.

Linux counts for each connection the bytes acknowledged by its peer: payloads without headers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.training_bench import cells, ring
from doc_pages import bits
from tests.ranks import RunRanks, run_ranks
from tests.selection import by_day
from tests.training.in_turn import start_deepspeed

STEPS, WARMUP, WIDTH, LAYERS = 2, 2, 512, 4
NUMEL = LAYERS * (WIDTH * WIDTH + WIDTH)
BLOCKS: dict[str, dict[str, Any]] = {
    "native": {"preset": "none"},
    "recommended": {"preset": "recommended", "when": "always", "min_bytes": 0},
}
#: name in bits.JOBS, and ZeRO stage or torch's engine
JOBS: dict[str, int | str] = {
    "zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "zero3_twice": 3,
    "ddp": "ddp", "fsdp2": "fsdp2", "hpz": 3,
}  # fmt: skip
PAIRS = [job for job in JOBS if job != "hpz"]
#: the same over two nodes of two ranks, with secondary shards
COPIES: dict[str, Any] = {**BLOCKS["recommended"], "hierarchy": 2, "zero": {"secondary": "exact"}}
#: tables of embeddings: rows, and ids that every rank looks up in a step
ROWS, IDS = 20_000, 4_096
TABLES: dict[str, dict[str, Any]] = {
    "expcode": {"embed": "expcode", "preset": "none"},
    "8 bits": {"embed": {"codec": "blockint", "bits": 8}, "preset": "none"},
}
#: offset of tcpi_bytes_acked in Linux's struct tcp_info
BYTES_ACKED = 120


def sent_nbytes() -> int:
    """Return the bytes that peers of this process's TCP connections have received."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                total += struct.unpack_from("Q", info, BYTES_ACKED)[0]
    return total


def model_of() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def counted(step: Callable[[int], None], ledger: Any) -> dict[str, float]:
    """Return this rank's bytes over STEPS steps: by its sockets, and by the ledger."""
    start = 0
    for number in range(WARMUP + STEPS):
        if number == WARMUP:
            dist.barrier()
            start = sent_nbytes()
            ledger.restart()
        step(number)
    dist.barrier()
    found = {"sockets": float(sent_nbytes() - start), "raw": 0.0, "wire": 0.0}
    for entry in ledger.interval.values():
        found["raw"] += entry.raw_nbytes
        found["wire"] += entry.wire_nbytes
    return found


def train(job: str, block: dict[str, Any]) -> dict[str, float]:
    """Return what ``counted`` returns of a training."""
    step, ledger = (torchs if job in ("ddp", "fsdp2", "hsdp") else zero)(job, block)

    def on_batch(number: int) -> None:
        step(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number)))

    return counted(on_batch, ledger)


def zero(job: str, block: dict[str, Any]) -> Any:
    """Return a step function of a DeepSpeed engine, and its ledger."""
    import deepspeed

    import hybridcomp
    from hybridcomp.channels import channels_of

    start_deepspeed()
    hybridcomp.install()
    model = model_of()
    more = dict(cells.TWICE) if job in ("zero3_twice", "hpz") else {}
    if job == "hpz":
        more["zero_hpz_partition_size"] = 2
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": JOBS[job], "stage3_param_persistence_threshold": 0, **more,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
        "compression": block,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=settings
    )

    def step(values: torch.Tensor) -> None:
        engine.backward(engine(values.to(torch.bfloat16)).float().square().mean())
        engine.step()

    channels = channels_of(engine)
    assert channels is not None
    return step, channels.ledger


def torchs(job: str, block: dict[str, Any]) -> Any:
    """Return a step function under one of torch's engines, and its ledger."""
    from gpt.torch_engines import replicated
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    import hybridcomp

    model: Any = model_of()
    if job == "ddp":
        model = replicated(model)
    else:
        mesh = None
        if job == "hsdp":
            shape = (dist.get_world_size() // 2, 2)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    attached = hybridcomp.attach(model, block)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(values: torch.Tensor) -> None:
        model(values).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert attached is not None
    return step, attached.channels.ledger


def look_up(kind: str, block: dict[str, Any]) -> dict[str, float]:
    """Return what ``counted`` returns of a training of a table."""
    from torch.nn.parallel import DistributedDataParallel

    import hybridcomp
    from hybridcomp.nn import CachedEmbedding, RowOptimizer

    torch.manual_seed(0)
    table: Any = torch.nn.Embedding(ROWS, 64, sparse=True)
    if kind == "cached":
        table = CachedEmbedding.from_embedding(torch.nn.Embedding(ROWS, 64), resident=0.8)
    # DDP needs a parameter that it reduces itself: 4 bytes
    model: Any = torch.nn.ModuleList([table, torch.nn.Linear(1, 1, bias=False)])
    model.forward = lambda ids: model[0](ids).square().mean() + model[1].weight.sum()
    whole = DistributedDataParallel(model)
    attached = hybridcomp.attach(whole, block)
    assert attached is not None
    cached, plain = kind == "cached", [p for p in model.parameters() if p.requires_grad]
    rows: Any = RowOptimizer([table], "sgd", lr=0.1) if cached else None
    optimizer = torch.optim.SGD(plain, lr=0.1)

    def step(number: int) -> None:
        seed = 10 * number + dist.get_rank()
        ids = torch.randint(ROWS, (IDS,), generator=torch.Generator().manual_seed(seed))
        whole(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rows is not None:
            rows.step()

    return counted(step, attached.channels.ledger)


def look_up_each() -> dict[str, dict[str, dict[str, float]]]:
    """Train both kinds of tables with every block."""
    return {
        kind: {name: look_up(kind, block) for name, block in TABLES.items()}
        for kind in ("cached", "sparse")
    }


def train_each(jobs: list[str], gloos_own: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Train all jobs with every block: imports dominate a launch."""
    if not gloos_own:
        ring.install()
    blocks = {"native": BLOCKS["native"]} if gloos_own else BLOCKS
    if dist.get_world_size() == 4:
        blocks = {**blocks, "copies": COPIES}
    return {
        job: {
            name: train(job, block) for name, block in blocks.items()
            if name != "copies" or job != "hsdp"
        }
        for job in jobs
    }  # fmt: skip


def summed(ranks: list[Any], job: str, name: str) -> dict[str, float]:
    """Return the sum over all ranks."""
    return {key: sum(rank[job][name][key] for rank in ranks) for key in ("sockets", "raw", "wire")}


@pytest.mark.parametrize("job", by_day(PAIRS, ["zero1", "zero3_twice", "fsdp2"]))
def test_the_ledger_tells_what_the_sockets_sent(module_ranks: RunRanks, job: str) -> None:
    """Within 1 %; native bytes, sent bytes, and their ratio equal the table's."""
    ranks = module_ranks(2, train_each, [job], False)
    native, ours = (summed(ranks, job, name) for name in BLOCKS)
    for found in (native, ours):
        assert found["wire"] == pytest.approx(found["sockets"], rel=0.01)
    assert native["raw"] == native["wire"] == ours["raw"]
    told = bits.JOBS["zero1" if job == "zero2" else job]
    for found, messages in ((native, told.today), (ours, told.recommended)):
        expected = bits.across(messages, 2, 1, levels=False) * NUMEL / 8 * 2 * STEPS
        assert found["wire"] == pytest.approx(expected, rel=0.02)
    factor = bits.total(told.today) / bits.total(told.recommended)
    assert ours["raw"] / ours["wire"] == pytest.approx(factor, rel=0.02)


@pytest.mark.nightly
def test_the_ledger_of_a_mesh_tells_what_the_sockets_sent(module_ranks: RunRanks) -> None:
    ranks = module_ranks(4, train_each, ["hsdp"], False)
    for name in BLOCKS:
        found = summed(ranks, "hsdp", name)
        assert found["wire"] == pytest.approx(found["sockets"], rel=0.01)


@pytest.mark.parametrize("job", by_day(["hpz", "fsdp2"], ["hpz"]))
def test_the_ledger_of_secondary_copies_tells_what_the_sockets_sent(
    module_ranks: RunRanks, job: str
) -> None:
    """Deltas, copies inside nodes and digests; natively every gather, or every second, crosses."""
    ranks = module_ranks(4, train_each, [job], False)
    native, ours = summed(ranks, job, "native"), summed(ranks, job, "copies")
    for found in (native, ours):
        assert found["wire"] == pytest.approx(found["sockets"], rel=0.01)
    assert ours["raw"] == pytest.approx(native["raw"], rel=0.001)


def test_the_ledger_of_tables_tells_what_the_sockets_sent() -> None:
    """Rows from their owners, gradients of rows and row numbers, over two nodes of two ranks."""
    ranks = run_ranks(4, look_up_each)  # without engines, whose blocks say nothing of tables
    for kind in ("cached", "sparse"):
        told = {name: summed(ranks, kind, name) for name in TABLES}
        for name, found in told.items():
            assert found["wire"] == pytest.approx(found["sockets"], rel=0.01), (kind, name)
        assert told["8 bits"]["raw"] == pytest.approx(told["expcode"]["raw"], rel=0.001)
        # 64 fp32 values and an id of 8 bytes natively, 64 values at 8.25 bits and about 1.2 bytes
        assert 3.5 < told["8 bits"]["raw"] / told["8 bits"]["wire"] < 4.0, kind


@pytest.mark.nightly
def test_gloos_own_reduce_scatter_sends_twice_a_rings() -> None:
    """Benchmarks over gloo therefore replace it by a ring; the ledger counts a ring's bytes."""
    ranks = run_ranks(2, train_each, ["fsdp2"], True)  # on whose processes ours is not installed
    found = summed(ranks, "fsdp2", "native")
    scattered = 2 * STEPS * 4 * NUMEL / 2
    assert found["sockets"] - found["wire"] == pytest.approx(scattered, rel=0.02)
