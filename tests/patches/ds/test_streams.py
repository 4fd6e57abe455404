"""Steps of DeepSpeed's engines on a fake GPU that checks streams (``tests/stand_ins/gpu``).

Upstream's code is reproduced from release 0.19: the current stream at a seam, and the waits around
it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hybridcomp.channels import ATTRIBUTE, NAME, Channels
from hybridcomp.collectives.wire.headers import UNREAD, Header, spec_digest
from hybridcomp.patches.ds.pipeline.agreement import Agreed
from hybridcomp.patches.ds.pipeline.pipe import RUNNING, Pipe
from hybridcomp.patches.ds.pipeline.pipeline import make_recv, make_send
from hybridcomp.patches.ds.zero import parameter_gathers, zero3, zero12
from tests.stand_ins.gpu.common import (
    QUIET,
    RANK,
    RANKS,
    chain,
    channels,
    computing,
    cuda,
    gpu,
    values_of,
)
from tests.stand_ins.gpu.machine import Gpu
from tests.stand_ins.process_groups import fake_group

__all__ = ["gpu"]  # a fixture
pytestmark = QUIET

FOUR: dict[str, Any] = {"codec": "blockint", "bits": 4, "error_feedback": True}
#: name of a block -> the block, the host's waits per step
BLOCKS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "recommended": ({"dp": FOUR, "zero": {"codec": "blockint", "bits": 8}}, set()),
    # variable payload sizes
    "lossless": ({"dp": "expcode", "zero": "expcode"}, {"an event"}),
}
NUMEL = 4 * 256
GROUP = fake_group(RANKS, RANK)


def parameters(numels: tuple[int, ...]) -> list[Any]:
    found = []
    for place, numel in enumerate(numels):
        one = SimpleNamespace(numel=lambda numel=numel: numel)
        setattr(one, NAME, f"p{place}")
        found.append(one)
    return found


def stepped(gpu: Gpu, state: Channels, step: Callable[[], None]) -> list[str]:
    """Make three steps; return the last one's operations, and keep its host waits."""
    for _ in range(3):
        gpu.waits.clear()
        gpu.did.clear()
        step()
        state.step += 1
        state.close_step(False, torch.device("cuda", 0))
    assert not gpu.unmet
    return chain(gpu)


@pytest.mark.parametrize("name", list(BLOCKS))
@pytest.mark.parametrize("overlaps", [False, True], ids=["in line", "overlapped"])
def test_zero_1_and_2(gpu: Gpu, overlaps: bool, name: str) -> None:
    """Two buckets of two alternating buffers, and the gather after the step."""
    block, waits = BLOCKS[name]
    state = channels(**block)
    buffers = [values_of(NUMEL) for _ in range(2)]
    flat = values_of(NUMEL)
    setattr(flat, ATTRIBUTE, state)
    shards = list(flat.chunk(RANKS))
    optimizer = SimpleNamespace(
        sequence_parallel_size=1, dp_process_group=GROUP, gradient_average=True,
        overlap_comm=overlaps, reduction_stream=cuda.Stream(), bit16_groups=[parameters((NUMEL,))],
        ipg_buckets={torch.bfloat16: SimpleNamespace(params=[(0, 0, 0)])},
        partition_gradients=True, is_gradient_accumulation_boundary=True,
    )  # fmt: skip
    setattr(optimizer, ATTRIBUTE, state)
    scatter = zero12.make_allreduce_and_scatter(lambda *_: None)

    def upstream(self: Any, tensor: Tensor, dtype: torch.dtype) -> None:
        stream, current = self.reduction_stream, cuda.current_stream()
        if overlaps:
            stream.wait_stream(current)
            current.wait_stream(stream)
        with cuda.stream(stream if overlaps else current):
            tensor.record_stream(cuda.current_stream())
            each = list(enumerate(tensor.chunk(RANKS)))
            scatter(self, each, dtype)
            tensor.chunk(RANKS)[RANK].clone()  # upstream keeps its chunk

    average = zero12.make_average_tensor(upstream)
    gather = parameter_gathers.make_all_gather_into_tensor_dp_groups(lambda *_: None)

    def step() -> None:
        for place in range(2):
            if overlaps and place == 1:
                cuda.current_stream().wait_stream(optimizer.reduction_stream)
            buffers[place].fill_(1.0)  # the backward pass
            average(optimizer, buffers[place], torch.bfloat16)
        cuda.current_stream().wait_stream(optimizer.reduction_stream)
        shards[RANK].add_(1)  # the optimizer
        gather([flat], [shards], [GROUP])
        flat.add_(1)  # the next forward pass

    coded, waited = computing(stepped(gpu, state, step))
    assert set(gpu.waits) == waits
    if name == "recommended":  # the gather after the step is in stream order with it, as upstream's
        assert coded == (2 if overlaps else 2 * 2 + 2)
        assert waited == (1 if overlaps else 2 + 1)


