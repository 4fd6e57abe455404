"""Older weights in passes: positions in shared storages, required versions, bounds."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from hybridcomp.config.async_pipeline import Versions
from hybridcomp.nn.async_pipeline import PassOrder, WeightVersions

VERSIONS: tuple[Versions, ...] = ("stash", 2, 1)


def flat_model() -> nn.Sequential:
    """Return layers whose parameters share a storage, as under ZeRO."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3))
    flat = torch.cat([p.data.flatten() for p in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    return model.double() if flat.dtype == torch.float64 else model


@pytest.mark.parametrize("older", [True, False])
def test_backward_has_the_weights_that_it_is_given(older: bool) -> None:
    """It uses the forward pass's weights (``older``): those before an in-place step."""
    model, inputs = flat_model(), torch.randn(4, 5)
    expected = torch.autograd.grad(model(inputs).square().sum(), list(model.parameters()))
    versions = WeightVersions(model.parameters())
    with versions.forward(None):
        loss = model(inputs).square().sum()
    versions.before_step({0})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)  # an error of autograd if it had saved the parameter itself
    versions.after_step()
    own = [p.data_ptr() for p in model.parameters()]
    with versions.inside(versions.at(0) if older else None):
        loss.backward()
    assert [p.data_ptr() for p in model.parameters()] == own
    same = [
        torch.allclose(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True)
        if p.grad is not None
    ]  # fmt: skip
    assert all(same) if older else not all(same)


def test_a_pass_without_a_backward_pass_is_freed() -> None:
    """As when the pipeline is drained, before every evaluation."""
    layer = nn.Linear(4, 4)
    versions = WeightVersions(layer.parameters())
    counts = []
    for _ in range(3):
        with versions.forward(None):
            torch.softmax(layer(torch.ones(2, 4)), -1)  # saves its output
        gc.collect()
        counts.append(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()))
    assert counts[1] == counts[2]


def test_a_failed_pass_leaves_the_newest_weights() -> None:
    model = flat_model()
    versions = WeightVersions(model.parameters())
    versions.before_step({0})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    versions.after_step()
    with pytest.raises(RuntimeError, match="stage"), versions.inside(versions.at(0)):
        raise RuntimeError("stage")
    assert all(not p.any() for p in model.parameters())
    assert versions.held == 2
    versions.drop()
    assert versions.held == 1


@pytest.mark.parametrize("versions", VERSIONS)
@pytest.mark.parametrize(("ahead", "micro_batches"), [(0, 1), (3, 1), (3, 2), (6, 4), (3, 8)])
def test_orders(versions: Versions, ahead: int, micro_batches: int) -> None:
    """Every requested version is available, and no more than the bound are kept."""
    if versions == 2 and micro_batches < ahead:
        pytest.skip("refused")
    model = nn.Linear(2, 2)
    held, order = WeightVersions(model.parameters()), PassOrder(versions, ahead, micro_batches)
    order.begin(0)
    seen: dict[int, int] = {}
    for step in range(12):
        for is_forward in order.batch():
            if is_forward:
                micro_batch = order.forwarded
                seen[micro_batch] = version = order.forward(held.newest)
            else:
                first = seen.pop(order.backwarded)
                version = order.backward(held.newest)
                assert version == (held.newest if versions == 1 else first)
            held.at(version)
        assert order.backwarded == (step + 1) * micro_batches
        assert len(seen) == ahead
        held.before_step(order.needed(held.newest))
        held.after_step()
    assert order.staleness == order.bound
    assert held.most_held <= {"stash": ahead + 1, "2": 2, "1": 1}[str(versions)]
