"""Slices under activation checkpointing: unchanged gradients, once each."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hybridcomp.nn.slices import KVCache, SlicedStage, SlicePipeline
from tests.nn.slices.test_pipeline import SLICES, STAGES, WIDTH, Layer, batch, loss_of, model
from tests.ranks import RunRanks


class Again(nn.Module):
    """A layer that is recomputed in the backward pass."""

    def __init__(self, layer: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.layer, self._reentrant = layer, reentrant

    def forward(self, values: Tensor, past: KVCache) -> Tensor:
        out: Tensor = checkpoint(self.layer, values, past, use_reentrant=self._reentrant)
        return out


class Dropping(Layer):
    """A layer with random numbers, which recomputation has to reproduce."""

    def forward(self, values: Tensor, past: KVCache) -> Tensor:
        return nn.functional.dropout(super().forward(values, past), 0.2)


def gradients(reentrant: bool | None, engine: bool) -> tuple[list[Tensor], set[int]]:
    """Return this stage's gradients over 3 micro-batches, and the calls of a parameter's hook."""
    stage, calls = model(torch.float32)[dist.get_rank()], Counter[str]()
    for number, layer in enumerate(stage.layers):
        layer.__class__ = Dropping
        stage.layers[number] = layer if reentrant is None else Again(layer, reentrant)
    for name, parameter in stage.named_parameters():
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _, name=name: calls.update([name])
        )
    whole = SlicedStage(stage, SLICES, WIDTH, loss_of)
    alone = SlicePipeline(stage, SLICES, WIDTH, loss_of)
    torch.manual_seed(7)
    for _ in range(3):
        if engine:
            whole(*batch()).backward()
        else:
            alone.step(*batch())
    grads = [p.grad for p in stage.parameters() if p.grad is not None]
    return grads, set(calls.values())


def the_same(engine: bool) -> None:
    plain, calls = gradients(None, engine)
    assert len(plain) >= 12 and (not engine or calls == {3})
    for reentrant in (True, False):
        grads, often = gradients(reentrant, engine)
        assert often == calls, "hooks of an engine see each gradient once a micro-batch"
        for grad, other in zip(grads, plain, strict=True):
            torch.testing.assert_close(grad, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("engine", [False, True], ids=["pipeline", "stage"])
def test_recomputed_layers_get_the_gradients_of_kept_ones(on_ranks: RunRanks, engine: bool) -> None:
    on_ranks(STAGES, the_same, engine)
