"""Step a table on two ranks by every way that people use; bytes of the interface, seconds a step.

    PYTHONPATH=.:scripts python scripts/netlab.py --layout 2 --rate 1gbit --quiet -- \
        python scripts/benchmarks/bench_tables.py 250000 64 8192 10 expcode

TorchRec where it is installed. All ways take the same ids, in turns, step by step.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

ROWS, WIDTH, IDS, STEPS = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LAW = 1.1


def zipf(seed: int) -> Tensor:
    weights = np.cumsum(1.0 / np.arange(1, ROWS + 1) ** LAW)
    draws = np.searchsorted(weights, np.random.default_rng(seed).random(IDS) * weights[-1])
    return torch.from_numpy(np.random.default_rng(1).permutation(ROWS)[draws])


def sent() -> int:
    rows = (line.split(":") for line in Path("/proc/self/net/dev").read_text().splitlines()[2:])
    return sum(int(counts.split()[8]) for name, counts in rows if name.strip() != "lo")


Step = Callable[[Tensor, Tensor], None]


def dense() -> Step:
    table = nn.Embedding(ROWS, WIDTH)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

    def step(ids: Tensor, gradient: Tensor) -> None:
        table(ids).backward(gradient)
        dist.all_reduce(table.weight.grad)
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine(block: Any) -> Step:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if block:
        import hybridcomp

        hybridcomp.install()
    table = nn.Embedding(ROWS, WIDTH, sparse=True)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0},
              "steps_per_print": 10_000}
    if block:
        config["compression"] = {"preset": "none", "embed": block}
    made, *_ = deepspeed.initialize(
        model=table, optimizer=torch.optim.SGD(table.parameters(), lr=0.1), config=config)

    def step(ids: Tensor, gradient: Tensor) -> None:
        made.backward((made(ids) * gradient).sum())
        made.step()

    return step


def cached(block: Any) -> Step:
    from hybridcomp.nn import CachedEmbedding, RowOptimizer
    from hybridcomp.session import process

    if block:
        process.configure({"compression": {"preset": "none", "embed": block}})
    table = CachedEmbedding(ROWS, WIDTH, resident=0.2, init="zeros")
    optimizer = RowOptimizer([table], "sgd", lr=0.1)

    def step(ids: Tensor, gradient: Tensor) -> None:
        table(ids).backward(gradient)
        optimizer.step()

    return step


def torchrec_rows() -> Step:
    import torchrec
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingEnv
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    config = torchrec.EmbeddingConfig(
        name="t", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=["f"])
    module = torchrec.EmbeddingCollection(tables=[config], device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    sharders = [EmbeddingCollectionSharder()]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=RANKS, compute_device="cpu", local_world_size=1),
        constraints={"t": ParameterConstraints(sharding_types=["row_wise"])})
    plan = planner.collective_plan(module, sharders, dist.group.WORLD)
    model = DistributedModelParallel(
        module, device=torch.device("cpu"), plan=plan, sharders=sharders,
        env=ShardingEnv.from_process_group(dist.group.WORLD), init_data_parallel=False)

    def step(ids: Tensor, gradient: Tensor) -> None:
        features = torchrec.KeyedJaggedTensor(
            keys=["f"], values=ids, lengths=torch.ones(len(ids), dtype=torch.int64))
        model(features)["f"].values().backward(gradient)

    return step


CODEC: Any = {"blockint": {"codec": "blockint", "bits": 8}}.get(sys.argv[5], sys.argv[5])
WAYS: dict[str, Callable[[], Step]] = {
    "dense all-reduce": dense,
    "TorchRec, row-wise": torchrec_rows,
    "DeepSpeed, sparse": lambda: engine(None),
    "CachedEmbedding": lambda: cached(None),
}
if CODEC != "none":
    del WAYS["CachedEmbedding"]
    WAYS["DeepSpeed, embed " + sys.argv[5]] = lambda: engine(CODEC)
    WAYS["CachedEmbedding, " + sys.argv[5]] = lambda: cached(CODEC)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps, failed = {}, {}
    for name, make in WAYS.items():
        torch.manual_seed(0)
        try:
            steps[name] = make()
        except Exception as error:  # as the first line of the answer says
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    figures: dict[str, list[tuple[int, float]]] = {name: [] for name in steps}
    for number in range(STEPS + 1):
        ids = zipf(100 * number + RANK)
        gradient = torch.randn(IDS, WIDTH, generator=torch.Generator().manual_seed(number)) / IDS
        for name, step in steps.items():
            dist.barrier()
            before, start = sent(), time.perf_counter()
            step(ids, gradient)
            dist.barrier()
            took = time.perf_counter() - start
            time.sleep(0.05)
            if number:
                figures[name].append((sent() - before, took))
    if RANK == 0:
        for name, error in failed.items():
            print(name, error)
        for name, every in figures.items():
            nbytes, seconds = zip(*every, strict=True)
            print(json.dumps({"way": name, "MB": round(statistics.median(nbytes) / 1e6, 3),
                              "s": round(statistics.median(seconds), 4),
                              "least": round(min(seconds), 4)}))


main()
