"""Ignored labels and frozen stages give the whole model's results."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hybridcomp.nn.slices import KVCache, SlicedStage, SlicePipeline
from tests.nn.slices.test_pipeline import LENGTH, SLICES, STAGES, WIDTH, batch, loss_of, model
from tests.ranks import RunRanks

#: ranges of tokens without a label (from, to), for each of the two sequences
PADDED = [[(3, 5), (16, LENGTH)], [(0, 4), (17, LENGTH)]]


def padded(ignore: int) -> tuple[Tensor, Tensor]:
    """Return a batch whose slices have 11, 13, 1 and no counted labels."""
    tokens, labels = batch()
    labels = labels.clone()
    for row, gaps in zip(labels, PADDED, strict=True):
        for start, stop in gaps:
            row[start:stop] = ignore
    return tokens, labels


def against_the_whole(ignore: int, engine: bool, frozen: Sequence[int]) -> list[float]:
    """Return relative L2 errors of gradients and loss in fp64, with stages of ``frozen`` frozen."""

    def loss_of_counted(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignore)

    (tokens, labels), stages, twins = padded(ignore), model(torch.float64), model(torch.float64)
    for number in frozen:
        for parameter in (*stages[number].parameters(), *twins[number].parameters()):
            parameter.requires_grad_(False)
    values = tokens
    for stage in stages:
        values = stage(values, KVCache())
    expected = loss_of_counted(values, labels)
    expected.backward()  # type: ignore[no-untyped-call]
    rank = dist.get_rank()
    own = twins[rank]
    if engine:
        whole = SlicedStage(own, SLICES, WIDTH, loss_of_counted, ignore_index=ignore)
        loss = whole(tokens, labels)
        loss.backward()
    else:
        pipeline = SlicePipeline(
            own, SLICES, WIDTH, loss_of_counted, dtype=torch.float64, ignore_index=ignore
        )
        loss = pipeline.step(tokens, labels)
    pairs = [(loss.detach(), expected.detach())] if rank == STAGES - 1 else []
    for mine, other in zip(own.parameters(), stages[rank].parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None) == (rank in frozen)
        if mine.grad is not None and other.grad is not None:
            pairs.append((mine.grad, other.grad))
    return [float((mine - other).norm() / other.norm()) for mine, other in pairs]


@pytest.mark.parametrize(
    ("ignore", "engine", "frozen"),
    [
        (-100, False, ()),
        (-100, True, ()),
        (10, True, ()),
        (-100, False, (0,)),
        (-100, True, (0, 1)),
    ],
    ids=["pipeline", "stage", "other index", "first frozen", "two frozen"],
)
def test_loss_and_gradients_are_those_of_the_whole_model(
    on_ranks: RunRanks, ignore: int, engine: bool, frozen: Sequence[int]
) -> None:
    for rank, result in enumerate(on_ranks(STAGES, against_the_whole, ignore, engine, frozen)):
        assert len(result) == 0 if rank in frozen else len(result) >= 12
        assert max(result, default=0.0) < 1e-12


class Coded(nn.Module):
    """A stage that begins with a frozen weight in integers, as a quantized base does."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
        self.stage = stage

    def forward(self, values: Tensor, past: KVCache) -> Tensor:
        out: Tensor = self.stage(values, past)
        return out


def of_codes() -> list[float]:
    """Return the losses of a stage and of the same stage behind a weight in integers."""
    losses = []
    for wrap in (lambda stage: stage, Coded):
        own = model(torch.float32)[dist.get_rank()]
        loss = SlicedStage(wrap(own), SLICES, WIDTH, loss_of)(*batch())
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


def test_weights_in_integers_are_no_dtype_of_hidden_states(on_ranks: RunRanks) -> None:
    for plain, coded in on_ranks(STAGES, of_codes):
        assert plain == coded


def of_nothing() -> None:
    """Train on a batch without counted labels: NaN, as torch's mean over nothing."""
    tokens, labels = batch()
    stage = model(torch.float32)[dist.get_rank()]
    loss = SlicePipeline(stage, SLICES, WIDTH, loss_of).step(tokens, torch.full_like(labels, -100))
    assert loss is None or loss.isnan()


def test_a_batch_without_labels_is_as_torch_has_it(on_ranks: RunRanks) -> None:
    on_ranks(STAGES, of_nothing)
