"""A receiver that meets damage keeps its version, requests a full one, and continues from it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from hybridcomp.errors import PublishError
from hybridcomp.patches.common.publishing_steps import destination_of
from hybridcomp.publishing import Publisher, WeightReceiver
from hybridcomp.publishing.destinations import ASKS, Folder
from hybridcomp.publishing.groups import GroupSource
from hybridcomp.publishing.mirror import Change
from hybridcomp.publishing.socket_stream import TwoWay, is_plain_socket
from hybridcomp.publishing.stream_sources import StreamSource
from tests.publishing.made import (
    Weights,
    copy_of,
    error_of,
    flip,
    manifest_of,
    part_of,
    publish_chain,
    received,
    same,
)
from tests.ranks import RunRanks

#: damage to version 3 before the receiver sees it, and words of the error; ``test_bad_input`` has
#: more
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "payload": (lambda folder: flip(part_of(folder, 3)), "checksum"),
    "manifest": (lambda folder: flip(manifest_of(folder, 3)), "v0000000003.json"),
    "a missing version": (lambda folder: manifest_of(folder, 3).unlink(), "version 3 is missing"),
}


def refused(receiver: WeightReceiver, expected: dict[str, Tensor], *words: str) -> None:
    """Check that the update fails with one line with ``words``; the mirror is ``expected``."""
    text = error_of(receiver.update)
    assert text and all(word in text for word in words), text
    assert same(receiver, expected)


def through_a_folder(folder: Path) -> list[Any]:
    """Publish versions of two ranks, the third damaged; rank 0 receives."""
    found = []
    for name, (damage, word) in DAMAGES.items():
        to = folder / name
        weights = Weights()
        publisher = weights.publisher(Folder(to))
        for number in range(2):
            weights.step(number)
            publisher.publish()
        dist.barrier()
        receiver = received(to)
        before = copy_of(weights.values)
        for number in range(2, 5):
            weights.step(number)
            publisher.publish()
        dist.barrier()
        if dist.get_rank() == 0:
            damage(to)
            for _ in range(2):  # requested once, however often it looks
                refused(receiver, before, word, "a full version was asked for")
            assert receiver.version == 2 and len(list(to.glob(ASKS))) == 1
        dist.barrier()
        weights.step(5)
        answer = publisher.publish()
        dist.barrier()
        applied = receiver.update()
        assert applied is not None and same(receiver, weights.values), name
        weights.step(6)
        later = publisher.publish()
        dist.barrier()
        receiver.update()
        right = same(receiver, weights.values) and not list(to.glob(ASKS))
        found.append((name, answer.version, answer.full, later.full, receiver.version, right))
        dist.barrier()
    return found


def test_the_next_version_of_a_folder_puts_damage_right(on_ranks: RunRanks, tmp_path: Path) -> None:
    expected = [(name, 6, True, False, 7, True) for name in DAMAGES]
    assert on_ranks(2, through_a_folder, tmp_path)[0] == expected


def odd_ends(folder: Path) -> list[Any]:
    """Check a replay (no request), a healed copy (request withdrawn), a damaged full version."""
    weights = Weights()
    publisher = weights.publisher(Folder(folder))
    publisher.publish()
    receiver = received(folder)
    found: list[Any] = []
    first = copy_of(weights.values)
    weights.step(1)
    publisher.publish()
    flip(part_of(folder, 2))
    refused(receiver, first, "checksum")
    flip(part_of(folder, 2))
    applied = receiver.update()
    found.append(applied is not None and same(receiver, weights.values))
    found.append(list(folder.glob(ASKS)))
    second = copy_of(weights.values)
    moved = manifest_of(folder, 2).rename(folder / "away")
    refused(receiver, second, "replay")
    moved.rename(manifest_of(folder, 2))
    found.append(list(folder.glob(ASKS)))
    for number in (3, 4):  # the requested version is damaged too: it is requested again
        weights.step(number)
        found.append(publisher.publish().full)
        flip(part_of(folder, number))
        refused(receiver, second, f"version {number}", "a full version was asked for")
    weights.step(5)
    found.append(publisher.publish().full)
    receiver.update()
    found.append(same(receiver, weights.values))
    slow = WeightReceiver(folder)  # with a full version after the damage nothing is requested
    slow.update(until=1)
    applied = slow.update()
    found.append(applied is not None and applied.version == 5 and same(slow, weights.values))
    found.append(list(folder.glob(ASKS)))
    return found


def test_requests_are_made_and_withdrawn(on_ranks: RunRanks, tmp_path: Path) -> None:
    assert on_ranks(1, odd_ends, tmp_path) == [[True, [], [], False, True, True, True, True, []]]


def test_a_folder_that_takes_no_request(
    on_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_ranks(1, publish_chain, tmp_path, 1)
    flip(part_of(tmp_path, 1))

    def read_only(path: Path, mode: str = "r", *given: Any) -> Any:
        if mode == "x":
            raise OSError(30, "Read-only file system")
        return io.open(path, mode, *given)  # noqa: UP020

    monkeypatch.setattr(Path, "open", read_only)
    with pytest.raises(PublishError, match="Read-only file system.*Publisher.ask_full"):
        WeightReceiver(tmp_path).update()


def test_an_error_while_it_writes_leaves_no_half_of_a_version(
    on_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_ranks(1, publish_chain, tmp_path, 3)
    receiver = WeightReceiver(tmp_path)
    receiver.update(until=2)
    apply, calls = Change.apply, []

    def fails(change: Change, flat: Tensor) -> None:
        calls.append(change)
        if len(calls) == 2:
            raise MemoryError
        apply(change, flat)

    monkeypatch.setattr(Change, "apply", fails)
    with pytest.raises(MemoryError):
        receiver.update()
    assert receiver.version == 0 and not list(receiver.tensors())
    applied = receiver.update()  # the newest full version, and its successors
    assert applied is not None and (applied.version, applied.versions) == (3, 3)
    assert same(receiver, dict(received(tmp_path).tensors()))


class Between:
    """A link between two sockets that may damage bytes; requests pass unchanged."""

    def __init__(self) -> None:
        self.sender, self._here = socket.socketpair()
        self._there, self.receiver = socket.socketpair()

    def forward(self, damage: bool = False) -> None:
        data = bytearray(self._here.recv(1 << 20))
        if damage:
            data[len(data) // 3] ^= 1
        self._there.sendall(data)

    def back(self) -> int:
        """Pass requests on; return their bytes."""
        self._there.setblocking(False)
        data = b""
        with contextlib.suppress(BlockingIOError):
            data = self._there.recv(1 << 20)
        self._there.setblocking(True)
        self._here.sendall(data)
        return len(data)

    def close(self) -> None:
        for one in (self.sender, self._here, self._there, self.receiver):
            one.close()


def through_a_socket() -> list[Any]:
    """Damage a version while another is in flight when the request is made."""
    link = Between()
    weights = Weights(shapes={"one": (64, 9), "two": (700,)})
    held = weights.held()
    publisher = Publisher(held, destination_of(link.sender, held))
    receiver = WeightReceiver(link.receiver)
    found: list[Any] = []

    def publish(number: int, damage: bool = False) -> bool:
        weights.step(number)
        full = publisher.publish().full
        link.forward(damage)
        return full

    publish(0)
    receiver.update()
    before = copy_of(weights.values)
    found.append(publish(1, damage=True))
    found.append(publish(2))  # in flight
    refused(receiver, before, "version 2", "a full version was asked for")
    refused(receiver, before, "version 3", "a version is missing", "a full version was asked for")
    found.append(link.back())
    found.append(publish(3, damage=True))  # the requested version is damaged: it is requested again
    refused(receiver, before, "a full version was asked for")
    found.append(link.back())
    found.append(publish(4))
    receiver.update()
    found.append(same(receiver, weights.values))
    found.append(publish(5))
    receiver.update()
    found.append(same(receiver, weights.values))
    link.receiver.sendall(b"GET / HTTP/1.1\r\n")
    link.back()
    with pytest.raises(PublishError, match="found bytes b'GET '.*to a WeightReceiver"):
        publisher.publish()
    link.close()
    return found


def test_a_socket_carries_the_request_back(on_ranks: RunRanks) -> None:
    expected = [False, False, 24, True, 24, True, True, False, True]
    assert on_ranks(1, through_a_socket) == [expected]


def test_a_stream_without_a_way_back(versions: list[bytes]) -> None:
    """The error says what to do, and that helps."""
    damaged = bytearray(versions[1])
    damaged[len(damaged) // 2] ^= 1
    receiver = received(io.BytesIO(b"".join([versions[0], damaged, *versions[2:]])))
    before = copy_of(dict(receiver.tensors()))
    refused(receiver, before, "Publisher.ask_full() on the sender")
    assert receiver.update() is not None and receiver.version == 3


def over_a_group() -> list[Any]:
    """Damage bytes of the second version on their way to rank 1."""
    group: Any = dist.new_group([0, 1])
    weights = Weights()
    if dist.get_rank() == 0:
        held = weights.held(count=1)
        publisher = Publisher(held, destination_of(group, held), bucket=1000)
        found = []
        for number in range(4):
            weights.step(number)
            found.append(publisher.publish().full)
        return found
    receiver = WeightReceiver(group)
    copy = GroupSource._copy
    for number in range(4):
        before = copy_of(weights.values)
        weights.step(number)
        if number != 1:
            applied = receiver.update()
            assert applied is not None and same(receiver, weights.values)
            continue
        GroupSource._copy = damaging(copy)  # type: ignore[method-assign]
        refused(receiver, before, "version 2", "the sender's next version is a full one")
        GroupSource._copy = copy  # type: ignore[method-assign]
    return [receiver.version]


def damaging(copy: Callable[..., None]) -> Callable[..., None]:
    """Return ``copy`` with a bit flipped in long messages."""

    def found(source: Any, nbytes: int, spool: Any) -> None:
        copy(source, nbytes, spool)
        if nbytes > 100:
            spool._chunks[-1][-50] ^= 1

    return found


def test_a_group_carries_the_request_back(on_ranks: RunRanks) -> None:
    assert on_ranks(2, over_a_group) == [[True, False, True, False], [4]]


def test_a_socket_ends_like_any_stream() -> None:
    here, there = socket.socketpair()
    here.sendall(b"hcf")
    here.close()
    with pytest.raises(PublishError, match="the stream ends inside a version"):
        WeightReceiver(there).update()
    assert not TwoWay(there).wants_full()
    there.close()


@pytest.mark.parametrize("timeout_s", [0.0, 0.01])
def test_a_version_that_comes_in_pieces_is_waited_for(
    versions: list[bytes], timeout_s: float
) -> None:
    """Whatever timeout the receiver's socket has."""
    here, there = socket.socketpair()
    there.settimeout(timeout_s)

    def send() -> None:
        for part in (versions[0][:10], versions[0][10:500], versions[0][500:]):
            time.sleep(0.1)
            here.sendall(part)

    sender = threading.Thread(target=send)
    sender.start()
    assert received(there).version == 1
    sender.join()
    here.close()
    there.close()


