"""Accumulated micro-batches packed in host memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hybridcomp.channels import Channels, Packed
from hybridcomp.channels.offload import host_copies as host_module
from hybridcomp.channels.offload import pinned_receive_buffers
from hybridcomp.codecs import BlockInt, ExpCode
from hybridcomp.codecs.base import Codec
from hybridcomp.config import CompressionConfig
from tests.codecs import arrays

CPU = torch.device("cpu")


def channels() -> Channels:
    return Channels(CompressionConfig.model_validate({"offload": "blockint", "min_bytes": 0}))


@pytest.mark.parametrize("count", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("chunk", [4096, 1 << 20])
def test_packed_sums_are_sums_of_what_was_sent(
    count: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than one pass, in one chunk and in several; twice into the same place."""
    monkeypatch.setattr(host_module, "CHUNK_NUMEL", chunk)
    moves, codec = channels().host, BlockInt(8)
    out = torch.full((3 * 4096 + 77,), 9.0)
    for seed in (0, 1):
        torch.manual_seed(seed)
        gradients = [torch.randn(out.numel()).to(torch.bfloat16) for _ in range(count)]
        packed, done = Packed(out), list[int]()
        for values in gradients:
            moves.pack(values, packed, codec, raw_nbytes=0)
        moves.unpack(packed, on=CPU, then=partial(done.append, 1))
        expected = torch.zeros_like(out)
        for values in gradients:
            expected += arrays.decoded(codec, values)
        assert torch.equal(out, expected) and done == [1] and not packed.waiting
        assert packed.square is not None
        assert float(packed.square) == pytest.approx(float(out.double().square().sum()), rel=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize("numel", [0, 5, 1024, 70_001])
def test_squares(numel: int, scale: float) -> None:
    """Includes values whose squares overflow fp32."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * scale
    exact = float(values.double().square().sum())
    assert float(host_module.square_of(values)) == pytest.approx(exact, rel=1e-6)


def test_a_nan_makes_the_norm_not_finite() -> None:
    moves, packed = channels().host, Packed(torch.zeros(5000))
    values = torch.ones(5000, dtype=torch.bfloat16)
    moves.pack(values, packed, BlockInt(4), raw_nbytes=0)
    values[4321] = float("nan")
    moves.pack(values, packed, BlockInt(4), raw_nbytes=0)
    moves.unpack(packed, on=CPU)
    assert packed.square is not None and not packed.square.isfinite()
    assert not packed.total[4321].isfinite() and packed.total[:4000].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", [BlockInt(8), ExpCode()], ids=str)
def test_parameters_arrive_as_they_would_have(codec: Codec, dtype: torch.dtype) -> None:
    """Lossless codecs round before encoding; lossy ones encode the master weight, then round."""
    torch.manual_seed(0)
    masters, out = torch.randn(70_000), torch.empty(70_000, dtype=dtype)
    channels().host.to_device(masters, out, codec, raw_nbytes=0)
    expected = masters if codec.lossless else arrays.decoded(codec, masters)
    assert torch.equal(out, expected.to(dtype))


class Copied:
    """Stand-in for the event behind a copy."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def synchronize(self) -> None:
        self._log.append(f"wait {self._name}")


def payload_of(log: list[str], name: str) -> pinned_receive_buffers.Payload:
    values = torch.arange(64, dtype=torch.float32)
    buffer = torch.empty(4096, dtype=torch.uint8)
    codec = ExpCode()
    return pinned_receive_buffers.Payload(
        codec, values.dtype, buffer, codec.encode(values, buffer), Copied(log, name)
    )


def test_the_thread_waits_for_copies_and_keeps_the_order() -> None:
    log: list[str] = []
    found, out = pinned_receive_buffers.PinnedReceiveBuffers(), torch.zeros(64)
    first, second = payload_of(log, "a"), payload_of(log, "b")

    def add_up() -> None:
        log.append("first")
        first.land(out, False)

    def again() -> None:
        log.append("second")
        second.land(out, True)

    threads = torch.get_num_threads()
    assert found.submit(add_up, [first]) == [] and found.submit(again, [second]) == []
    assert torch.get_num_threads() == threads
    while found.busy:
        assert found.meet() >= 0.0
    assert log == ["wait a", "first", "wait b", "second"]
    assert torch.equal(out, 2 * torch.arange(64.0))


def test_what_goes_wrong_in_the_thread_is_raised_where_it_is_met() -> None:
    def wrong() -> None:
        raise ValueError("a payload that is too short")

    found = pinned_receive_buffers.PinnedReceiveBuffers()
    found.submit(wrong, ())
    with pytest.raises(ValueError, match="too short"):
        found.meet()


def test_too_much_that_waits_is_met_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_receive_buffers, "WAITING_NBYTES", 1)
    found = pinned_receive_buffers.PinnedReceiveBuffers()
    assert len(found.submit(lambda: None, [payload_of([], "a")])) == 1
    assert not found.busy


@pytest.mark.parametrize(("torch_threads", "cores", "ranks", "expected"), [
    (16, 16, "", 12), (8, 16, "", 8), (16, 16, "4", 3), (2, 2, "", 1), (1, 64, "", 1),
    (4, 2, "8", 1),
])  # fmt: skip
def test_host_threads(
    monkeypatch: pytest.MonkeyPatch, torch_threads: int, cores: int, ranks: str, expected: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: torch_threads)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")
    monkeypatch.setenv("LOCAL_SIZE", ranks)
    assert pinned_receive_buffers.host_threads() == expected
