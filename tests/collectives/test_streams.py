"""Stream synchronization on a fake GPU: streams wait as needed, and the host only if necessary.

No value is computed (``tests/stand_ins/gpu``). It detects errors that a real GPU shows only
sporadically: memory reused while another stream reads it, a missing wait, a host that blocks on a
tensor, tensors of two devices in one operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from hybridcomp import collectives
from hybridcomp.channels import Channels
from hybridcomp.channels.offload.pinned_receive_buffers import PinnedReceiveBuffers
from hybridcomp.codecs import Codec, make_codec
from hybridcomp.codecs.exact_steps import ExactSteps
from hybridcomp.codecs.quantized_residual import split, zeros
from hybridcomp.collectives import (
    Group,
    Meter,
    OwnedRange,
    Transfer,
    chunk_ranges,
    send_recv,
)
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from tests.channels import sent
from tests.collectives.calls import (
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    reduce_to_owners,
    send,
)
from tests.selection import by_day
from tests.stand_ins.gpu.common import (
    NUMEL,
    QUIET,
    RANK,
    RANKS,
    chain,
    channels,
    cuda,
    gpu,
    values_of,
)
from tests.stand_ins.gpu.machine import DEVICE, Gpu
from tests.stand_ins.gpu.memory import Race
from tests.stand_ins.process_groups import fake_group

__all__ = ["gpu"]  # a fixture

FIXED = [
    make_codec("blockint", bits=8), make_codec("blockint", bits=4, rotate=True), make_codec("bf16"),
    make_codec("fp8"), make_codec("zfp", rate=8),
]  # fmt: skip
VARIABLE = [
    make_codec("radix", error_bound=1e-2), make_codec("expcode"), make_codec("mpc"),
    make_codec("topk", density=0.25),  # payloads of 64 bytes, as predicted, and more
]  # fmt: skip

pytestmark = QUIET


def test_the_stand_in_notices_what_a_gpu_would_not(gpu: Gpu) -> None:
    values, side = values_of(), cuda.Stream()
    with pytest.raises(Race, match="without having waited"), cuda.stream(side):
        values.add_(1)
    work = gpu.post([], [values])
    with pytest.raises(Race):
        values.add_(1)
    work.wait()
    values.add_(1)
    assert not gpu.waits
    values.cpu()
    torch.tensor([1, 2], device=DEVICE)
    assert len(gpu.waits) == 2
    with pytest.raises(Exception, match="_local_scalar_dense"):
        int(values.sum())
    with pytest.raises(Exception, match="same device"):
        values + torch.zeros(NUMEL)


def reductions(codec: Codec, dtype: torch.dtype, bits: int, cuts: Sequence[int]) -> None:
    """Run every reduction for two steps, passing residuals on; 0 bits: none."""
    chunks, group = chunk_ranges(NUMEL, RANKS), Group.of(fake_group(RANKS, RANK))
    lengths = [stop - start for start, stop in chunks]
    ranges = [OwnedRange(*chunk, (rank,)) for rank, chunk in enumerate(chunks)]
    held = [zeros(bits, NUMEL, DEVICE) if bits else None for _ in range(3)]
    owned = zeros(bits, lengths[RANK], DEVICE) if bits else None
    for _ in range(2):
        meter, values = Meter(), values_of(dtype=dtype)
        handle = all_reduce(
            values, codec, group, meter=meter, cuts=cuts, residual=held[0], owner_residual=owned,
            async_op=True,
        )  # fmt: skip
        handle.wait()
        values.add_(1)
        shards = list(torch.split(values, lengths))
        left = None if held[1] is None else split(held[1], lengths)
        total = reduce_scatter(
            shards, codec, group, meter=meter, residuals=left, async_op=True
        ).wait()
        total.add_(1)
        for part in reduce_to_owners(
            values, ranges, codec, group, meter=meter, residual=held[2], cuts=cuts
        ):
            part.add_(1)


def moves(codec: Codec, dtype: torch.dtype) -> None:
    """Run every message that does not reduce."""
    group, meter = Group.of(fake_group(RANKS, RANK)), Meter()
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
    collectives.finish_sends()


@pytest.mark.parametrize(
    "dtype, bits",
    [pytest.param(torch.bfloat16, 0, marks=pytest.mark.nightly), (torch.float32, 32)],
    ids=["plain", "feedback"],
)
@pytest.mark.parametrize(
    "codec", by_day([*FIXED, *VARIABLE], [FIXED[0], FIXED[-1], *VARIABLE[1::2]]), ids=str
)
def test_collectives(gpu: Gpu, codec: Codec, dtype: torch.dtype, bits: int) -> None:
    """The host waits only for payload sizes, and for the header in the first message of a kind."""
    reductions(codec, dtype, bits, ())
    assert set(gpu.waits) <= {"an event"}
    gpu.waits.clear()
    reductions(codec, dtype, bits, ())
    reductions(codec, dtype, bits, (2048, 4096))
    waits = set(gpu.waits)
    assert waits == (set() if codec.fixed_size else {"an event"})
    moves(codec, dtype)
    assert not gpu.unmet


@pytest.mark.parametrize("pieces", [4, 100])
def test_gathers_of_exact_steps(gpu: Gpu, pieces: int) -> None:
    """Few pieces fit a launch's arguments; many use a table on the device."""
    group, cuts = Group.of(fake_group(RANKS, RANK)), [8 * piece for piece in range(1, pieces)]
    for _ in range(2):
        values, held = values_of(dtype=torch.bfloat16), values_of(dtype=torch.bfloat16)
        gathered = values_of(RANKS * NUMEL, torch.bfloat16)
        codec, meter = ExactSteps().against(held), Meter()
        all_gather(values, gathered, codec, group, meter=meter, cuts=cuts, async_op=True).wait()
        gathered.add_(1)
    assert set(gpu.waits) == {"an event"} and not gpu.unmet


