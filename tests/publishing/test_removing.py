"""Removal of versions up to a full one while receivers read; reading format 1."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from hybridcomp.errors import PublishError
from hybridcomp.publishing import WeightReceiver
from hybridcomp.publishing.destinations import PARTS, Folder, manifests_in
from hybridcomp.publishing.removing import remove_old
from hybridcomp.publishing.streams import Stream
from tests.publishing.made import (
    Weights,
    error_of,
    flip,
    manifest_of,
    part_of,
    publish_chain,
    received,
    same,
)
from tests.ranks import RunRanks, run_ranks

OLD = Path(__file__).parent / "format_1"
#: the model of the versions in ``OLD``, and the share that each version changed
OLD_SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (37, 19), "layers.0.weight": (64, 24), "scale": (),
}  # fmt: skip
OLD_SHARES = (0.0, 0.3, 0.02)


def versions(folder: Path) -> tuple[list[int], list[int]]:
    """Return versions with a manifest, and those with parts."""
    parts = sorted({int(path.name[1:11]) for path in (folder / PARTS).iterdir()})
    return list(manifests_in(folder)), parts


def kept(folder: Path) -> list[object]:
    """Publish 8 versions, every third full; return those left, and the receivers' results."""
    weights = Weights()
    publisher = weights.publisher(Folder(folder), anchor_every=3, keep=2)
    slow = WeightReceiver(folder)
    found: list[object] = []
    for number in range(8):
        weights.step(number)
        publisher.publish()
        if number == 0:
            slow.update()
        dist.barrier()
        if dist.get_rank() == 0:
            found.append(versions(folder)[0])
        dist.barrier()
    applied = slow.update()  # its next version is gone
    assert applied is not None and applied.full and same(slow, weights.values)
    assert same(received(folder), weights.values)
    publisher.close()
    again = weights.publisher(Folder(folder), anchor_every=3, keep=1)  # resumes, removes nothing
    assert again.version == 8
    weights.step(9)
    summary = again.publish()
    assert not summary.full
    dist.barrier()
    return [*found, versions(folder)]