def test_a_socket_with_tls_is_a_stream() -> None:
    """It takes no flags of ``send``, and its bytes are not those that ``poll`` sees."""
    tls = ssl.SSLSocket.__new__(ssl.SSLSocket)
    receiver = WeightReceiver(tls)
    assert isinstance(receiver._source, StreamSource) and receiver._source._stream is tls
    here, there = socket.socketpair()
    assert is_plain_socket(here) and not is_plain_socket(tls)
    here.close()
    there.close()


def test_asks_that_cannot_be_removed_are_told(
    on_ranks: RunRanks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_ranks(1, publish_chain, tmp_path, 1)
    (tmp_path / "ask_full.1.json").mkdir()
    folder = Folder(tmp_path)
    assert folder.wants_full()
    folder._answer()
    assert "ask_full.1.json cannot be removed" in "".join(capsys.readouterr())
    shutil.rmtree(tmp_path / "ask_full.1.json")


def fails_once(folder: Path, by: str) -> None:
    """Fail in rank 1's gathers or when its weights are read: the previous version is kept."""
    weights = Weights()
    held, fails = weights.held(), [False]

    def failing(work: Callable[[], Any]) -> Callable[[], Any]:
        def found() -> Any:
            if fails[0]:
                raise RuntimeError("a gather failed")
            return work()

        return found

    if by == "ready":
        held = dataclasses.replace(held, ready=failing(held.ready))
    else:
        parts = [dataclasses.replace(one, read=failing(one.read)) for one in held.held]
        held = dataclasses.replace(held, held=parts)
    publisher = Publisher(held, Folder(folder), bucket=1000)
    publisher.publish()
    dist.barrier()
    before = sorted(folder.rglob("*"))
    fails[0] = dist.get_rank() == 1
    told = error_of(publisher.publish)
    assert told.startswith("version 2 was not published: rank 1: RuntimeError: a gather failed")
    dist.barrier()
    assert sorted(folder.rglob("*")) == before
    receiver = received(folder)
    assert receiver.version == 1 and same(receiver, weights.values)
    dist.barrier()
    fails[0] = False
    weights.step(1)
    assert publisher.publish().full
    dist.barrier()
    receiver.update()
    assert receiver.version == 2 and same(receiver, weights.values)


@pytest.mark.parametrize("by", ["ready", "read"])
def test_a_failure_leaves_the_version_before(on_ranks: RunRanks, tmp_path: Path, by: str) -> None:
    on_ranks(2, fails_once, tmp_path, by)
