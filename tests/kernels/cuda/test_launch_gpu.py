"""Launches on a GPU: from other threads, on other streams, in graphs, of many tensors at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from hybridcomp.codecs import VALUE_DTYPES, make_codec
from hybridcomp.kernels.cuda import workspaces
from tests.codecs import arrays
from tests.kernels.cuda.common import payload_of

pytestmark = pytest.mark.gpu
cuda: Any = torch.cuda  # parts of it are untyped


def test_a_thread_that_has_not_used_the_device_yet() -> None:
    """It has no context before its first launch, and torch creates none for our launches."""
    codec, values = make_codec("blockint", bits=8), torch.randn(5000)
    there, right = values.cuda(), payload_of(codec, values)
    room = torch.zeros(len(right), dtype=torch.uint8, device="cuda")
    cuda.synchronize()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            codec.encode(there, room)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed, failed
    assert torch.equal(room.cpu(), right)


def test_every_device_with_another_one_current() -> None:
    codec, values = make_codec("expcode"), torch.randn(9000).bfloat16()
    right = payload_of(codec, values)
    for index in range(cuda.device_count()):
        there = values.to(torch.device("cuda", index))
        for current in range(cuda.device_count()):
            with cuda.device(current):
                assert torch.equal(payload_of(codec, there).cpu(), right)


def test_streams_share_no_workspace() -> None:
    """Encoders on two streams find zeroed workspaces, even when slabs are replaced."""
    codec = make_codec("expcode")
    values = [arrays.make("normal", 40_000, seed, torch.bfloat16) for seed in range(4)]
    right = [payload_of(codec, v) for v in values]
    there = [v.cuda() for v in values]
    streams = [cuda.Stream() for _ in range(2)]
    cuda.synchronize()
    rounds = 3 * workspaces.SLAB // 20 // len(values)
    rooms = [
        torch.zeros(codec.wire_nbytes(40_000, v.dtype), dtype=torch.uint8).cuda() for v in there
    ]
    size = torch.zeros(len(values), dtype=torch.int64, device="cuda")
    cuda.synchronize()
    for step in range(rounds):
        for index, one in enumerate(there):
            with cuda.stream(streams[index % 2]):
                codec.encode_into(one, rooms[index], size[index : index + 1])
        if step % 500 == 0:
            cuda.synchronize()
            for room, wanted, used in zip(rooms, right, size.tolist(), strict=True):
                assert torch.equal(room[:used].cpu(), wanted)


def test_a_graph_zeroes_its_workspace_at_every_replay() -> None:
    codec, values = make_codec("radix"), torch.randn(50_000).cuda()
    room = torch.zeros(
        codec.wire_nbytes(values.numel(), values.dtype), dtype=torch.uint8, device="cuda"
    )
    size = torch.zeros(1, dtype=torch.int64, device="cuda")
    codec.encode_into(values, room, size)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        codec.encode_into(values, room, size)
    for seed in range(3):
        fresh = torch.randn(50_000, generator=torch.Generator().manual_seed(seed))
        values.copy_(fresh)
        room.zero_()
        graph.replay()
        right = payload_of(codec, fresh)
        assert int(size) == len(right)
        assert torch.equal(room[: len(right)].cpu(), right)


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize(
    "settings", [{"bits": 8}, {"bits": 4}, {"bits": 3, "rotate": True}], ids=str
)
def test_a_table_on_the_device(settings: dict[str, Any], dtype: torch.dtype) -> None:
    """200 tensors of all lengths, some of them unaligned for vector loads."""
    codec = make_codec("blockint", **settings)
    lengths = [0, 1, 31, 1024, 70_000, *(7 * n for n in range(195))]
    values = [
        torch.cat([torch.zeros(n % 3, dtype=dtype), arrays.make("outliers", n, n, dtype)])
        for n in lengths
    ]
    there = [v.cuda()[n % 3 :] for v, n in zip(values, lengths, strict=True)]
    rooms = [
        torch.zeros(codec.wire_nbytes(n, dtype), dtype=torch.uint8, device="cuda") for n in lengths
    ]
    out = [torch.zeros_like(v) for v in there]
    each = codec.each(there[0].device)
    assert each is not None
    each.encode(there, rooms)
    each.decode(rooms, out)
    for one, n, room, back in zip(values, lengths, rooms, out, strict=True):
        right, decoded = payload_of(codec, one[n % 3 :]), torch.zeros(n, dtype=dtype)
        assert torch.equal(room.cpu(), right)
        codec.decode(right, decoded)
        assert torch.equal(arrays.bits_of(back.cpu()), arrays.bits_of(decoded))
