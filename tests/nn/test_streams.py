"""Ring attention and mesh layers on a fake GPU that checks stream order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridcomp.nn.context.passes import RingCall, RingFunction
from hybridcomp.nn.context.traffic import RingTraffic
from hybridcomp.nn.tp2d.mesh import Mesh
from hybridcomp.nn.tp2d.products import LinearFunction, LookUpFunction
from tests.stand_ins.gpu.common import QUIET, RANK, RANKS, channels, gpu, values_of
from tests.stand_ins.gpu.machine import DEVICE, Gpu
from tests.stand_ins.process_groups import fake_group

__all__ = ["gpu"]  # a fixture
pytestmark = QUIET


@pytest.mark.parametrize("cp", ["none", {"codec": "blockint", "bits": 8}], ids=["native", "8 bits"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["flash", "efficient"])
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
def test_attention_around_a_ring(gpu: Gpu, cp: Any, dtype: torch.dtype, documents: bool) -> None:
    """Both passes run on the current stream while messages travel; the host never waits."""
    traffic = RingTraffic(channels(cp=cp), fake_group(RANKS, RANK), RANK, RANKS)
    held = [values_of(32, torch.int64).view(1, 32) for _ in range(RANKS)] if documents else None
    call = RingCall(traffic, True, 0.25, "zigzag", held)
    q, k, v = (torch.zeros(2, heads, 32, 20, dtype=dtype, device=DEVICE) for heads in (4, 2, 2))
    ctx: Any = SimpleNamespace()
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
    out = RingFunction.forward(ctx, q, k, v, call)
    assert out.shape == q.shape and out.dtype == dtype
    grads = RingFunction.backward(ctx, torch.ones_like(out))[:3]
    assert [each.shape for each in grads] == [q.shape, k.shape, v.shape]
    assert {each.dtype for each in grads} == {dtype}
    assert not gpu.unmet and not gpu.waits


@pytest.mark.parametrize(
    "tp2d", ["none", {"codec": "blockint", "bits": 8}], ids=["native", "8 bits"]
)
def test_layers_on_a_mesh(gpu: Gpu, tp2d: Any) -> None:
    """Products and a look-up, both passes: blocks travel during products, the host never waits."""
    state, mesh = channels(tp2d=tp2d), Mesh.__new__(Mesh)
    mesh.q, mesh.row, mesh.column, mesh._known = 2, 1, 1, {}
    mesh._channels = lambda: state
    mesh._groups = {"row": fake_group(2, 1), "column": fake_group(2, 1)}
    values, weight = values_of(32 * 64).view(32, 64), values_of(48 * 64).view(48, 64)
    tokens = values_of(32, torch.int64)
    layers: tuple[tuple[Any, tuple[Any, ...]], ...] = (
        (LinearFunction, (values, weight, mesh)),
        (LookUpFunction, (tokens, weight, mesh, None)),
    )
    for function, arguments in layers:
        ctx: Any = SimpleNamespace(needs_input_grad=(True, True, False))
        ctx.save_for_backward = lambda *tensors, ctx=ctx: setattr(ctx, "saved_tensors", tensors)
        out = function.forward(ctx, *arguments)
        grads: Any = function.backward(ctx, torch.ones_like(out))
        assert grads[1].shape == weight.shape and grads[1].dtype == weight.dtype
    assert not gpu.unmet and not gpu.waits
