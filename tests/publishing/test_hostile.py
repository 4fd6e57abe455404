"""Hostile folders, streams and disks: one clear line, and nothing unsafe."""

from __future__ import annotations

import io
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from hybridcomp.errors import ConfigError
from hybridcomp.publishing import Publisher, WeightReceiver, stream_sources, streams
from hybridcomp.publishing.destinations import PARTS, Folder, folder_of
from hybridcomp.publishing.mirror import Mirror
from hybridcomp.publishing.part_buffers import Spool
from hybridcomp.publishing.socket_stream import TwoWay
from hybridcomp.publishing.streams import DATA, VERSION, Stream, frame_head, frame_in
from tests.publishing.made import Weights, drain, error_of, part_of, received, same
from tests.ranks import RunRanks


def refused(call: Callable[[], object]) -> str:
    """Return the error, which there must be."""
    text = error_of(call)
    assert text
    return text


def two_jobs(folder: Path) -> list[Any]:
    """Run two trainers in a folder; then the first again, after its version is removed."""
    weights, others = Weights(), Weights()
    others.step(1)
    first = weights.publisher(Folder(folder))
    first.publish()
    second = others.publisher(Folder(folder), anchor_every=1, keep=1)
    second.publish()
    told = [refused(first.publish)]
    others.step(2)
    second.publish()
    assert not (folder / "v0000000002.json").exists()
    told.append(refused(first.publish))
    receiver = received(folder)
    left = sorted(path.name for path in folder.rglob("*") if path.name.startswith((".", "v")))
    return [told, same(receiver, others.values), len(left)]


def test_of_two_trainers_in_a_folder_one_is_refused(on_ranks: RunRanks, tmp_path: Path) -> None:
    """This holds even if the conflicting versions were removed meanwhile."""
    ((told, right, left),) = on_ranks(1, two_jobs, tmp_path)
    for text, newest in zip(told, (2, 3), strict=True):
        words = f"has version {newest} already: another job or island publishes there; end one"
        assert words in text
    assert right and left == 2  # a manifest and its part


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Limit files to ``room`` bytes, as on a full disk."""
    real, left = os.fdopen, [room]

    class Limited(io.FileIO):
        def write(self, data: Any) -> int:
            left[0] -= len(data)
            if left[0] < 0:
                raise OSError(28, "No space left on device")
            return super().write(data) or 0

    def opened(number: int, mode: str = "r", *args: Any, **given: Any) -> Any:
        if mode != "wb":
            return real(number, mode, *args, **given)
        return io.BufferedWriter(Limited(number, "wb"), 64)

    with mock.patch.object(os, "fdopen", opened):
        yield


def on_a_full_disk(folder: Path) -> list[Any]:
    """Publish a second version that does not fit: failing in the part, and in the manifest."""
    weights = Weights()
    publisher = weights.publisher(Folder(folder))
    size = publisher.publish().nbytes
    before = sorted(folder.rglob("*"))
    told = []
    for room in (size // 2, size + 100):
        publisher.ask_full()
        with full_disk(room):
            told.append(refused(publisher.publish))
        assert sorted(folder.rglob("*")) == before
    weights.step(3)
    summary = publisher.publish()
    return [told, summary.version, summary.full, same(received(folder), weights.values)]


def test_a_disk_that_fills_up_leaves_no_half_of_a_version(
    on_ranks: RunRanks, tmp_path: Path
) -> None:
    ((told, *after),) = on_ranks(1, on_a_full_disk, tmp_path)
    for text, name in zip(told, (".part.unfinished", "v0000000002.json"), strict=True):
        assert f"{name} cannot be written (No space left on device); make room" in text
    assert after == [2, True, True]


def with_links(folder: Path) -> list[Any]:
    """Put links at the names of the next version, and a pipe in a manifest's place."""
    weights, kept = Weights(), folder.parent / "kept"
    kept.write_text("kept")
    publisher = weights.publisher(Folder(folder))
    publisher.publish()
    place: Any = publisher._destination
    name = f"v0000000002.{place.token}.r00000.part"
    for link in (folder / PARTS / name, folder / PARTS / f"{name}.unfinished"):
        link.symlink_to(kept)
    (folder / f".v0000000002.json.{place.token}").symlink_to(kept)
    weights.step(1)
    publisher.publish()
    assert kept.read_text() == "kept" and not (folder / PARTS / name).is_symlink()
    receiver = received(folder)
    right = same(receiver, weights.values)
    os.mkfifo(folder / "v0000000003.json")
    told = [refused(receiver.update)]
    (folder / "v0000000003.json").unlink()
    weights.step(2)
    publisher.publish()
    part = part_of(folder, 3)
    part.unlink()
    os.mkfifo(part)
    told.append(refused(receiver.update))
    return [right, told]


