"""Layers under tensor and sequence parallelism on a fake GPU; sampled steps there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hybridcomp.channels import AllReduce
from hybridcomp.channels.accounting.late_samples import MOST, LateSamples
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.job import small_messages
from hybridcomp.patches.common import collective_wrappers
from hybridcomp.patches.common.routes import Layers
from tests.stand_ins.gpu.common import QUIET, RANK, RANKS, chain, channels, gpu, values_of
from tests.stand_ins.gpu.machine import DEVICE, Gpu
from tests.stand_ins.process_groups import fake_group

__all__ = ["gpu"]  # a fixture
pytestmark = QUIET
GROUP = fake_group(RANKS, RANK)


@pytest.mark.parametrize("later", [False, True], ids=["at once", "asynchronously"])
@pytest.mark.parametrize("tp, waits", [
    ({"codec": "blockint", "bits": 8}, set()), ("expcode", {"an event"}),
], ids=["8 bits", "lossless"])  # fmt: skip
def test_layers(gpu: Gpu, tp: Any, waits: set[str], later: bool) -> None:
    """Every message is encoded on its layer's stream, without blocking the host."""
    state = channels(tp=tp)
    layers = Layers(lambda group: "tp", lambda: "forward", lambda: state)

    def wrapped(name: str) -> Any:
        return getattr(collective_wrappers, f"make_{name}")(layers)(lambda *_, **__: None)

    reduce, gather = wrapped("all_reduce"), wrapped("all_gather_into_tensor")
    scatter, exchange = wrapped("reduce_scatter_tensor"), wrapped("all_to_all_single")
    for _ in range(3):
        gpu.waits.clear()
        gpu.did.clear()
        whole, part, other = values_of(4096), values_of(1024), values_of(4096)
        handles = [
            reduce(whole, group=GROUP, async_op=later),
            gather(other, part, group=GROUP, async_op=later),
        ]
        for handle in filter(None, handles):
            handle.wait()
        whole.add_(1)
        other.add_(1)
        handles = [
            scatter(part, whole, group=GROUP, async_op=later),
            exchange(other, whole, group=GROUP, async_op=later),
        ]
        for handle in filter(None, handles):
            handle.wait()
        part.add_(1)
        other.add_(1)
        state.step += 1
        state.close_step(False, DEVICE)
    assert set(gpu.waits) == waits and not gpu.unmet
    kernels = [what for line in chain(gpu) for what in line.split(": ")[1].split(", ")]
    launches = sum(kernel.startswith("blockint_") for kernel in kernels)
    # encode and decode, and the parts of a sum between them
    assert launches == (3 + 2 + 2 + 2 if not waits else 0)


def test_samples_of_a_step_are_read_together(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three messages are sampled; the host waits once for them and once for the guard's sums."""

    def read(self: Tensor) -> Any:
        gpu.wait("values", gpu.current.clock)
        return [[0.25, 4.0, 1.0, 0.0][: self.shape[1]]] * len(self)

    monkeypatch.setattr(FakeTensor, "tolist", read)
    block = {"codec": "blockint", "bits": 4, "error_feedback": True, "guard": {"error": 0.5}}
    state = channels(dp=block, ledger={"sample_every": 1})
    monkeypatch.setattr(small_messages, "total", lambda values: values)
    for step in range(2):
        gpu.waits.clear()
        assert state["dp"].sampling
        for place in range(3):
            values = values_of(4096, torch.float32)
            message = AllReduce(
                numel=4096, dtype=values.dtype, group=GROUP, values=values, async_op=True,
                parameters=(Piece(f"p{place}", 0, 4096),),
            )  # fmt: skip
            state["dp"].run(message, native=lambda: None, encoded=lambda handle: handle.wait())
        assert not gpu.waits and len(state.late_samples.waiting) == 3
        state.step += 1
        state.close_step(True, DEVICE)
        assert gpu.waits == ["values"] * 2 and not state.late_samples.waiting
        entry = state.ledger.interval["dp", "forward"]
        assert (entry.error_sq, entry.value_sq) == (0.25 * 3 * (step + 1), 4.0 * 3 * (step + 1))


def test_samples_do_not_pile_up() -> None:
    late, seen = LateSamples(), list[tuple[float, ...]]()
    late.add(torch.ones(2, dtype=torch.float64), lambda *row: seen.append(row))
    assert seen == [(1.0, 1.0)] and not late.waiting, "on a CPU nobody waits"
    late.waiting = [(torch.full((2,), n), lambda *row: seen.append(row)) for n in range(MOST)]
    late.read()
    assert [row[0] for row in seen[1:]] == list(range(MOST)) and not late.waiting
    assert not dist.is_initialized()
