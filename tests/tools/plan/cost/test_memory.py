"""Predicted memory against torch's MemTracker, and memory of codecs."""

from __future__ import annotations

import warnings

import pytest
import torch
from gpt.model import GPT, loss_of
from gpt.weights import ModelConfig
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.memory import device_nbytes, memory_of
from hybridcomp.tools.plan.cost.work import work_of
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.models.arguments import train_gpt
from hybridcomp.tools.plan.request import Batch, SearchLimits
from tests.selection import by_day
from tests.tools.plan.clusters import cluster, small, step

SEGMENTS = {"kept": (), "some": ((1, 3),), "all": tuple((n, n + 1) for n in range(1, 5))}


def measured(config: ModelConfig, batch: int, length: int, dtype: torch.dtype,
             segments: tuple[tuple[int, int], ...]) -> int:  # fmt: skip
    """Return the peak of a second training step on real tensors."""
    model = GPT(config).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    loss, stops = loss_of(config), dict(segments)
    tokens, labels = torch.randint(0, config.vocabulary, (2, batch, length))

    def forward() -> Tensor:
        hidden, position = tokens, 0
        while position < len(model.layers):
            inside = model.layers[position : stops.get(position, position + 1)]
            if position in stops:
                run = torch.nn.Sequential(*inside)
                hidden = checkpoint(run, hidden, use_reentrant=False)
            else:
                hidden = inside[0](hidden)
            position += len(inside)
        out: Tensor = hidden
        return out

    def step() -> None:
        logits = forward()
        torch.autograd.backward(loss(logits, labels))
        optimizer.step()
        optimizer.zero_grad()

    step()
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MemTracker's, about recomputed modules
        with tracker:
            step()
    snapshot = tracker.get_tracker_snapshot("peak")
    return sum(int(by_kind["Total"]) for by_kind in snapshot.values())


@pytest.mark.parametrize("recompute", SEGMENTS)
@pytest.mark.parametrize(
    ("batch", "length", "vocabulary", "dtype", "norm"),
    by_day(
        [
            (8, 128, 300, "fp32", "rmsnorm"),
            (8, 128, 3000, "bf16", "layernorm"),
            (1, 128, 300, "fp32", "layernorm"),
        ],
        [(8, 128, 3000, "bf16", "layernorm")],
    ),
)
def test_peak_is_within_5_percent_of_memtrackers(
    batch: int, length: int, vocabulary: int, dtype: str, norm: str, recompute: str
) -> None:
    segments = SEGMENTS[recompute]
    config = ModelConfig(vocabulary, layers=4, width=128, heads=4, norm=norm)  # type: ignore[arg-type]
    line = f"--layers 4 --width 128 --heads 4 --vocabulary {vocabulary} --norm {norm}"
    # torch's AdamW keeps its states in the parameters' dtype
    limits = SearchLimits(dtype=dtype, optimizer_nbytes=8.0 if dtype == "fp32" else 4.0)
    job = PlannedJob(train_gpt(line), cluster(1, 1), Batch(batch, length), limits)
    layout = Layout(micro_batch=batch, cuts=(6,), recompute=segments)
    found = device_nbytes(memory_of(job, work_of(job, layout), 0, Choices()))
    peak = measured(config, batch, length, limits.torch_dtype, segments)
    assert found == pytest.approx(peak, rel=0.05)


def test_what_codecs_keep() -> None:
    layout = Layout(data=4, micro_batch=2, zero_stage=1, cuts=(6,))
    block = {"dp": {"codec": "blockint", "bits": 4, "error_feedback": True},
             "zero": {"codec": "blockint", "bits": 4, "delta": True}}  # fmt: skip
    plain, kept = (step(layout, cluster(1, 4), one).memory for one in (None, block))
    values = small().parameters
    assert plain["residuals"] == plain["references"] == plain["payloads"] == 0
    assert kept["residuals"] == 4 * values
    assert kept["references"] == 2 * values / 4
    assert kept["payloads"] == pytest.approx(2 * values * 4.2578125 / 8)
    # buckets with few owners are encoded again by the summing ranks
    summed = step(layout, cluster(1, 4), block, bucket_numel=1000).memory
    assert summed["residuals"] == pytest.approx(5 * values, abs=8)
    # on several nodes with several ranks each, residuals belong to a node's sum
    assert step(layout, cluster(2, 2), block).memory["residuals"] == 4 * values / 2


def test_states_of_the_engines() -> None:
    values = small().parameters
    layout = Layout(data=4, micro_batch=2, zero_stage=1, cuts=(6,))
    for engine, gradients in (("deepspeed", 2), ("megatron", 4)):
        found = step(layout, cluster(1, 4), engine=engine).memory
        assert found["weights"] == 2 * values and found["gradients"] == gradients * values
        assert found["optimizer"] == 12 * values / 4
    three = step(layout.replace(zero_stage=3), cluster(1, 4)).memory
    assert three["weights"] == 2 * values / 4 and three["gathered"] > 0
