"""Stream contents are kept in frames, and read like a single file."""

from __future__ import annotations

import io
import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridcomp.errors import PublishError
from hybridcomp.patches.common.publishing_steps import destination_of
from hybridcomp.publishing import Publisher, WeightReceiver, stream_sources, streams
from hybridcomp.publishing.part_buffers import Spool
from hybridcomp.publishing.socket_stream import TwoWay
from hybridcomp.publishing.streams import (
    DATA,
    FRAME,
    VERSION,
    frame_head,
    frame_in,
    tensor_of,
)
from tests.publishing.made import Weights, drain, received, same
from tests.ranks import RunRanks

#: bytes of the chunks, and whether each stays in memory
CHUNKS = [(32, True), (100, False), (1, True), (64, False), (500, True)]


def filled() -> tuple[Spool, Tensor]:
    """Return a filled buffer, and all its bytes."""
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


class Slow:
    """A stream with ``read`` only, which returns few bytes at once."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def read(self, nbytes: int, /) -> bytes:
        return self._data.read(min(nbytes, 77))


@pytest.fixture
def data(versions: list[bytes]) -> bytes:
    return b"".join(versions)


def test_versions_of_which_little_fits_into_memory(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = drain(WeightReceiver(io.BytesIO(data)))
    monkeypatch.setattr(stream_sources, "IN_MEMORY", 1500)
    monkeypatch.setattr(stream_sources, "CHUNK", 333)
    monkeypatch.setattr(stream_sources, "FRAME_COSTS", 24)
    slow = drain(WeightReceiver(Slow(data)))
    assert slow.version == 4 and same(slow, dict(whole.tensors()))


def heads(data: bytes) -> list[tuple[bytes, int]]:
    """Return each frame's kind and start."""
    found, place = [], 0
    while place < len(data):
        frame = frame_in(data[place:])
        assert frame is not None
        found.append((frame.kind, place))
        place += FRAME.size + frame.nbytes
    return found


@pytest.mark.parametrize("byte", [0, 3, 4, 9, 14, 21])
@pytest.mark.parametrize("kind", [DATA, VERSION])
def test_after_a_damaged_head_the_stream_goes_on(
    versions: list[bytes], kind: bytes, byte: int
) -> None:
    """The frame's version, or its successor, fails; a full one follows."""
    first, second, *later = versions
    broken = bytearray(second)
    broken[dict(reversed(heads(second)))[kind] + byte] ^= 0x41
    receiver = received(io.BytesIO(b"".join([first, broken, *later])))
    version = 2 if kind == DATA else 3
    with pytest.raises(PublishError, match=f"version {version}: the head of a frame") as caught:
        receiver.update()
    assert "bytes of the stream were skipped" in str(caught.value)
    assert receiver.version == 1
    whole = drain(WeightReceiver(io.BytesIO(b"".join(versions))))
    assert drain(receiver).version == 4 and same(receiver, dict(whole.tensors()))


def test_bytes_that_are_missing_cost_their_version_alone(versions: list[bytes]) -> None:
    first, second, *later = versions
    middle = len(second) // 2
    lossy = second[:middle] + second[middle + 100 :]
    receiver = received(io.BytesIO(b"".join([first, lossy, *later])))
    with pytest.raises(PublishError, match="version [23]"):
        receiver.update()
    assert drain(receiver).version == 4


def test_no_head_within_bounds_or_before_the_first_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "MOST_SKIPPED", 1000)
    head = frame_head(DATA, 0, 4) + bytes(4)
    for begin in (b"", head):
        with pytest.raises(PublishError, match="expected a frame.*only a publisher writes to"):
            received(io.BytesIO(begin + b"x" * 5000))
    with pytest.raises(PublishError, match="the stream ends inside a version"):
        received(io.BytesIO(head + b"x" * 500))


def test_frames_of_another_release_are_told_on_both_sides() -> None:
    later = b"hcf\x03" + bytes(FRAME.size)
    first = b"hcfD" + bytes(FRAME.size)
    for data, found in ((later, 3), (first, 1)):
        with pytest.raises(PublishError, match=f"found {found}: install the same release"):
            received(io.BytesIO(data))
        here, there = socket.socketpair()
        with here, there:
            there.sendall(data[:16])  # the length of a format 1 request
            with pytest.raises(PublishError, match=f"found {found}: install the same release"):
                TwoWay(here).wants_full()


def test_streams_that_end_early_or_hold_something_else(data: bytes) -> None:
    whole = WeightReceiver(io.BytesIO(data))
    seen = [applied.version for applied in iter(whole.update, None)]
    assert seen == [1, 2, 3, 4]
    for end in (10, 40, len(data) // 2, len(data) - 1):
        receiver = WeightReceiver(io.BytesIO(data[:end]))
        with pytest.raises(PublishError, match="the stream ends inside a version"):
            drain(receiver)
    with pytest.raises(PublishError, match="expected a frame of published weights"):
        received(io.BytesIO(b"GET / HTTP/1.1\r\n\r\n"))
    with pytest.raises(PublishError, match="version 1: this receiver holds version 4.*replay"):
        drain(WeightReceiver(io.BytesIO(data + data)))


def stands_still() -> list[Any]:
    """Stop reading for a while, between versions larger than the link's buffer."""
    here, there = socket.socketpair()
    weights = Weights(shapes={"one": (400, 900)})
    held = weights.held()
    publisher = Publisher(held, destination_of(here, held, still_s=0.3), codec="raw")
    found: list[Any] = []
    for number in range(3):
        weights.step(number)
        with pytest.raises(PublishError) as told:
            publisher.publish()
        found.append("still takes nothing" if number else "has taken nothing for 0.3 s (still_s)")
        assert found[-1] in str(told.value), told.value
    receiver, seen = WeightReceiver(there), []
    reader = threading.Thread(target=lambda: seen.append(receiver.update()))
    reader.start()
    for _ in range(200):  # once it reads, the next version is full, and the last is dropped
        weights.step(9)
        try:
            found.append(publisher.publish().full)
            break
        except PublishError:
            time.sleep(0.05)
    reader.join(60)
    assert seen and seen[0] is not None and same(receiver, weights.values)
    there.close()
    here.close()
    return found


def test_a_receiver_that_stands_still_holds_nobody(on_ranks: RunRanks) -> None:
    still = "still takes nothing"
    expected = ["has taken nothing for 0.3 s (still_s)", still, still, True]
    assert on_ranks(1, stands_still) == [expected]


def interrupts() -> list[Any]:
    """An exception in a handler during a send ends the wait, and later calls do not wait."""
    here, there = socket.socketpair()
    weights = Weights(shapes={"one": (400, 900)})
    held = weights.held()
    publisher = Publisher(held, destination_of(here, held, still_s=200.0), codec="raw")

    def handler(*_: Any) -> None:
        raise RuntimeError("the handler")

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    begun = time.monotonic()
    try:
        with pytest.raises(PublishError, match="RuntimeError: the handler"):
            publisher.publish()
        with pytest.raises(PublishError, match="still takes nothing"):
            publisher.publish()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        there.close()
        here.close()
    return [time.monotonic() - begun < 100.0]


def test_a_signal_ends_the_wait_for_a_receiver(on_ranks: RunRanks) -> None:
    assert on_ranks(1, interrupts) == [[True]]
