"""Replays of random traces: the evolutionary search against greedy and first-in-first-out.

The described cluster has 2 nodes of 8 ranks. Jobs train GPT-NeoX models of 160M to 2.8B parameters,
arrive at random and request plausible resources; the planner predicts their step times.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import pytest

from hybridcomp.tools.plan.answer.arguments import add_arguments
from hybridcomp.tools.plan.jobs.rates import Rates
from hybridcomp.tools.plan.jobs.replay import Replayed, compared
from hybridcomp.tools.plan.jobs.request import Job
from hybridcomp.tools.plan.jobs.state import JobRates, Shape
from hybridcomp.tools.plan.machines import cluster_file

CLUSTER = {
    "version": 1, "kind": "described", "nodes": 2, "ranks_per_node": 8, "device": "A100",
    "memory_gb": 40, "tflops": {"bf16": 140}, "memory_gbytes_per_second": 1300, "spread": 0.1,
    "inside": {"gbytes_per_second": 200, "latency_us": 8},
    "between": {"gbytes_per_second": 3, "latency_us": 20},
    "codecs": {"blockint": {"gbytes_per_second": 250, "launch_us": 20},
               "expcode": {"gbytes_per_second": 150}},
}  # fmt: skip
#: hidden size, blocks, heads
MODELS = {"160m": (768, 12, 12), "410m": (1024, 24, 16), "1.4b": (2048, 24, 16),
          "2.8b": (2560, 32, 32)}  # fmt: skip
BATCHES, LENGTH = (32, 64), 2048


@dataclass(frozen=True)
class Trace:
    """Job arrivals: mean seconds between two (0: all at once), and the cost of a reallocation."""

    gap: float
    pause: float = 60.0


TRACES = {
    "every 10 min": Trace(600), "all at once": Trace(0), "every 5 min": Trace(300),
    "every 30 min": Trace(1800), "every 10 min, a change costs 300 s": Trace(600, pause=300),
}  # fmt: skip


def kinds(names: Sequence[str] = tuple(MODELS)) -> tuple[Shape, dict[tuple[str, int], JobRates]]:
    """Return the cluster's shape, and a job per model and batch size with its predicted rates."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(["--dtype", "bf16"])
    options.command = []
    cluster = cluster_file.parse(CLUSTER)
    shape, rates, found = Shape.of(cluster), Rates(options, cluster), {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            hidden, blocks, heads = MODELS[name]
            path = Path(folder) / f"{name}.json"
            path.write_text(json.dumps({
                "model_type": "gpt_neox", "hidden_size": hidden, "num_hidden_layers": blocks,
                "num_attention_heads": heads, "intermediate_size": 4 * hidden,
                "vocab_size": 50304, "max_position_embeddings": LENGTH,
                "tie_word_embeddings": False, "_name_or_path": name,
            }))  # fmt: skip
            for batch in BATCHES:
                job = Job(f"{name}-{batch}", str(path), LENGTH, batch, samples_left=1.0)
                found[name, batch] = rates.task(job, shape)
    return shape, found


def drawn(
    seed: int, count: int, gap: float, kinds: dict[tuple[str, int], JobRates]
) -> Iterator[JobRates]:
    """Yield jobs of random kinds with Poisson arrivals and a median length of 0.7 hours."""
    chance, now = random.Random(seed), 0.0
    models = list(dict.fromkeys(name for name, _ in kinds))
    for number in range(count):
        kind = kinds[chance.choice(models), chance.choice(BATCHES)]
        asked = chance.choice([size for size in kind.sizes if size <= max(kind.sizes[0], 8)])
        hours = math.exp(chance.gauss(math.log(0.7), 1.0))
        total = hours * 3600 * kind.rates[asked]
        yield replace(kind, name=f"{number:02}", total=total, asked=asked, arrival=now)
        now += chance.expovariate(1 / gap) if gap else 0.0


def shares(found: list[dict[str, Replayed]]) -> dict[str, float]:
    """Return the search's mean completion, over all seeds, as a share of each policy's."""
    means = {name: mean(one[name].mean_seconds for one in found) for name in found[0]}
    return {name: means["evolutionary"] / seconds for name, seconds in means.items()}


@pytest.mark.nightly
def test_a_trace_ends_sooner_than_greedily() -> None:
    where, every = kinds(("160m", "1.4b"))
    trace = TRACES["every 10 min"]
    found = [compared([*drawn(seed, 12, trace.gap, every)], where, trace.pause) for seed in (0, 1)]
    assert shares(found)["greedy"] <= 0.98 and shares(found)["first in, first out"] <= 0.65


@pytest.mark.nightly
@pytest.mark.parametrize("name", TRACES)
def test_all_traces(name: str) -> None:
    """20 jobs, 10 seeds: at most 0.98 of greedy's mean completion, and 0.65 of FIFO's."""
    where, every = kinds()
    trace = TRACES[name]
    found = [compared([*drawn(seed, 20, trace.gap, every)], where, trace.pause)
             for seed in range(10)]  # fmt: skip
    assert shares(found)["greedy"] <= 0.98
    assert shares(found)["first in, first out"] <= 0.65
