"""Attention blocks by torch's GPU kernels against plain torch in fp64, and the kernel chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridcomp.nn.context import blocks, kernels
from hybridcomp.nn.context.blocks import Mask

LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
HALVES = (torch.float16, torch.bfloat16)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, kind",
    [*((dtype, "efficient") for dtype in LIMITS), *((dtype, "flash") for dtype in HALVES)],
)
@pytest.mark.parametrize("heads, kept, width", [(4, 4, 64), (6, 2, 20), (2, 1, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_are_plain_torch(
    dtype: torch.dtype, kind: kernels.Kind, heads: int, kept: int, width: int, causal: bool
) -> None:
    """Merges two blocks, and computes gradients from both logsumexps.

    The efficient kernel also runs in 16 bits, for GPUs before Ampere and wide heads.
    """
    length, scale, device = 70, width**-0.5, "cuda"
    q = drawn((2, heads, length, width), dtype, device, 0)
    k = drawn((2, kept, 2 * length, width), dtype, device, 1)
    v = drawn((2, kept, 2 * length, width), dtype, device, 2)
    grad = drawn((2, heads, length, width), dtype, device, 3)
    if kind == "flash" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no flash kernel before Ampere")
    parts = [(slice(0, length), Mask(causal)), (slice(length, 2 * length), Mask(False))]

    def both(wide: torch.dtype, kind: kernels.Kind) -> list[Tensor]:
        qs, ks, vs, gs = (t.to(wide) for t in (q, k, v, grad))
        results = [
            kernels.forward(qs, ks[:, :, p], vs[:, :, p], mask, scale, kind) for p, mask in parts
        ]
        out = results[0][0].to(blocks.accumulator(wide)).clone()
        logs = results[0][1].clone()
        blocks.merge(out, logs, *results[1])
        delta = (out * gs).sum(-1)
        grads = [
            kernels.backward(
                gs, qs, ks[:, :, p], vs[:, :, p], out.to(wide), delta, logs, mask, scale, kind
            )
            for p, mask in parts
        ]
        grad_q = grads[0][0].double() + grads[1][0].double()
        return [out, grad_q, *(torch.cat([g[i] for g in grads], 2) for i in (1, 2))]

    for ours, right in zip(both(dtype, kind), both(torch.float64, "plain"), strict=True):
        error = (ours.double() - right).norm() / right.norm()
        assert ours.shape == right.shape and float(error) <= LIMITS[dtype]


@pytest.mark.parametrize(
    "capability, width, kind",
    [
        ((7, 5), 64, "efficient"), ((8, 0), 224, "flash"), ((8, 6), 192, "flash"),
        ((8, 9), 224, "efficient"), ((12, 0), 200, "efficient"), ((9, 0), 256, "flash"),
        ((10, 0), 264, "efficient"),
    ],
)  # fmt: skip
def test_which_kernel_a_gpu_has(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], width: int, kind: str
) -> None:
    """The choice is torch's for training (``can_use_flash_attention``)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    q = SimpleNamespace(
        is_cuda=True, dtype=torch.bfloat16, shape=(1, 1, 4, width), device=torch.device("cuda")
    )
    assert kernels.kind_of(q, q, masked=False) == kind  # type: ignore[arg-type]


def test_a_cpu_computes_plainly() -> None:
    q = torch.zeros(1, 1, 4, 8, dtype=torch.bfloat16)
    assert kernels.kind_of(q, q, masked=False) == "plain"


@pytest.mark.parametrize("width", [16, 20])
@pytest.mark.parametrize("by_tokens", [True, False])
def test_the_efficient_kernel_gets_the_heads_of_a_token_side_by_side(
    monkeypatch: pytest.MonkeyPatch, width: int, by_tokens: bool
) -> None:
    """It derives the position of a context row and takes no stride.

    Also for slices of rows, and for padded heads.
    """
    seen: list[Tensor] = []

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object, **_: object) -> Any:
        out = rest[1]
        assert isinstance(out, Tensor)
        seen.append(out)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None

    name = "_scaled_dot_product_efficient_attention_backward"
    monkeypatch.setattr(torch.ops.aten, name, backward)
    shape = (2, 12, 3, width) if by_tokens else (2, 3, 12, width)
    whole = drawn(shape, torch.bfloat16, "cpu", 0)
    out = (whole.transpose(1, 2) if by_tokens else whole)[:, :, 4:]
    q = drawn((2, 3, 8, width), torch.bfloat16, "cpu", 1)
    logs = torch.zeros(2, 3, 8)
    grads = kernels.backward(q, q, q, q, out, logs, logs, Mask(True), 1.0, "efficient")
    assert [values.shape for values in grads] == [q.shape] * 3
    (given,) = seen
    filled = given.shape[3]
    assert filled % kernels.STEP == 0 and given.stride()[1:] == (filled, 3 * filled, 1)
    assert torch.equal(given[..., :width], out) and not given[..., width:].any()


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_tiles_change_nothing(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """For any number of scores that fit the memory: the same context and gradients."""
    q, k = (drawn((2, heads, 33, 12), torch.float64, "cpu", heads) for heads in (4, 2))
    mask = Mask(causal=True)

    def whole() -> list[Tensor]:
        out, logs = blocks.forward(q, k, k, mask, 0.3)
        grads = blocks.backward(out, q, k, k, (out * out).sum(-1), logs, mask, 0.3)
        return [out, logs, *grads]

    expected = whole()
    monkeypatch.setattr(blocks, "TILE", rows * 2 * 4 * 33)
    for ours, right in zip(whole(), expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-13)


def test_rows_that_see_nothing() -> None:
    """Padding has no context and no gradients, and merging it changes nothing."""
    q = drawn((1, 1, 4, 8), torch.float64, "cpu", 0)
    rows = torch.tensor([[0, 0, -1, -1]])
    mask = Mask(False, rows, rows)
    out, logs = blocks.forward(q, q, q, mask, 1.0)
    assert not out[:, :, 2:].any() and bool((logs[:, :, 2:] == -torch.inf).all())
    grads = blocks.backward(q, q, q, q, (out * q).sum(-1), logs, mask, 1.0)
    assert all(bool(g.isfinite().all()) and not g[:, :, 2:].any() for g in grads)
    before = out.clone()
    blocks.merge(out, logs, torch.zeros_like(out), torch.full_like(logs, -torch.inf))
    assert torch.equal(out, before)
