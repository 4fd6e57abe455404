"""On a GPU: the CPU's bytes, the caller's stream, and CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from hybridcomp.codecs import VALUE_DTYPES, Codec, make_codec
from tests.codecs import arrays
from tests.cuda.common import CODECS, assert_same, decoded, payload_of, results

pytestmark = pytest.mark.gpu
cuda: Any = torch.cuda  # parts of it are untyped


def check(codec: Codec, values: Tensor) -> None:
    assert_same(codec, values, results(codec, values), results(codec, values.cuda()))


@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_bytes_are_the_cpus(codec: Codec, dtype: torch.dtype) -> None:
    for seed, kind in enumerate(arrays.KINDS):
        for numel in (0, 1, 33, 1025, 4099, 70001):
            check(codec, arrays.make(kind, numel, seed, dtype))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_many_blocks_of_threads(codec: Codec) -> None:
    """Tiles look back at others that run at the same time."""
    check(codec, arrays.make("outliers", 9_000_001, 1, torch.bfloat16))


@settings(max_examples=100)
@given(arrays.tensors())
def test_arrays_of_hypothesis(values: Tensor) -> None:
    for codec in CODECS:
        check(codec, values)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_runs_on_the_callers_stream(codec: Codec) -> None:
    values = arrays.make("normal", 300_000, 1)
    expected = payload_of(codec, values)
    stream = cuda.Stream()
    with cuda.stream(stream):
        there = values.cuda(non_blocking=True)
        cuda._sleep(50_000_000)  # what follows must wait for this stream
        there.mul_(1.0)
        found = payload_of(codec, there)
    stream.synchronize()
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec.fixed_size], ids=str)
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


def test_every_device_has_its_own_kernels() -> None:
    if cuda.device_count() < 2:
        pytest.skip("one GPU")
    codec, values = make_codec("blockint"), arrays.make("normal", 5000, 1)
    assert torch.equal(payload_of(codec, values.to("cuda:1")).cpu(), payload_of(codec, values))
