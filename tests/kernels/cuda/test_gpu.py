"""On a GPU: the CPU's bytes, the caller's stream, and CUDA graphs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor

from hybridcomp import kernels
from hybridcomp.codecs import VALUE_DTYPES, BlockInt, Codec, make_codec
from hybridcomp.codecs.quantized_residual import QuantizedResidual
from hybridcomp.collectives import Meter, chunk_ranges
from hybridcomp.errors import CodecError
from hybridcomp.kernels.cuda import CudaKernels, images
from hybridcomp.kernels.cuda.launcher import Words
from tests.codecs import arrays
from tests.collectives.calls import all_gather, all_reduce, all_to_all, recv, reduce_scatter, send
from tests.kernels.cuda.common import (
    WITH_TOPK,
    assert_same,
    bits_but_nan,
    decoded,
    kernels_replaced,
    payload_of,
    results,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu
cuda: Any = torch.cuda  # partly untyped


class Recorder:
    """Launcher that records the images it would need and launches nothing."""

    def __init__(self) -> None:
        self.needed: set[tuple[str, tuple[str, ...]]] = set()

    def launch(self, source: str, defines: tuple[str, ...], *_: object, **__: object) -> None:
        self.needed.add((source, defines))

    def zeros(self, words: int) -> Tensor:
        return torch.zeros(words, dtype=torch.int64, device="cuda")

    empty = zeros

    def words(self, values: Words) -> Tensor:
        return torch.from_numpy(values.copy()).cuda()


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile on all cores into the image cache; one after the other takes a minute."""
    recorder = Recorder()
    kernels: Any = CudaKernels(recorder)
    for codec, dtype in itertools.product(WITH_TOPK, VALUE_DTYPES):
        with kernels_replaced(kernels), suppress(Exception):  # nothing was encoded to decode
            results(codec, arrays.make("normal", 40, 1, dtype).cuda())
    major, minor = cuda.get_device_capability()
    with ThreadPoolExecutor() as threads:
        for source, defines in recorder.needed:
            threads.submit(images.image, source, defines, 10 * major + minor)


def check(codec: Codec, *batch: Tensor) -> None:
    """Compare a batch at once: each copy waits for the device."""
    sent = _cut(_bytes(batch).cuda(), batch)
    found = [results(codec, values) for values in sent]
    right = [results(codec, values) for values in batch]
    flat = [part for one in found for part in one]
    brought = iter(_cut(_bytes(flat).cpu(), [part for one in right for part in one]))
    for values, expected in zip(batch, right, strict=True):
        assert_same(codec, values, expected, [next(brought) for _ in expected])


def _bytes(parts: Sequence[Tensor]) -> Tensor:
    # a single value may have any stride
    whole = [part.clone(memory_format=torch.contiguous_format) for part in parts]
    return torch.cat([part.view(torch.uint8) for part in whole])