def test_links_and_pipes_in_the_folder(on_ranks: RunRanks, tmp_path: Path) -> None:
    """No file behind a link is written, and a pipe does not block."""
    ((right, told),) = on_ranks(1, with_links, tmp_path / "folder")
    assert right and all("cannot be read (it is not a regular file)" in text for text in told)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = refused(WeightReceiver(tmp_path / "file").update)
    assert "cannot be read (Not a directory); make it a folder that can be read" in text
    assert WeightReceiver(tmp_path / "not yet").update() is None
    (tmp_path / "no\u00a0break").write_text("")
    text = refused(WeightReceiver(tmp_path / "no\u00a0break").update)
    assert rf"publish: '{tmp_path}/no\xa0break' cannot be read" in text


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("file:///a/b/", "/a/b"), ("file:///a%20b", "/a b"), ("file:///a b", "/a b"),
        ("file://localhost/a%23", "/a#"), ("/a/b#c", "/a/b#c"), ("a/b/", "a/b"),
        ("/a\u00a0b", "/a\u00a0b"), ("file:///a%C2%A0b", "/a\u00a0b"),
        ("/a\u3000b", "/a\u3000b"), ("/a\uf022b", "/a\uf022b"),
        ("/\U0001f468\u200d\U0001f469", "/\U0001f468\u200d\U0001f469"),
    ],
)  # fmt: skip
def test_folders_are_those_that_are_written(text: str, path: str) -> None:
    assert folder_of(text) == Path(path)


@pytest.mark.parametrize(
    ("text", "todo"),
    [
        (" file:///a", "no blanks around it"), ("file:///a\n", "no blanks around it"),
        ("file:///a%00", "no control characters"), ("file:///a#b", "%23"),
        ("/a\u202eb", "marks of direction"), ("file:///a%E2%81%A6", "marks of direction"),
        ("/a\u200bb", "no control characters"), ("/a\u2028b", "no control characters"),
        ("/a\ud800b", "no control characters"), ("\u00a0/a", "no blanks around it"),
        ("file:///a?b", "%3F"), ("file:/a", "file:///folder"), ("file://", "file:///folder"),
        ("", "file:///folder"), ("~/a", "a path without ~"), ("file://host/a", "object store"),
    ],
)  # fmt: skip
def test_what_would_be_another_folder_is_refused(text: str, todo: str) -> None:
    with pytest.raises(ConfigError) as caught:
        folder_of(text)
    assert todo in str(caught.value) and "\n" not in str(caught.value)


def test_a_false_length_is_no_frame(versions: list[bytes]) -> None:
    """A frame head with a right checksum that announces too many bytes is skipped."""
    for kind in (DATA, VERSION):
        assert frame_in(frame_head(kind, 0, 1 << 26)) is not None
        assert frame_in(frame_head(kind, 0, 1 << 40)) is None
        wrong = frame_head(kind, 0, 1 << 40) + bytes(100)
        receiver = received(io.BytesIO(b"".join([versions[0], wrong, *versions[1:]])))
        assert "the head of a frame was damaged" in refused(receiver.update)
        assert drain(receiver).version == 4
    text = refused(WeightReceiver(io.BytesIO(frame_head(DATA, 0, 1 << 40) + bytes(99))).update)
    assert "expected a frame of published weights" in text


def test_long_parts_are_cut_into_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MOST_FRAME", 500)
    written = io.BytesIO()
    Stream(written, (0,))._frame(DATA, 0, memoryview(bytes(1234)))
    heads = [frame_in(written.getvalue()[place:]) for place in (0, 524, 1048)]
    assert [head and head.nbytes for head in heads] == [500, 500, 234]


