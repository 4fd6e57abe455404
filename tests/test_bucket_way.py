"""Files and functions that a message passes below ``Channel.run``, and the page that lists them."""

from __future__ import annotations

import re
from typing import Any

import torch

from tests.paths import ROOT
from tests.ranks import RunRanks
from tests.way import Way, followed

PAGE = ROOT / "docs" / "architecture.md"
#: message -> maximum files, functions and calls between files, with warm caches
BUDGET = {"zero1": (10, 55, 34), "fsdp2": (10, 57, 35), "tp": (9, 47, 33)}
SUM = {"codec": "blockint", "bits": 4, "error_feedback": True}


def _zero1() -> tuple[list[str], tuple[int, int, int]]:
    """Return the files and counts of the first bucket of the third step, when caches are warm."""
    from tests.training.trainer import Job, make_engine, train_step

    # several buckets a step, some direct and some with the balanced plan
    job = Job(stage=1, block={"dp": SUM, "min_bytes": 0})
    engine = make_engine(job)
    for step in range(3):
        ways: list[tuple[str, Way]] = []
        with followed(ways):
            train_step(engine, job, step)
    engine.destroy()
    return _files(ways), _largest(ways)


def _fsdp2() -> tuple[list[str], tuple[int, int, int]]:
    """Return the same for FSDP2's reduce-scatters."""
    from tests.patches.torch import trainer

    job = trainer.Job(block={"dp": SUM, "min_bytes": 0}, steps=3)
    ways: list[tuple[str, Way]] = []
    with followed(ways):
        trainer.run(job)
    last = ways[len(ways) // 3 * 2 :]
    return _files(last), _largest(last)


def _tp() -> tuple[list[str], tuple[int, int, int]]:
    """Return the same for an all-reduce of activations."""
    import torch.distributed as dist

    from hybridcomp.channels import Channels
    from hybridcomp.config import CompressionConfig
    from hybridcomp.patches.common.collective_wrappers import make_all_reduce
    from hybridcomp.patches.common.routes import Layers

    block = {"tp": {"codec": "blockint", "bits": 8}, "min_bytes": 0, "ledger": {"sample_every": 0}}
    channels = Channels(CompressionConfig.parse(block))
    layers = Layers(lambda group: "tp", lambda: "forward", lambda: channels)
    reduce, values = make_all_reduce(layers)(dist.all_reduce), torch.randn(1 << 16)
    ways: list[tuple[str, Way]] = []
    for _ in range(3):
        ways = []
        with followed(ways):
            reduce(values)
    return _files(ways), _largest(ways)


def _files(ways: list[tuple[str, Way]]) -> list[str]:
    found: dict[str, None] = {}
    for _, way in ways:
        found |= way.files
    return list(found)


def _largest(ways: list[tuple[str, Way]]) -> tuple[int, int, int]:
    sizes: Any = [way.size() for _, way in ways]
    files, functions, switches = zip(*sizes, strict=True)
    return max(files), max(functions), max(switches)


def documented() -> list[str]:
    """Return the files between the page's markers, in order."""
    section = PAGE.read_text().split("<!-- bucket-way -->")[1].split("<!-- /bucket-way -->")[0]
    return re.findall(r"(?m)^\d+\. `([\w/.]+\.py)`", section)


def _held(name: str, found: list[tuple[list[str], tuple[int, int, int]]]) -> None:
    for _, size in found:
        assert all(n <= most for n, most in zip(size, BUDGET[name], strict=True)), size


def test_a_bucket_of_zero_1_takes_the_way_that_the_page_lists(module_ranks: RunRanks) -> None:
    found = module_ranks(2, _zero1)
    assert found[1][0] == documented(), "rank 1 owns nothing of the first bucket, so encodes first"
    assert sorted(found[0][0]) == sorted(found[1][0]), "ranks take the same way"
    _held("zero1", found)


def test_a_reduce_scatter_of_fsdp2_keeps_its_budget(module_ranks: RunRanks) -> None:
    _held("fsdp2", module_ranks(2, _fsdp2))


def test_an_all_reduce_of_activations_keeps_its_budget(module_ranks: RunRanks) -> None:
    _held("tp", module_ranks(2, _tp))