def _cut(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split bytes into parts with the lengths and dtypes of ``like``."""
    parts = torch.split(flat, [part.nbytes for part in like])
    return [part.clone().view(one.dtype) for part, one in zip(parts, like, strict=True)]


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("codec", WITH_TOPK, ids=str)
def test_bytes_are_the_cpus(codec: Codec, dtype: torch.dtype) -> None:
    lengths = (0, 1, 33, 1025, 4099, 70001)
    kinds = list(enumerate(arrays.KINDS))
    check(codec, *(arrays.make(kind, n, seed, dtype) for seed, kind in kinds for n in lengths))


@pytest.mark.parametrize("codec", WITH_TOPK, ids=str)
def test_many_blocks_of_threads(codec: Codec) -> None:
    """Tiles look back at others that run at the same time."""
    check(codec, arrays.make("outliers", 9_000_001, 1, torch.bfloat16))


@settings(max_examples=100)
@given(arrays.tensors())
def test_arrays_of_hypothesis(values: Tensor) -> None:
    for codec in WITH_TOPK:
        check(codec, values)


@pytest.mark.parametrize("codec", WITH_TOPK, ids=str)
def test_runs_on_the_callers_stream(codec: Codec) -> None:
    values = arrays.make("normal", 300_000, 1)
    expected = payload_of(codec, values)
    stream = cuda.Stream()
    with cuda.stream(stream):
        there = values.cuda(non_blocking=True)
        cuda._sleep(50_000_000)  # later work must wait for this stream
        there.mul_(1.0)
        found = payload_of(codec, there)
    stream.synchronize()
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("codec", [codec for codec in WITH_TOPK if not codec.fixed_size], ids=str)
def test_sizes_are_left_on_the_device_and_nobody_waits(codec: Codec) -> None:
    """Includes error feedback: the residual follows from decoding the whole slot."""
    values = arrays.make("outliers", 300_000, 1)
    expected, there = payload_of(codec, values), values.cuda()
    sizes = torch.full((3,), -7, device="cuda")
    room = torch.empty(
        codec.wire_nbytes(values.numel(), values.dtype), dtype=torch.uint8, device="cuda"
    )
    out = torch.empty_like(there)
    codec.decode(payload_of(codec, there), out)  # compiles
    cuda.set_sync_debug_mode("error")
    try:
        codec.encode_into(there, room, sizes[1:2])
        codec.decode(room, out)
    finally:
        cuda.set_sync_debug_mode("default")
    assert sizes.tolist() == [-7, expected.numel(), -7]
    assert torch.equal(room[: expected.numel()].cpu(), expected)
    bits = arrays.bits_of(out.cpu())
    assert torch.equal(bits, decoded(codec, expected, values.numel(), values.dtype))


@pytest.mark.parametrize("codec", [codec for codec in WITH_TOPK if codec.fixed_size], ids=str)
def test_a_graph_replays_what_eager_does(codec: Codec) -> None:
    values = torch.zeros(100_000, device="cuda")
    payload = torch.empty(
        codec.wire_nbytes(100_000, values.dtype), dtype=torch.uint8, device="cuda"
    )
    out = torch.empty_like(values)

    def step() -> None:
        codec.encode(values, payload)
        codec.decode(payload, out)

    step()  # compiles
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        step()
    fresh = arrays.make("outliers", 100_000, 3)
    values.copy_(fresh)
    graph.replay()
    expected = payload_of(codec, fresh)
    assert torch.equal(payload.cpu(), expected)
    bits = arrays.bits_of(out.cpu())
    assert torch.equal(bits, decoded(codec, expected, 100_000, torch.float32))


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
def test_residuals_of_few_bits_are_the_cpus(dtype: torch.dtype, bits: int) -> None:
    """Encoded with values, and loaded and stored alone."""
    numel = 300_007
    for codec in (BlockInt(8), BlockInt(4), BlockInt(4, rotate=True)):
        values = arrays.make("nonfinite", numel, 1, dtype)
        here = QuantizedResidual.of(arrays.make("outliers", numel, 2) / 100, bits)
        there = QuantizedResidual.of(arrays.make("outliers", numel, 2).cuda() / 100, bits)
        nbytes = codec.wire_nbytes(numel, torch.float32)
        right = torch.zeros(nbytes, dtype=torch.uint8)
        found = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        assert codec.encode_kept(values, here, right)
        assert codec.encode_kept(values.cuda(), there, found)
        assert torch.equal(found.cpu(), right) and torch.equal(there._data.cpu(), here._data)
        assert torch.equal(there.unpack().cpu(), here.unpack())


@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "feedback"])
@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
def test_a_graph_replays_the_kernels_of_an_all_reduce(dtype: torch.dtype, feedback: bool) -> None:
    """The same bits as without a graph, in every step."""
    numel, ranks, me = 100_000, 4, 1
    codec = make_codec("blockint", bits=4)
    fused = codec.fused(torch.device("cuda"))
    assert fused is not None
    chunk = -(-numel // ranks // 32) * 32
    slot = codec.wire_nbytes(chunk, dtype)
    mine = slice(me * chunk, (me + 1) * chunk)
    values = torch.zeros(numel, dtype=dtype, device="cuda")

    def fresh() -> tuple[Tensor, ...]:
        sizes = ((ranks - 1) * slot, slot, ranks * slot)
        wires = [torch.zeros(size, dtype=torch.uint8, device="cuda") for size in sizes]
        left = [torch.zeros(n, device="cuda") for n in (numel, chunk)]
        return (*wires, *left, torch.zeros_like(values))

    def step(state: tuple[Tensor, ...]) -> None:
        sent, payload, gathered, residual, owner, out = state
        kept = (residual, residual[mine], owner) if feedback else (None, None, None)
        fused.encode(values, chunk, slot, me, sent, kept[0])
        fused.reduce(sent, values[mine], ranks, me, payload, *kept[1:])
        gathered.view(ranks, slot)[:] = payload
        fused.decode(gathered, chunk, slot, out)

    eager, replayed = fresh(), fresh()
    step(fresh())  # compiles
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        step(replayed)
    for tensor in replayed:
        tensor.zero_()
    for seed in range(3):
        values.copy_(arrays.make("outliers", numel, seed, dtype))
        step(eager)
        graph.replay()
        for name, right, wrong in zip(
            ("sent", "payload", "gathered", "residual", "owner", "out"),
            eager,
            replayed,
            strict=True,
        ):
            assert torch.equal(arrays.bits_of(right.cpu()), arrays.bits_of(wrong.cpu())), name


def _reduced_on(device: str, dtype: torch.dtype, codec: Codec) -> list[Tensor]:
    """Return bits after two all_reduces and a reduce_scatter with error feedback."""
    numel, rank = 70_001, dist.get_rank()
    start, stop = chunk_ranges(numel, dist.get_world_size())[rank]
    residual = torch.zeros(numel, device=device)
    owner = torch.zeros(stop - start, device=device)
    for seed in range(2):
        values = arrays.make("outliers", numel, 10 * seed + rank, dtype).to(device)
        all_reduce(
            values, codec, None, meter=Meter(), residual=residual, owner_residual=owner,
            cuts=() if codec.fixed_size else (5000, 30_000, 60_000),
        ).wait()  # fmt: skip
    shards = torch.split(values, 30_000)  # the last one is shorter
    total = reduce_scatter(
        shards, codec, None, meter=Meter(), residuals=torch.split(residual, 30_000)
    ).wait()
    return [bits_but_nan(tensor.cpu()) for tensor in (values, residual, owner, total)]


@pytest.mark.parametrize("codec", [make_codec("blockint", bits=4), make_codec("radix")], ids=str)
def test_ranks_on_gloo_share_a_gpu_and_sum_as_on_the_cpu(codec: Codec) -> None:
    """Sizes of radix stay on the GPU until they are exchanged."""
    for dtype in VALUE_DTYPES:
        for right, wrong in zip(
            run_ranks(3, _reduced_on, "cpu", dtype, codec),
            run_ranks(3, _reduced_on, "cuda", dtype, codec),
            strict=True,
        ):
            assert all(torch.equal(a, b) for a, b in zip(right, wrong, strict=True))


def _gathered_on(device: str) -> list[Tensor]:
    """Return results of a variable-size codec, a pipeline message and an exchange, on gloo."""
    rank, codec = dist.get_rank(), make_codec("expcode")
    values = arrays.make("normal", 5000, rank).to(device)
    out, swapped = values.new_empty(10_000), values.new_empty(5000)
    all_gather(values, out, codec, None, meter=Meter()).wait()
    all_to_all(swapped, values, codec, None, meter=Meter()).wait()
    if rank == 0:
        send(values, 1, codec, None, meter=Meter())
    else:
        recv(values, 0, codec, None, meter=Meter())
    return [arrays.bits_of(tensor.cpu()) for tensor in (values, out, swapped)]


def test_every_collective_works_on_gloo() -> None:
    expected = run_ranks(2, _gathered_on, "cpu")
    for right, wrong in zip(expected, run_ranks(2, _gathered_on, "cuda"), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(right, wrong, strict=True))


def _compiled_and_encoded(folder: str) -> Tensor:
    """Return the payload of a process with an empty image cache."""
    os.environ["CUPY_CACHE_DIR"] = folder
    dist.barrier()
    return payload_of(make_codec("radix"), arrays.make("outliers", 50_000, 4).cuda()).cpu()


def test_ranks_that_compile_at_once_encode_what_the_cpu_does(tmp_path: Path) -> None:
    expected = payload_of(make_codec("radix"), arrays.make("outliers", 50_000, 4))
    for payload in run_ranks(4, _compiled_and_encoded, str(tmp_path)):
        assert torch.equal(payload, expected)
    (kept,) = tmp_path.glob("hybridcomp-*")
    assert kept.suffix == ".cubin"


def test_damage_is_heard_of_without_waiting() -> None:
    """``poll`` starts a copy and reads it in a later call; nothing else synchronizes."""
    codec, values = make_codec("radix"), torch.randn(5000, device="cuda")
    broken = payload_of(codec, values)
    broken[0] ^= 1
    kernels.check_payloads()
    for _ in range(2):
        kernels.poll_payloads()
        cuda.synchronize()
    codec.decode(broken, torch.empty_like(values))
    cuda.synchronize()
    with pytest.raises(CodecError, match="go on from the last checkpoint"):
        for _ in range(3):  # an earlier copy may be in flight
            kernels.poll_payloads()
            cuda.synchronize()
    for _ in range(3):
        kernels.poll_payloads()
        cuda.synchronize()
