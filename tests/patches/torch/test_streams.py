"""Buckets of DDP and reductions of FSDP2 on a fake GPU that checks streams."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridcomp.channels import NAME
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.patches.torch.ddp.reducer import Reducer
from hybridcomp.patches.torch.fsdp2.sums import EncodedReduceScatter
from tests.stand_ins.gpu.common import QUIET, RANK, RANKS, channels, cuda, gpu, values_of
from tests.stand_ins.gpu.machine import Gpu
from tests.stand_ins.process_groups import fake_group

__all__ = ["gpu"]  # a fixture
pytestmark = QUIET

BLOCKS: dict[str, dict[str, Any]] = {
    "feedback": {"dp": {"codec": "blockint", "bits": 4, "error_feedback": True}},
    "lossless": {"dp": "expcode"},
    "bound": {"dp": {"error_bound": 1e-2}},
    "low rank": {"dp": {"codec": "powersgd", "rank": 2}},
}


@pytest.mark.parametrize("name", list(BLOCKS))
def test_buckets_of_ddp(gpu: Gpu, name: str) -> None:
    """Buckets are filled on the backward pass's stream, and read there after it."""
    numels, state = [(64, 96), (128,), (32, 32, 5)], channels(**BLOCKS[name])
    buckets = [values_of(sum(each), torch.float32) for each in numels]
    for place, each in enumerate(numels):
        for index, numel in enumerate(each):
            state.factors.learn(f"{place}.{index}", (8, numel // 8) if numel % 8 == 0 else (numel,))
    model: Any = SimpleNamespace(
        process_group=fake_group(RANKS, RANK), _has_rebuilt_buckets=True,
        find_unused_parameters=False, static_graph=False,
    )  # fmt: skip
    attached: Any = SimpleNamespace(channels=state, reduced=lambda: None)
    reducer = Reducer(model, attached)
    for _ in range(3):
        futures = []
        for place, (gradients, each) in enumerate(zip(buckets, numels, strict=True)):
            gradients.fill_(1.0)
            futures.append(reducer(_bucket(place, gradients, each, len(numels))))
        for future in futures:
            future.wait().add_(1)
        state.residuals.scale(0.5)
        if not state.step:
            gpu.waits.clear()  # the first factors of low rank come from the host
        state.step += 1
    assert not gpu.unmet
    assert set(gpu.waits) <= (set() if name in ("feedback", "low rank") else {"an event"})


def _bucket(place: int, gradients: Tensor, numels: Sequence[int], count: int) -> Any:
    parameters = []
    for index, numel in enumerate(numels):
        one = SimpleNamespace(numel=lambda numel=numel: numel, is_complex=lambda: False)
        setattr(one, NAME, f"{place}.{index}")
        parameters.append(one)
    return SimpleNamespace(
        buffer=lambda: gradients, index=lambda: place, is_last=lambda: place == count - 1,
        parameters=lambda: parameters,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["feedback", "lossless", "bound"])
def test_gradients_of_fsdp2(gpu: Gpu, name: str) -> None:
    """The order of ``foreach_reduce``: copied in on one stream, reduced on another."""
    state, side, numel = channels(**BLOCKS[name]), cuda.Stream(), 4 * 256
    pieces = [[Piece("weight", 256 * rank, 256)] for rank in range(RANKS)]
    members: Any = SimpleNamespace(
        group=SimpleNamespace(gradient_divide_factor=None, all_reduce_grads=True),
        of_message=lambda numel, size: (0,),
        pieces=lambda places, size: pieces,
    )  # fmt: skip
    attached: Any = SimpleNamespace(channels=state, reduced=lambda: None)
    scatter = EncodedReduceScatter(members, attached, SimpleNamespace(), False)  # type: ignore[arg-type]
    held = []  # upstream's parameters hold their gradients
    for _ in range(3):
        given = values_of(numel)
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            out = values_of(numel // RANKS)
            scatter(out, given, fake_group(RANKS, RANK), torch.distributed.ReduceOp.AVG)
            done = side.record_event()
        cuda.current_stream().wait_event(done)
        held.append(out.add_(1))
        del given, out
        state.step += 1
    side.wait_stream(cuda.current_stream())
