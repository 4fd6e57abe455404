"""What a stream brings is kept in frames, and read as if it were one file."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor

from hybridcomp.publishing import WeightReceiver, stream_sources
from hybridcomp.publishing.spools import Spool
from hybridcomp.publishing.streams import Stream, tensor_of
from tests.publishing.made import Weights, same
from tests.ranks import RunRanks

#: bytes of the chunks, and whether each stays in memory
CHUNKS = [(32, True), (100, False), (1, True), (64, False), (500, True)]


def filled() -> tuple[Spool, Tensor]:
    """A spool, and all its bytes."""
    everything = torch.arange(sum(size for size, _ in CHUNKS)).to(torch.uint8)
    spool, low = Spool(), 0
    for size, in_memory in CHUNKS:
        spool.keep(everything[low : low + size].clone(), in_memory)
        low += size
    return spool, everything


def test_any_stretch_of_a_spool_is_that_of_the_whole() -> None:
    spool, everything = filled()
    assert spool.size() == len(everything)
    for low in range(0, len(everything), 7):
        for high in range(low, len(everything) + 1, 13):
            found = spool.at(low, high - low)
            assert torch.equal(found, everything[low:high]) and found.data_ptr() % 16 == 0
    with pytest.raises(ValueError, match="size"):
        spool.at(0, len(everything) + 1)
    spool.close()
    with pytest.raises(ValueError, match="size"):
        spool.at(0, 1)


def test_a_frame_in_memory_is_not_copied() -> None:
    spool, chunk = Spool(), torch.arange(96).to(torch.uint8)
    spool.keep(chunk, in_memory=True)
    assert spool.at(16, 64).data_ptr() == chunk.data_ptr() + 16
    room = bytearray(32)
    assert tensor_of(memoryview(room)).data_ptr() == tensor_of(memoryview(room)).data_ptr()
    assert tensor_of(b"ab").tolist() == [97, 98]


def streamed() -> bytes:
    """Three versions of two ranks."""
    weights, stream = Weights(), io.BytesIO()
    publisher = weights.publisher(Stream(stream, (0, 1)))
    for number in range(3):
        weights.step(number)
        publisher.publish()
    return stream.getvalue()


class Slow:
    """A stream that only has ``read``, and gives few bytes at once."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def read(self, nbytes: int, /) -> bytes:
        return self._data.read(min(nbytes, 77))


def test_versions_of_which_little_fits_into_memory(
    on_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = on_ranks(2, streamed)[0]
    whole = WeightReceiver(io.BytesIO(data))
    while whole.update() is not None:
        pass
    monkeypatch.setattr(stream_sources, "IN_MEMORY", 1500)
    monkeypatch.setattr(stream_sources, "CHUNK", 333)
    slow = WeightReceiver(Slow(data))
    while slow.update() is not None:
        pass
    assert slow.version == 3 and same(slow, dict(whole.tensors()))
