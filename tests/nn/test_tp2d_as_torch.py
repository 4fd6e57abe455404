"""Mesh layers under the plain layers' settings: autocast, padding, unusual tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hybridcomp.errors import ConfigError
from hybridcomp.nn import tp2d
from tests.nn.small_gpt import batch, gradients, joined, pair
from tests.ranks import RunRanks


def under_autocast(tied: bool, inside: bool) -> tuple[float, float]:
    """Return the largest relative gradient error of mesh and plain model against fp64.

    Both run under autocast to bf16; ``inside``: also the backward pass.
    """
    exact, _ = pair(2, torch.float64, None, tied)
    exact.loss(*batch()).backward()  # type: ignore[no-untyped-call]
    plain, meshed = pair(2, torch.float32, None, tied)
    for model in (plain, meshed):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch()[0])
            assert logits.dtype == torch.bfloat16
            loss = model.loss(*batch())
            if inside:
                loss.backward()  # type: ignore[no-untyped-call]
        if not inside:
            loss.backward()  # type: ignore[no-untyped-call]
        assert all(grad.dtype == torch.float32 for grad in gradients(model).values())
    worst = []
    for grads in (joined(meshed, gradients(meshed)), gradients(plain)):
        errors = [(grads[n].double() - g).norm() / g.norm() for n, g in gradients(exact).items()]
        worst.append(float(max(errors)))
    return worst[0], worst[1]


@pytest.mark.parametrize(("tied", "inside"), [(False, False), (True, True)])
def test_autocast_is_as_good_as_of_the_plain_model(
    on_ranks: RunRanks, tied: bool, inside: bool
) -> None:
    for mesh, plain in on_ranks(4, under_autocast, tied, inside):
        assert 1e-4 < mesh < 1.5 * plain < 0.1


def embedded(settings: dict[str, Any]) -> float:
    """Return the gradient's largest error for a table of 10 words against ``nn.Embedding``."""
    torch.manual_seed(1)
    whole = nn.Embedding(10, 8, **settings, dtype=torch.float64)
    layer = tp2d.Embedding(tp2d.Mesh(2), whole)
    tokens = torch.tensor([[3, 9, 3, 1], [2, 3, 3, 0], [9, 9, 4, 3], [3, 5, 6, 9]])
    grads = torch.randn(*tokens.shape, 8, dtype=torch.float64)
    if whole.padding_idx is not None:
        grads[tokens == whole.padding_idx] = float("nan")
    whole(tokens).backward(grads)
    own = layer.mesh.part(grads).chunk(2, dim=-1)[layer.mesh.column]
    layer(tokens).backward(own)
    assert layer.weight.grad is not None and whole.weight.grad is not None
    grad = joined(layer, {"weight": layer.weight.grad})["weight"]
    return float((grad - whole.weight.grad).abs().max())


@pytest.mark.parametrize(
    "settings",
    [{"padding_idx": 3}, {"padding_idx": -1}, {"scale_grad_by_freq": True},
     {"padding_idx": 9, "scale_grad_by_freq": True}],
    ids=str,
)  # fmt: skip
def test_an_embedding_keeps_its_settings(on_ranks: RunRanks, settings: dict[str, Any]) -> None:
    assert max(on_ranks(4, embedded, settings)) < 1e-14


def refused() -> None:
    mesh = tp2d.Mesh(2)
    for settings in ({"max_norm": 1.0}, {"sparse": True}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            tp2d.Embedding(mesh, nn.Embedding(10, 8, **settings))
    for norm, cut in ((nn.LayerNorm, tp2d.LayerNorm), (nn.RMSNorm, tp2d.RMSNorm)):
        with pytest.raises(ConfigError, match=rf"found {norm.__name__}.\[4, 8\].; only the last"):
            cut(mesh, norm((4, 8), elementwise_affine=False))
    for kinds in ({"parts": 2, "vocabulary": 8}, {"parts": 0}):
        with pytest.raises(ConfigError, match="parts"):
            tp2d.Linear(mesh, nn.Linear(8, 8, bias=False), **kinds)
    layer = tp2d.Embedding(mesh, nn.Embedding(9, 8))
    for token in (9, 50, -1):  # 9: in the padded row
        tokens = torch.zeros(4, 3, dtype=torch.int64)
        tokens[0, 1] = token  # a sample of the first row alone
        with pytest.raises(IndexError, match="vocabulary of 9 words"):
            layer(tokens)


def test_what_an_embedding_cannot_do_is_told_on_all_ranks(on_ranks: RunRanks) -> None:
    on_ranks(4, refused)


def odd_labels() -> None:
    """Use a vocabulary of 9 words; the ranks of a row hold 5 each, one of them padding."""
    mesh = tp2d.Mesh(2)
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    wide = nn.functional.pad(logits, (0, 1))
    own = mesh.part(wide).chunk(2, 1)[mesh.column].contiguous()
    for label in (8, -100, 9, 10, 12, -1):
        labels = torch.tensor([1, 2, label, 4])  # only the second row reads them
        if label in (8, -100):
            expected = nn.functional.cross_entropy(logits, labels)
            loss = tp2d.cross_entropy(own, mesh.part(labels), mesh, 9)
            torch.testing.assert_close(loss, expected)
            continue
        with pytest.raises(IndexError, match="labels of a vocabulary of 9 words"):
            tp2d.cross_entropy(own, mesh.part(labels), mesh, 9)


def test_a_label_beyond_the_vocabulary_is_told_on_all_ranks(on_ranks: RunRanks) -> None:
    on_ranks(4, odd_labels)


def no_labels() -> None:
    """Torch's loss is NaN; its gradients are 0, so that a batch of padding changes no weight."""
    mesh = tp2d.Mesh(2)
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.full((4,), -100)
    expected = nn.functional.cross_entropy(logits.repeat(2, 2), labels)
    loss = tp2d.cross_entropy(logits, mesh.part(labels), mesh)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    torch.autograd.backward(loss)
    assert torch.equal(torch.zeros(2, 5), torch.as_tensor(logits.grad))


def test_a_batch_without_labels_has_no_gradient(on_ranks: RunRanks) -> None:
    on_ranks(4, no_labels)