@pytest.mark.parametrize("bits", [8, 4])
def test_residuals_of_few_bits(gpu: Gpu, bits: int) -> None:
    codec = make_codec("blockint", bits=bits - 1)  # so no plan has tables of another test's GPU
    reductions(codec, torch.bfloat16, bits, ())
    reductions(codec, torch.bfloat16, bits, (2048, 4096))
    assert not gpu.waits and not gpu.unmet


@pytest.mark.parametrize("codec", [FIXED[0], *VARIABLE], ids=str)
def test_on_a_side_stream(gpu: Gpu, codec: Codec) -> None:
    """As in an engine that reduces during its backward pass."""
    side, group = cuda.Stream(), Group.of(fake_group(RANKS, RANK))
    for _ in range(2):
        values = values_of()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            all_reduce(values, codec, group, async_op=True).wait()
        cuda.current_stream().wait_stream(side)
        values.add_(1)


@pytest.mark.parametrize("codec", [FIXED[0], make_codec("zfp", rate=8), *VARIABLE], ids=str)
def test_waited_for_on_another_stream(gpu: Gpu, codec: Codec) -> None:
    """As ZeRO 3 does with prefetched but unused parameters."""
    side, group = cuda.Stream(), Group.of(fake_group(RANKS, RANK))
    for _ in range(2):
        values, gathered = values_of(), values_of(RANKS * NUMEL)
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            summed = all_reduce(values, codec, group, async_op=True)
            brought = all_gather(values, gathered, codec, group, async_op=True)
        cuda.current_stream().wait_stream(side)
        summed.wait()
        brought.wait()
        gathered.add_(1)
        gpu.sweep()


@pytest.mark.parametrize("codec", FIXED[:3], ids=str)
def test_payloads_on_their_way_to_the_host(gpu: Gpu, codec: Codec) -> None:
    landing = PinnedReceiveBuffers()
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


@pytest.mark.parametrize("codec", [FIXED[0], VARIABLE[1]], ids=str)
def test_a_stream_goes_on_while_a_message_leaves(gpu: Gpu, codec: Codec) -> None:
    """The payload is kept until the stream is behind the message."""
    group, leaving = Group.of(fake_group(RANKS, RANK)), send_recv.LEAVING
    for step in range(3):
        values = values_of().add_(1)
        gpu.did.clear()
        send(values, 2, codec, group)
        first = chain(gpu)[0]
        assert first.count("waits for a message") == 2 * (step > 0), "for the one before"
        values.add_(1)
        del values
        gpu.sweep()
    assert len(gpu.unmet) == 2
    collectives.finish_sends()
    assert not gpu.unmet and not leaving.works and not leaving.tensors
    send(values_of(), 2, codec, group)
    for message in gpu.unmet:
        message._held = []  # a backend that does not hold what it sends
    gpu.sweep()
    leaving.tensors.clear()
    with pytest.raises(Race, match="was freed"):
        gpu.sweep()
    collectives.finish_sends()


def test_a_message_in_a_graph_is_refused(gpu: Gpu) -> None:
    channel = channels(dp={"codec": "bf16"})["dp"]
    values = values_of()
    (codec,) = FIXED[2:3]
    gpu.capturing = True
    with pytest.raises(ConfigError, match="CUDA graph"):
        sent.all_reduce(channel, values, codec, fake_group(RANKS, RANK))
    gpu.capturing = False
    sent.all_reduce(channel, values, codec, fake_group(RANKS, RANK))


def test_a_step_that_is_timed_waits_for_nothing(gpu: Gpu) -> None:
    state = Channels(CompressionConfig.parse({"dp": "bf16", "ledger": {"sample_every": 10}}))
    state.step = 5
    assert state.timing and not state.sampling
    values = values_of()
    sent.all_reduce(state["dp"], values, FIXED[2], fake_group(RANKS, RANK))
    state.ledger.drain()
    assert not gpu.waits