def test_a_version_without_end_is_not_kept(
    versions: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes beyond the size of the held weights are read and dropped; the next version applies."""
    monkeypatch.setattr(stream_sources, "IN_MEMORY", 20000)
    monkeypatch.setattr(stream_sources, "FRAME_COSTS", 24)
    kept: list[int] = []
    keep = Spool.keep

    def counting(spool: Spool, chunk: Tensor, in_memory: bool) -> None:
        kept.append(chunk.numel())
        keep(spool, chunk, in_memory)

    monkeypatch.setattr(Spool, "keep", counting)
    more = b"".join(frame_head(DATA, 0, 10000) + bytes(10000) for _ in range(4))
    receiver = received(io.BytesIO(b"".join([versions[0], more, *versions[1:]])))
    kept.clear()
    text = refused(receiver.update)
    assert "version 2 has more than the 35" in text and "that it can have" in text
    assert sum(kept) < 36000
    assert drain(receiver).version == 4


class Endless(io.RawIOBase):
    """An endless stream of frames of parts, each of ``nbytes`` and of the next rank."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.sent, self._left = nbytes, 0, b""

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        if not self._left:
            self._left = frame_head(DATA, self.sent, self.nbytes) + bytes(self.nbytes)
            self.sent += 1
        found = min(len(room), len(self._left))
        room[:found], self._left = self._left[:found], self._left[found:]
        return found


@pytest.mark.parametrize("nbytes", [0, 1, 10000])
@pytest.mark.parametrize("weights", [3800, None])
def test_a_first_version_without_end_is_given_up(
    nbytes: int, weights: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is the user's model, or the host's memory; empty frames count."""
    monkeypatch.setattr(stream_sources, "IN_MEMORY", 20000)
    monkeypatch.setattr(stream_sources, "host_weights", lambda: 3800)
    made: list[Spool] = []

    def make() -> Spool:
        made.append(Spool())
        return made[-1]

    monkeypatch.setattr(stream_sources, "Spool", make)
    stream = Endless(nbytes)
    receiver = WeightReceiver(stream, weights=weights)
    todo = (
        "this host has no memory for such a model" if weights is None else "say to WeightReceiver"
    )
    for _ in range(2):
        stream.sent = 0
        text = refused(receiver.update)
        assert "a version has more than the 35200 bytes that it can have" in text and todo in text
        assert "it has no end: connect again" in text
        assert stream.sent * (nbytes + stream_sources.FRAME_COSTS) < 2 * 35200 + 11025
    assert len(made) <= 2 * 36 and not any(one.size() for one in made)


def more_weights(folder: Path) -> None:
    """Return versions of a model with more weights than the receiver's."""
    weights = Weights()
    weights.publisher(Folder(folder)).publish()
    count = sum(value.numel() for value in weights.values.values())
    text = refused(WeightReceiver(folder, weights=count - 1).update)
    assert f"version 1: expected {count - 1} weights at most, found {count}: another mod" in text
    assert WeightReceiver(folder, weights=count).update() is not None


def test_a_model_with_more_weights_is_refused(on_ranks: RunRanks, tmp_path: Path) -> None:
    on_ranks(1, more_weights, tmp_path)
    with pytest.raises(ConfigError, match="WeightReceiver.weights: found 0; expected a number of"):
        WeightReceiver(tmp_path, weights=0)


def test_a_temporary_folder_without_room(
    versions: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is read to its end and rejected; the stream continues."""
    receiver = received(io.BytesIO(b"".join(versions)))
    monkeypatch.setattr(stream_sources, "IN_MEMORY", 0)
    monkeypatch.setattr(stream_sources, "FRAME_COSTS", 24)
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with mock.patch.object(tempfile, "TemporaryFile", full):
        text = refused(receiver.update)
    assert "version 2 was not kept: the temporary folder has no room" in text and "TMPDIR" in text
    assert drain(receiver).version == 4


def to_nobody() -> str:
    """Publish to a receiver that has gone."""
    here, there = socket.socketpair()
    there.close()
    with here:
        held = Weights().held()
        return refused(Publisher(held, Stream(TwoWay(here), (0,)), bucket=1000).publish)


def test_a_receiver_that_is_gone_is_one_line(on_ranks: RunRanks) -> None:
    (text,) = on_ranks(1, to_nobody)
    assert "the other side of the socket is gone" in text and "connect again" in text


def test_a_model_that_no_host_has_memory_for() -> None:
    text = refused(lambda: Mirror.empty({"w": ((1 << 61,), "bf16")}, {}))
    assert "no memory for 4611686018427387904 bytes" in text
