"""Keys and values of earlier slices: kept once, with the gradients of a whole graph."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from hybridcomp.errors import ConfigError
from hybridcomp.nn.slices import KVCache

LENGTH, SLICES = 12, (5, 1, 4, 2)
EDGES = list(pairwise(accumulate(SLICES, initial=0)))


def draw(width: int, seed: int) -> Tensor:
    """Draw (B, H, T, D) in fp64."""
    return torch.randn(
        2, 3, LENGTH, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def passed(past: KVCache, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the keys and values that each slice sees."""
    seen = []
    for start, stop in EDGES:
        own = past.at(start)
        seen.append(own.extend("layer", key[:, :, start:stop], value[:, :, start:stop]))
    return seen


@pytest.mark.parametrize("known", [0, LENGTH], ids=["grows", "known"])
def test_gradients_are_those_of_one_graph(known: int) -> None:
    leaves = [draw(4, 1).requires_grad_(), draw(6, 2).requires_grad_()]
    twins = [leaf.detach().requires_grad_() for leaf in leaves]
    seen = passed(KVCache(known), *leaves)
    for (_, stop), both in zip(EDGES, seen, strict=True):
        assert all(map(torch.equal, both, (twin[:, :, :stop] for twin in twins)))
    losses = []
    for (start, stop), both in zip(EDGES, seen, strict=True):
        own = [twin[:, :, :stop] for twin in twins]
        loss_of_slices, other = (
            sum(((start + 1) * values.square() * (stop - start)).sum() for values in pair)
            for pair in (both, own)
        )
        losses.append(loss_of_slices)
        assert isinstance(other, Tensor)
        other.backward()  # type: ignore[no-untyped-call]
    for loss in reversed(losses):
        assert isinstance(loss, Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
    for leaf, twin in zip(leaves, twins, strict=True):
        assert leaf.grad is not None and twin.grad is not None
        torch.testing.assert_close(leaf.grad, twin.grad, rtol=1e-13, atol=0)


def test_keys_lie_in_memory_once() -> None:
    leaves = draw(4, 1).requires_grad_(), draw(4, 2).requires_grad_()
    seen = passed(KVCache(LENGTH), *leaves)
    assert len({key.data_ptr() for key, _ in seen}) == 1
    assert len({key.untyped_storage().nbytes() for key, _ in seen}) == 1
    key, value = KVCache(LENGTH).extend("layer", *leaves)
    assert key is leaves[0] and value is leaves[1], "a whole sequence is not copied"


def test_layers_and_passes_without_gradients_stand_for_themselves() -> None:
    past, key = KVCache(), draw(4, 1)
    with torch.no_grad():
        past.extend("a", key[:, :, :3], key[:, :, :3])
        past.extend("b", key[:, :, 6:9], key[:, :, 6:9])
        past = past.at(3)
        keys, _ = past.extend("a", key[:, :, 3:5], key[:, :, 3:5])
        other, _ = past.extend("b", key[:, :, 9:10], key[:, :, 9:10])
    assert torch.equal(keys, key[:, :, :5]) and torch.equal(other, key[:, :, 6:10])


def test_a_name_comes_once_a_slice() -> None:
    """Layers with the same name would overwrite each other's keys, and add gradients twice."""
    past, key = KVCache(LENGTH), draw(4, 1)
    past.extend("a", key[:, :, :3], key[:, :, :3])
    with pytest.raises(ConfigError, match="layer a, which gave 3 of the same slice"):
        past.extend("a", key[:, :, :3], key[:, :, :3])
    past.at(3).extend("a", key[:, :, 3:5], key[:, :, 3:5])