@pytest.mark.parametrize("name", list(BLOCKS))
def test_gradients_of_zero_3(gpu: Gpu, name: str) -> None:
    """Gradients are copied into a bucket on the stream that reduces it, as upstream does."""
    block, waits = BLOCKS[name]
    state, side = channels(**block), cuda.Stream()
    bucket = values_of(NUMEL)
    optimizer = SimpleNamespace(
        is_gradient_accumulation_boundary=True, contiguous_gradients=True, reduce_scatter=True,
        all2all_process_group=None,
    )  # fmt: skip
    setattr(optimizer, ATTRIBUTE, state)
    reduce = zero3.make_reduce_scatter_coalesced(lambda *_: [])
    params, held = parameters((NUMEL // 2,) * 2), []

    def upstream(self: Any, params: list[Any], dtype: torch.dtype) -> list[Tensor]:
        return reduce(list(bucket.chunk(2)), GROUP)

    scatter = zero3.make_avg_scatter_grads(upstream)

    def step() -> None:
        for _ in range(2):
            gradients = values_of(NUMEL)
            side.wait_stream(cuda.current_stream())
            with cuda.stream(side):
                bucket.copy_(gradients)
                gradients.record_stream(side)
                held.append([part.add_(1) for part in scatter(optimizer, params, torch.bfloat16)])
        cuda.current_stream().wait_stream(side)

    assert computing(stepped(gpu, state, step)) == (0, 0)
    assert set(gpu.waits) == waits


@pytest.mark.parametrize("padding", [0, 8])
@pytest.mark.parametrize("name", list(BLOCKS))
def test_fetches_of_zero_3(
    gpu: Gpu, name: str, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer is prefetched on a side stream, and the pass waits for its decoding."""
    accelerator = pytest.importorskip("deepspeed.accelerator")
    monkeypatch.setattr(accelerator, "get_accelerator", lambda: SimpleNamespace(stream=cuda.stream))
    block, waits = BLOCKS[name]
    state, side = channels(**block), cuda.Stream()
    layers = [[_partitioned(state, 2 * layer + place, padding) for place in range(2)]
              for layer in range(3)]  # fmt: skip
    fetch = parameter_gathers.make_dist_allgather_fn(lambda *_: None)
    under_way: dict[int, tuple[Any, Tensor]] = {}

    def upstream(self: Any, params: Any, forward: bool, quantize: bool = False) -> None:
        params = list(params)
        if not params:
            return
        with cuda.stream(side):
            mine = torch.cat([p.ds_tensor for p in params])
            out = values_of(RANKS * mine.numel())
            under_way[params[0].ds_id] = fetch(mine, out, GROUP), out

    gather = parameter_gathers.make_all_gather_params(upstream)
    coordinator = SimpleNamespace()
    coordinator._PartitionedParameterCoordinator__allgather_stream = side

    def step() -> None:
        side.wait_stream(cuda.current_stream())
        gather(coordinator, layers[0], True)
        for place, layer in enumerate(layers):
            handle, out = under_way.pop(layer[0].ds_id)
            with cuda.stream(side):
                handle.wait()
            cuda.current_stream().wait_stream(side)
            if place + 1 < len(layers):
                gather(coordinator, layers[place + 1], True)
            out.add_(1)
            out.record_stream(cuda.current_stream())
        for layer in layers:
            for parameter in layer:
                parameter.ds_tensor.add_(1)  # the optimizer

    done = stepped(gpu, state, step)
    assert set(gpu.waits) == waits and computing(done) == (0, 0)
    zeroed = sum(line.count("zero_") for line in done)
    assert (zeroed > 0) == (padding > 0), "partitions without padding have nothing to zero"


def _partitioned(state: Channels, number: int, padding: int) -> Any:
    """Return a parameter whose last rank's partition is shorter by ``padding``."""
    size = NUMEL // RANKS
    numel = NUMEL - (padding if padding < size else 0)
    if padding:  # this rank's partition contains the parameter's end
        numel = size * (RANK + 1) - padding
    found = SimpleNamespace(
        ds_id=number, ds_persist=False, ds_status=SimpleNamespace(name="NOT_AVAILABLE"),
        ds_process_group=GROUP, ds_secondary_tensor=None, ds_tensor=values_of(size),
        ds_numel=numel, partition_numel=lambda: size,
    )  # fmt: skip
    found.ds_tensor.ds_numel = size
    setattr(found, ATTRIBUTE, state)
    return found


@pytest.mark.parametrize("pp", [{"codec": "blockint", "bits": 8}, "expcode"], ids=str)
def test_a_stage_of_a_pipeline(gpu: Gpu, pp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations to the next stage, their gradients back, four micro-batches."""
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=GROUP))
    state = channels(pp=pp)
    codec = state.policy.codecs["pp", "forward"]
    assert codec is not None
    header = Header(spec_digest(codec.spec), torch.bfloat16, NUMEL, 64)

    def read(self: Tensor) -> list[int]:
        gpu.wait("a header", gpu.current.clock)
        return list(header.pack())

    monkeypatch.setattr(FakeTensor, "tolist", read)
    # a header of fixed size is read once; later ones are checked at the end of a step
    if codec.fixed_size:
        monkeypatch.setattr(UNREAD, "kinds", {(2, NUMEL, torch.bfloat16, codec.spec)})
    engine = SimpleNamespace(
        next_stage=2, stage_id=1,
        grid=SimpleNamespace(stage_to_global=lambda stage_id: stage_id),
    )  # fmt: skip
    pipe = Pipe(engine, state["pp"])
    agreed = Agreed(torch.bfloat16, True)
    pipe.advance = lambda peer, sending: (agreed, "forward" if sending else "backward")  # type: ignore[method-assign]
    send, recv = make_send(lambda *_: None), make_recv(lambda *_: None)
    back = values_of(NUMEL)

    def step() -> None:
        with RUNNING.inside(pipe):
            for _ in range(4):
                out = values_of(NUMEL).add_(1)  # the forward pass
                send(out, 2)
                del out
                recv(back, 2)
                back.add_(1)  # the backward pass

    done = stepped(gpu, state, step)
    # nothing happens between a send and the stage's next call, the receive of the gradient: header
    # and payload of both are posted before the stream waits
    sends = [line for line in done if line.startswith("NCCL") and line.count("message") == 4]
    assert len(sends) == 4 * codec.fixed_size
    # received header and payload, and, once long complete, the sent ones
    assert computing(done) == (4 * 2, 4 * (2 + 2))
    assert gpu.waits == ([] if codec.fixed_size else ["an event", "a header"] * 4)
