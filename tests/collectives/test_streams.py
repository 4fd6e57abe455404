"""On a GPU that keeps account: streams wait for each other, and the host for nothing it need not.

No value is computed (``tests/stand_ins/gpu``). What is found here a run on a real GPU finds now and
then: memory that is given out again while another stream uses it, a stream that did not wait, a
host that waits for a tensor, tensors of two devices in one operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridcomp import collectives
from hybridcomp.channels import NAME, Channels
from hybridcomp.channels.error_feedback import Piece
from hybridcomp.channels.host_landing import Landing
from hybridcomp.codecs import Codec, make_codec
from hybridcomp.collectives import Group, Meter, OwnedRange, Transfer, chunk_ranges
from hybridcomp.config import CompressionConfig
from hybridcomp.engines.ddp import Reducer
from hybridcomp.engines.fsdp2_comms import EncodedReduceScatter
from hybridcomp.errors import ConfigError
from hybridcomp.nn.context.passes import RingCall, RingFunction
from hybridcomp.nn.context.traffic import RingTraffic
from hybridcomp.nn.tp2d.mesh import Mesh
from hybridcomp.nn.tp2d.products import LinearFunction, LookUpFunction
from tests.collectives.calls import (
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    reduce_to_owners,
    send,
)
from tests.stand_ins.gpu.machine import DEVICE, Gpu
from tests.stand_ins.gpu.memory import Race
from tests.stand_ins.gpu.pretended import group_of, pretended

RANKS, RANK, NUMEL = 4, 1, 9001
FIXED = [
    make_codec("blockint", bits=8), make_codec("blockint", bits=4, rotate=True), make_codec("bf16"),
    make_codec("fp8"), make_codec("zfp", rate=8),
]  # fmt: skip
VARIABLE = [make_codec("radix", error_bound=1e-2), make_codec("expcode"), make_codec("mpc")]
cuda: Any = torch.cuda

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, about addresses of fake tensors


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with torch.no_grad(), pretended(RANKS, RANK) as found:
        yield found


def channels(**block: Any) -> Channels:
    """Of a block that samples nothing, which would make the host wait."""
    every = {"ledger": {"sample_every": 0}, "min_bytes": 0, "start_step": 0}
    return Channels(CompressionConfig.parse({**every, **block}))


def values_of(numel: int = NUMEL, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=DEVICE)


def test_a_stream_that_does_not_wait_is_a_race(gpu: Gpu) -> None:
    values, side = values_of(), cuda.Stream()
    with pytest.raises(Race, match="without having waited"), cuda.stream(side):
        values.add_(1)


def test_memory_that_another_stream_uses_must_not_be_freed(gpu: Gpu) -> None:
    side = cuda.Stream()
    for recorded in (True, False):
        values = values_of()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            values.add_(1)
        if recorded:
            values.record_stream(side)
        del values
        if recorded:
            gpu.sweep()
    with pytest.raises(Race, match="was freed"):
        gpu.sweep()


def test_a_message_is_no_answer_before_it_was_waited_for(gpu: Gpu) -> None:
    values = values_of()
    work = gpu.post([], [values])
    with pytest.raises(Race):
        values.add_(1)
    work.wait()
    values.add_(1)


def test_a_host_that_waits_is_noticed(gpu: Gpu) -> None:
    values = values_of()
    assert not gpu.waits
    values.cpu()
    torch.tensor([1, 2], device=DEVICE)
    assert len(gpu.waits) == 2
    with pytest.raises(Exception, match="_local_scalar_dense"):
        int(values.sum())
    with pytest.raises(Exception, match="same device"):
        values + torch.zeros(NUMEL)


def reductions(codec: Codec, dtype: torch.dtype, feedback: bool, cuts: Sequence[int]) -> None:
    """Every reduction of two steps, with the residuals of the first in the second."""
    chunks, group = chunk_ranges(NUMEL, RANKS), Group.of(group_of(RANKS, RANK))
    lengths = [stop - start for start, stop in chunks]
    ranges = [OwnedRange(*chunk, (rank,)) for rank, chunk in enumerate(chunks)]
    held = [values_of(NUMEL, torch.float32) for _ in range(3)] if feedback else [None] * 3
    owned = values_of(lengths[RANK], torch.float32) if feedback else None
    for _ in range(2):
        meter, values = Meter(), values_of(dtype=dtype)
        handle = all_reduce(
            values, codec, group, meter=meter, cuts=cuts, residual=held[0], owner_residual=owned,
            async_op=True,
        )  # fmt: skip
        handle.wait()
        values.add_(1)
        shards = list(torch.split(values, lengths))
        left = None if held[1] is None else torch.split(held[1], lengths)
        total = reduce_scatter(
            shards, codec, group, meter=meter, residuals=left, async_op=True
        ).wait()
        total.add_(1)
        for part in reduce_to_owners(
            values, ranges, codec, group, meter=meter, residual=held[2], cuts=cuts
        ):
            part.add_(1)


def moves(codec: Codec, dtype: torch.dtype) -> None:
    """Every message that adds nothing up."""
    group, meter = Group.of(group_of(RANKS, RANK)), Meter()
    values, gathered = values_of(dtype=dtype), values_of(RANKS * NUMEL, dtype)
    all_gather(values, gathered, codec, group, meter=meter, async_op=True).wait()
    gathered.add_(1)
    swapped, given = values_of(4096, dtype), values_of(4096, dtype)
    all_to_all(swapped, given, codec, group, meter=meter, async_op=True).wait()
    swapped.add_(1)
    via = Transfer(codec, group, meter)
    for root in (0, RANK):
        mine = values if root == RANK else None
        collectives.broadcast(mine, gathered[:NUMEL], root, via, async_op=True).wait()
        total = values_of(NUMEL, torch.float32) if root == RANK else None
        collectives.reduce(values, total, root, via, async_op=True).wait()
    send(values, 2, codec, group, meter=meter)
    send(values, 2, codec, group, meter=meter)


@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "feedback"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("codec", [*FIXED, *VARIABLE], ids=str)
def test_collectives(gpu: Gpu, codec: Codec, dtype: torch.dtype, feedback: bool) -> None:
    """The host waits for sizes of payloads, and in the first message of a kind for its header."""
    reductions(codec, dtype, feedback, ())
    reductions(codec, dtype, feedback, (2048, 4096))
    waits = set(gpu.waits)
    assert waits == (set() if codec.fixed_size else {"an event"})
    moves(codec, dtype)
    assert not gpu.unmet


@pytest.mark.parametrize("codec", [FIXED[0], *VARIABLE], ids=str)
def test_on_a_side_stream(gpu: Gpu, codec: Codec) -> None:
    """As an engine does that reduces beside its backward pass."""
    side, group = cuda.Stream(), Group.of(group_of(RANKS, RANK))
    for _ in range(2):
        values = values_of()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            all_reduce(values, codec, group, meter=Meter(), async_op=True).wait()
        cuda.current_stream().wait_stream(side)
        values.add_(1)


@pytest.mark.parametrize("codec", [FIXED[0], make_codec("zfp", rate=8), *VARIABLE], ids=str)
def test_waited_for_on_another_stream(gpu: Gpu, codec: Codec) -> None:
    """As ZeRO 3 does with what was fetched ahead and not used."""
    side, group = cuda.Stream(), Group.of(group_of(RANKS, RANK))
    for _ in range(2):
        values, gathered = values_of(), values_of(RANKS * NUMEL)
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            summed = all_reduce(values, codec, group, meter=Meter(), async_op=True)
            brought = all_gather(values, gathered, codec, group, meter=Meter(), async_op=True)
        cuda.current_stream().wait_stream(side)
        summed.wait()
        brought.wait()
        gathered.add_(1)
        gpu.sweep()


BLOCKS: dict[str, dict[str, Any]] = {
    "feedback": {"dp": {"codec": "blockint", "bits": 4, "error_feedback": True}},
    "lossless": {"dp": "expcode"},
    "bound": {"dp": {"error_bound": 1e-2}},
    "low rank": {"dp": {"codec": "powersgd", "rank": 2}},
}


@pytest.mark.parametrize("name", list(BLOCKS))
def test_buckets_of_ddp(gpu: Gpu, name: str) -> None:
    """Buckets are filled on the stream of the backward pass, and read there when it is over."""
    numels, state = [(64, 96), (128,), (32, 32, 5)], channels(**BLOCKS[name])
    buckets = [values_of(sum(each), torch.float32) for each in numels]
    for place, each in enumerate(numels):
        for index, numel in enumerate(each):
            state.factors.learn(f"{place}.{index}", (8, numel // 8) if numel % 8 == 0 else (numel,))
    model: Any = SimpleNamespace(
        process_group=group_of(RANKS, RANK), _has_rebuilt_buckets=True,
        _join_config=SimpleNamespace(enable=False),
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
        one = SimpleNamespace(numel=lambda numel=numel: numel)
        setattr(one, NAME, f"{place}.{index}")
        parameters.append(one)
    return SimpleNamespace(
        buffer=lambda: gradients, index=lambda: place, is_last=lambda: place == count - 1,
        parameters=lambda: parameters,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["feedback", "lossless", "bound"])
def test_gradients_of_fsdp2(gpu: Gpu, name: str) -> None:
    """The order of ``foreach_reduce``: copied in on the one stream, reduced on another."""
    state, side, numel = channels(**BLOCKS[name]), cuda.Stream(), 4 * 256
    pieces = [[Piece("weight", 256 * rank, 256)] for rank in range(RANKS)]
    members: Any = SimpleNamespace(
        group=SimpleNamespace(gradient_divide_factor=None), of_message=lambda numel, size: (0,),
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
            scatter(out, given, group_of(RANKS, RANK), torch.distributed.ReduceOp.AVG)
            done = side.record_event()
        cuda.current_stream().wait_event(done)
        held.append(out.add_(1))
        del given, out
        state.step += 1
    side.wait_stream(cuda.current_stream())


@pytest.mark.parametrize("cp", ["none", {"codec": "blockint", "bits": 8}], ids=["native", "8 bits"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["flash", "efficient"])
@pytest.mark.parametrize("documents", [False, True], ids=["whole", "documents"])
def test_attention_around_a_ring(gpu: Gpu, cp: Any, dtype: torch.dtype, documents: bool) -> None:
    """Both passes on the stream that is current, beside the messages; the host never waits."""
    traffic = RingTraffic(channels(cp=cp), group_of(RANKS, RANK), RANK, RANKS)
    held = [values_of(32, torch.int64).view(1, 32) for _ in range(RANKS)] if documents else None
    call = RingCall(traffic, True, 0.25, "zigzag", held)
    q, k, v = (torch.zeros(2, heads, 32, 20, dtype=dtype, device=DEVICE) for heads in (4, 2, 2))
    ctx: Any = SimpleNamespace()
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
    out = RingFunction.forward(ctx, q, k, v, call)
    assert out.shape == q.shape and out.dtype == dtype
    found = RingFunction.backward(ctx, torch.ones_like(out))[:3]
    assert [each.shape for each in found] == [q.shape, k.shape, v.shape]
    assert {each.dtype for each in found} == {dtype}
    assert not gpu.unmet and not gpu.waits


@pytest.mark.parametrize(
    "tp2d", ["none", {"codec": "blockint", "bits": 8}], ids=["native", "8 bits"]
)
def test_layers_on_a_mesh(gpu: Gpu, tp2d: Any) -> None:
    """Products and a look-up, both passes: blocks travel beside products, the host never waits."""
    state, mesh = channels(tp2d=tp2d), Mesh.__new__(Mesh)
    mesh.q, mesh.row, mesh.column, mesh._known = 2, 1, 1, {}
    mesh._channels = lambda: state
    mesh._groups = {"row": group_of(2, 1), "column": group_of(2, 1)}
    values, weight = values_of(32 * 64).view(32, 64), values_of(48 * 64).view(48, 64)
    tokens = values_of(32, torch.int64)
    for function, first in ((LinearFunction, values), (LookUpFunction, tokens)):
        ctx: Any = SimpleNamespace(needs_input_grad=(True, True, False))
        ctx.save_for_backward = lambda *tensors, ctx=ctx: setattr(ctx, "saved_tensors", tensors)
        out = function.forward(ctx, first, weight, mesh)
        found: Any = function.backward(ctx, torch.ones_like(out))
        assert found[1].shape == weight.shape and found[1].dtype == weight.dtype
    assert not gpu.unmet and not gpu.waits


@pytest.mark.parametrize("codec", FIXED[:3], ids=str)
def test_payloads_on_their_way_to_the_host(gpu: Gpu, codec: Codec) -> None:
    landing = Landing()
    for _ in range(3):
        values = values_of()
        payload = landing.ship(values, codec, Meter())
        values.add_(1)
        del values
        with pytest.raises(Race):
            gpu.does(gpu.host, [payload.buffer], [])
        assert not gpu.waits
        payload.copied.synchronize()
        gpu.does(gpu.host, [payload.buffer], [])
        gpu.waits.clear()


def test_a_message_in_a_graph_is_refused(gpu: Gpu) -> None:
    channel = channels(dp={"codec": "bf16"})["dp"]
    values = values_of()
    (codec,) = FIXED[2:3]
    gpu.capturing = True
    with pytest.raises(ConfigError, match="CUDA graph"):
        channel.all_reduce(values, codec, group_of(RANKS, RANK), raw_nbytes=1)
    gpu.capturing = False
    channel.all_reduce(values, codec, group_of(RANKS, RANK), raw_nbytes=1)


def test_a_step_that_is_timed_waits_for_nothing(gpu: Gpu) -> None:
    state = Channels(CompressionConfig.parse({"dp": "bf16", "ledger": {"sample_every": 10}}))
    state.step = 5
    assert state.timing and not state.sampling
    values = values_of()
    state["dp"].all_reduce(values, FIXED[2], group_of(RANKS, RANK), raw_nbytes=1)
    state.ledger.drain()
    assert not gpu.waits