def test_full_versions_remain_with_what_follows_them(on_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = on_ranks(2, kept, tmp_path)
    every = [1, 2, 3, 4, 5, 6, 7, 8]
    expected = [every[:n] for n in range(1, 7)] + [[4, 5, 6, 7], [4, 5, 6, 7, 8]]
    assert first[:-1] == expected
    assert first[-1] == second[-1] == ([4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 9])


def test_a_version_that_is_removed_while_it_is_read(
    on_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its manifest is read, and between manifest and parts."""
    on_ranks(1, publish_chain, tmp_path / "made", 5, 3)
    for place in ("_next", "_open"):
        folder = tmp_path / place
        shutil.copytree(tmp_path / "made", folder)
        receiver = WeightReceiver(folder)
        assert receiver.update(until=2) is not None
        source: Any = receiver._source
        monkeypatch.setattr(source, place, removing(folder, getattr(source, place)))
        applied = receiver.update()
        assert applied is not None and (applied.version, applied.full) == (5, True)


def removing(folder: Path, then: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``then`` after a sender has removed all but the newest chain."""

    def found(*given: Any) -> Any:
        remove_old(folder, 1)
        return then(*given)

    return found


def test_a_manifest_that_only_seems_to_be_there(on_ranks: RunRanks, tmp_path: Path) -> None:
    on_ranks(1, publish_chain, tmp_path, 1)
    manifest_of(tmp_path, 1).unlink()
    manifest_of(tmp_path, 1).symlink_to(tmp_path / "nowhere")
    with pytest.raises(PublishError, match="v0000000001.json is not there; copy the folder again"):
        received(tmp_path)


def odd(folder: Path) -> list[str]:
    """Fail to remove old versions: publishing continues. No such key elsewhere."""
    weights = Weights()
    publisher = weights.publisher(Folder(folder), anchor_every=1, keep=1)
    publisher.publish()
    (folder / "v0000000001.json").unlink()
    (folder / "v0000000001.json").mkdir()
    weights.step(1)
    second = publisher.publish()
    (folder / "v0000000001.json").rmdir()
    assert second.version == 2 and WeightReceiver(folder).update() is not None
    return [
        error_of(lambda: weights.publisher(Folder(folder), keep=0)),
        error_of(lambda: weights.publisher(Stream(io.BytesIO(), (0,)), keep=2)),
    ]


def test_what_keep_cannot_do_is_told(on_ranks: RunRanks, tmp_path: Path) -> None:
    assert on_ranks(1, odd, tmp_path) == [
        [
            "publish.keep: found 0; expected a number of 1 or more",
            "publish.keep: found 2; only a folder has versions to keep; leave it out",
        ]
    ]


def read_old(folder: Path) -> list[object]:
    """Apply versions of format 1, then follow the chain of a resumed job."""
    weights, receiver = Weights(shapes=dict(OLD_SHAPES)), WeightReceiver(folder)
    for number, share in enumerate(OLD_SHARES):
        weights.step(number, share)
        applied = receiver.update(until=number + 1)
        assert applied is not None and same(receiver, weights.values)
    publisher = weights.publisher(Folder(folder))
    weights.step(5)
    summary = publisher.publish()
    receiver.update()
    return [summary.version, summary.full, receiver.version, same(receiver, weights.values)]


def test_versions_of_format_1_are_read_and_followed(on_ranks: RunRanks, tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / "old")
    assert on_ranks(1, read_old, tmp_path / "old") == [[4, True, 4, True]]
    shutil.copytree(OLD, tmp_path / "damaged")
    flip(part_of(tmp_path / "damaged", 2), 100)
    receiver = WeightReceiver(tmp_path / "damaged")
    with pytest.raises(PublishError, match="version 2: .*checksum.*copy it again"):
        receiver.update()
    assert receiver.version == 1


def killed(folder: Path) -> None:
    """Publish a version, and end the process before the second one's manifest."""
    publisher = Weights().publisher(Folder(folder))
    publisher.publish()
    with mock.patch.object(Folder, "commit", lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
        publisher.publish()


def after_others(folder: Path) -> tuple[list[str], list[str], str]:
    """Publish after killed runs; return the files before, and after the first version."""
    weights, parts = Weights(), folder / PARTS
    for name in ("v0000000001.00000000.r00000.part", "v0000000002.00000000.r00001.part.unfinished"):
        (parts / name).write_bytes(b"of another run")
    (folder / ".v0000000002.json.00000000").write_bytes(b"{")
    (folder / "v0000000002.txt").write_bytes(b"a note")
    (parts / "v0000000009.00000000.r00000.part").write_bytes(b"of nobody knows when")
    writing = parts / "v0000000002.11111111.r00000.part.unfinished"
    writing.write_bytes(b"a run that")
    before = files(folder)
    publisher = weights.publisher(Folder(folder))
    writing.write_bytes(b"a run that lives")
    assert files(folder) == before
    weights.step(1)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        publisher.publish()
    receiver = received(folder)
    assert receiver.version == 2 and same(receiver, weights.values)
    return before, files(folder), said.getvalue()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_what_a_killed_run_leaves_goes_with_the_first_version_of_the_next(
    on_ranks: RunRanks, tmp_path: Path
) -> None:
    """Except for foreign files, and for versions that this run has not passed."""
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(1, killed, tmp_path)
    left = files(tmp_path)
    assert len(left) == 3  # a version, and the part of another
    ((before, after, said),) = on_ranks(1, after_others, tmp_path)
    assert set(left) < set(before) and len(before) == 9
    gone = set(before) - set(after)
    own = {name for name in left if name.startswith("v0000000002.")}
    others = {"v0000000001.00000000.r00000.part", "v0000000002.00000000.r00001.part.unfinished"}
    assert gone == own | others | {".v0000000002.json.00000000"}
    assert len(set(after) - set(before)) == 2
    assert said.count(f"publish: removed 4 file(s) in {tmp_path} of runs that were cut off") == 1


def two_runs(folder: Path) -> str:
    """Interrupt one of two runs by the other, which mistakes its unfinished part for a leftover."""
    first, second = Weights(), Weights()
    slow, place = first.publisher(Folder(folder)), second.publisher(Folder(folder))
    begin = Folder.begin

    def cut(to: Folder, version: int, rank: int) -> Any:
        found = begin(to, version, rank)
        with mock.patch.object(Folder, "begin", begin):
            place.publish()
        to._unfinished.unlink()
        return found

    with mock.patch.object(Folder, "begin", cut):
        return error_of(slow.publish)


def test_a_run_whose_part_was_removed_is_told_why(on_ranks: RunRanks, tmp_path: Path) -> None:
    (told,) = on_ranks(1, two_runs, tmp_path)
    assert "has version 1 already: another job or island publishes there" in told
