"""Versions written by a background thread: whole or not at all, without blocking training."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from hybridcomp.publishing import Held, Publisher, WeightReceiver
from hybridcomp.publishing.destinations import Folder
from hybridcomp.publishing.encoding import PartEncoder
from hybridcomp.publishing.shards import Shard
from hybridcomp.publishing.streams import Stream
from tests.publishing.made import Weights, copy_of, error_of, full_disk, received, same
from tests.ranks import RunRanks, fork_server
from tests.selection import by_day


def many(folder: Path, sharded: bool) -> list[Any]:
    """Publish twelve versions; weights change as soon as they are copied."""
    weights = Weights()
    publisher = weights.publisher(Folder(folder), sharded, anchor_every=5)
    receiver, right, kinds = WeightReceiver(folder), [], []
    for number in range(12):
        weights.step(number)
        started = publisher.publish(wait=False)
        kinds.append(started.full)
        values = copy_of(weights.values)
        publisher.copied()
        for value in weights.values.values():
            value.view(torch.int16).add_(1)  # would show in a version that is copied late
        summary = publisher.finish()
        assert summary is not None and summary.version == started.version == number + 1
        assert summary.seconds > 0 and summary.wait_s > 0 and publisher.finish() is None
        receiver.update()
        right.append(same(receiver, values) and summary.full == started.full)
    one = publisher.publish()  # a synchronous version continues from those in the background
    receiver.update()
    right.append(same(receiver, weights.values) and not one.full)
    publisher.close()
    dist.barrier()
    left = sorted(path.name for path in (folder / "parts").iterdir() if path.suffix != ".part")
    return [all(right), kinds, left, [one.version for one in publisher.take_finished()]]


@pytest.mark.parametrize("sharded", [True, False])
def test_versions_beside_the_training_are_exact(
    on_ranks: RunRanks, tmp_path: Path, sharded: bool
) -> None:
    kinds = [number % 5 == 0 for number in range(12)]
    expected = [True, kinds, [], list(range(1, 14))]
    assert on_ranks(2, many, tmp_path, sharded) == [expected] * 2


def held_up(folder: Path) -> list[Any]:
    """Block the copy at a gate: an optimizer's step waits for the copy, and nothing else does."""
    weights = Weights()
    held, gate = weights.held(), threading.Event()

    def later(read: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def reads() -> Tensor:
            if threading.current_thread() is not threading.main_thread():
                assert gate.wait(60)
            return read()

        return reads

    parts = [Held(one.stretch, later(one.read)) for one in held.held]
    publisher = Publisher(replace(held, held=parts), Folder(folder), bucket=1000)
    publisher.publish(wait=False)
    begun = not list(folder.glob("v*.json"))
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    moved = []
    optimizer.register_step_pre_hook(lambda *_: moved.append(gate.is_set()))
    threading.Timer(0.2, gate.set).start()
    optimizer.step()
    moved.append(gate.is_set())
    expected = copy_of(weights.values)
    weights.step(1)
    publisher.close()  # waits for the version
    dist.barrier()
    return [begun, moved[-1], same(received(folder), expected)]


def test_an_optimizer_waits_for_the_copy_alone(on_ranks: RunRanks, tmp_path: Path) -> None:
    assert on_ranks(2, held_up, tmp_path) == [[True, True, True]] * 2


def dropped(folder: Path) -> int:
    """Drop publishers that were not closed; return how many optimizer hooks they have left."""
    before = len(_global_optimizer_pre_hooks)
    for number in range(2):
        publisher = Weights().publisher(Folder(folder / str(number)))
        publisher.publish(wait=False)
        publisher.finish()
        del publisher
        gc.collect()
    return len(_global_optimizer_pre_hooks) - before


def test_a_dropped_publisher_leaves_no_hook(on_ranks: RunRanks, tmp_path: Path) -> None:
    assert on_ranks(2, dropped, tmp_path) == [0, 0]


def room_made(folder: Path, is_ended: bool) -> list[Any]:
    """Check that memory allocated at an earlier step is used; the thread may be stopped early."""
    weights, gate = Weights(), threading.Event()
    publisher = weights.publisher(Folder(folder), every=2)
    encoder, known = publisher._encoder, Shard.make_room

    def gated(shard: Shard, ended: Callable[[], bool]) -> None:
        assert gate.wait(60)
        known(shard, ended)

    with mock.patch.object(Shard, "make_room", gated):
        assert publisher.stepped(wait=False) is None
        maker = encoder._maker
        assert maker is not None
        if is_ended:
            encoder._is_due = True
        gate.set()
        maker.join()
    made = [one.snapshot for one in encoder.shards]
    assert is_ended or not any(one is None or one.any() for one in made)
    assert publisher.stepped(wait=False) is not None and encoder._maker is None
    used = [  # the thread makes the one the other
        a is not None and (a is b.snapshot or a is b.reference)
        for a, b in zip(made, encoder.shards, strict=True)
    ]
    expected = copy_of(weights.values)
    publisher.close()
    publisher.make_room()  # which nobody needs any more
    dist.barrier()
    return [all(used), same(received(folder), expected), encoder._maker is None]


@pytest.mark.parametrize("is_ended", [False, True])
def test_memory_for_a_first_version_is_made_before_it(
    on_ranks: RunRanks, tmp_path: Path, is_ended: bool
) -> None:
    assert on_ranks(2, room_made, tmp_path, is_ended) == [[not is_ended, True, True]] * 2


def torn(folder: Path) -> list[Any]:
    """Change rank 1's weights after their first values are copied, before the check."""
    weights = Weights()
    publisher = weights.publisher(Folder(folder))
    publisher.publish()
    weights.step(1)
    end = type(publisher._encoder.shards[0]).end_snapshot
    changes = dist.get_rank() == 1

    def changed(shard: Any, bucket: int) -> None:
        end(shard, bucket)
        if changes and shard is publisher._encoder.shards[-1]:
            for value in weights.values.values():
                value.data.view(torch.int16).add_(1)

    with mock.patch.object(type(publisher._encoder.shards[0]), "end_snapshot", changed):
        publisher.publish(wait=False)
        text = error_of(publisher.finish)
    if not changes:
        for value in weights.values.values():
            value.view(torch.int16).add_(1)
    again = publisher.publish(wait=False)
    found = publisher.finish()
    assert found is not None
    return [text, again.full, found.version, same(received(folder), weights.values)]


def test_weights_that_change_too_early_are_no_version(on_ranks: RunRanks, tmp_path: Path) -> None:
    for text, full, version, right in on_ranks(2, torn, tmp_path):
        assert text.startswith("version 2 was not published: rank 1: ")
        assert "was changed while it was being copied" in text
        assert full and version == 2 and right


def fails(folder: Path, by: str) -> list[Any]:
    """Fail in the background: the next ``publish`` raises it on all ranks."""
    weights = Weights()
    publisher = weights.publisher(Folder(folder))
    publisher.publish(wait=False)
    publisher.finish()
    weights.step(1)
    with broken(by):
        publisher.publish(wait=False)
        text = error_of(lambda: publisher.publish(wait=False))
    there = [path.name for path in sorted(folder.glob("v*.json"))]
    dist.barrier()
    left = [path.name for path in (folder / "parts").iterdir() if "v0000000002" in path.name]
    dist.barrier()
    weights.step(2)
    started = publisher.publish(wait=False)
    found = publisher.finish()
    assert found is not None
    right = same(received(folder), weights.values)
    return [text, there, left, started.full, found.version, right]


@contextmanager
def broken(by: str) -> Iterator[None]:
    """Return the error of a failure while rank 1 writes its part, or in rank 0's manifest."""
    rank = {"begin": 1, "commit": 0}[by]
    error = mock.Mock(side_effect=OSError(5, "Input/output error"))
    with mock.patch.object(Folder, by, error) if dist.get_rank() == rank else mock.MagicMock():
        yield


@pytest.mark.parametrize(("by", "rank"), [("begin", 1), ("commit", 0)])
def test_a_failure_is_told_on_all_ranks(
    on_ranks: RunRanks, tmp_path: Path, by: str, rank: int
) -> None:
    for text, there, left, full, version, right in on_ranks(2, fails, tmp_path, by):
        assert text.startswith(f"version 2 was not published: rank {rank}: OSError"), text
        assert there == ["v0000000001.json"] and left == []
        assert full and version == 2 and right


def there_in_spite(folder: Path) -> list[Any]:
    """Raise an error after rank 1's part is complete: the manifest may already exist."""
    weights = Weights()
    publisher = weights.publisher(Folder(folder))
    with full_disk(True, rank=1):
        publisher.publish(wait=False)
        text = error_of(publisher.finish)
    weights.step(1)
    publisher.publish(wait=False)
    found = publisher.finish()
    assert found is not None
    is_there = found.version == 2 and not found.full and text == ""
    is_not = found.version == 1 and found.full and "rank 1: OSError" in text
    return [is_there or is_not, same(received(folder), weights.values)]


def test_an_error_behind_a_whole_part(on_ranks: RunRanks, tmp_path: Path) -> None:
    """In both cases all ranks and receivers have the same."""
    assert on_ranks(2, there_in_spite, tmp_path) == [[True, True]] * 2


def stuck(folder: Path) -> list[Any]:
    """Let a part exceed the time limit, and again while it is written."""
    weights, gate = Weights(), threading.Event()
    publisher = weights.publisher(Folder(folder), limit_s=0.5)
    publisher.publish()
    begin = Folder.begin

    def slow(self: Folder, version: int, rank: int) -> Any:
        if rank == 1:
            assert gate.wait(60)
        return begin(self, version, rank)

    with mock.patch.object(Folder, "begin", slow):
        publisher.publish(wait=False)
        texts = [error_of(lambda: publisher.publish(wait=False)) for _ in range(2)]
        dist.barrier()
        gate.set()
        if dist.get_rank() == 1:
            assert publisher._beside is not None and publisher._beside._ended.wait(60)
        dist.barrier()
    weights.step(1)
    started = publisher.publish(wait=False)
    found = publisher.finish()
    left = [path.name for path in (folder / "parts").iterdir() if path.suffix != ".part"]
    assert found is not None
    return [texts, started.full, found.version, same(received(folder), weights.values), left]


def test_a_slow_folder_holds_nobody_beyond_the_limit(on_ranks: RunRanks, tmp_path: Path) -> None:
    for texts, full, version, right, left in on_ranks(2, stuck, tmp_path):
        for text in texts:
            assert text.startswith("version 2 was not published: rank 1: it was still being writt")
            assert "after 0.5 s (limit_s); look why" in text
        assert full and version == 2 and right and left == []


def closed(folder: Path) -> list[Any]:
    """Close on one rank only: a file notifies rank 0 that rank 1's part will not come."""
    weights = Weights()
    publisher = weights.publisher(Folder(folder))
    publisher.publish()
    weights.step(1)
    with broken("begin"):
        publisher.publish(wait=False)
        begun = time.perf_counter()
        publisher.close()
        assert time.perf_counter() - begun < 300  # rank 0 alone would have waited 600
    dist.barrier()
    receiver = received(folder)
    again = Weights().publisher(Folder(folder))
    summary = again.publish()
    dist.barrier()
    left = [path.name for path in (folder / "parts").iterdir() if path.suffix != ".part"]
    return [receiver.version, summary.version, left]


def test_close_tells_what_has_failed(on_ranks: RunRanks, tmp_path: Path) -> None:
    assert on_ranks(2, closed, tmp_path) == [[1, 2, []]] * 2


def refused(folder: Path) -> list[str]:
    return [
        error_of(lambda: Weights().publisher(Stream(None, (0,))).publish(wait=False)),
        error_of(lambda: Weights().publisher(Folder(folder), limit_s=0.0)),
    ]


def test_what_cannot_be_beside(on_ranks: RunRanks, tmp_path: Path) -> None:
    ((stream, limit),) = on_ranks(1, refused, tmp_path)
    assert "publish.wait: found False; only a folder is written beside the training" in stream
    assert "publish.limit_s: found 0.0; expected seconds, more than 0" in limit


def publishes_and_ends(folder: Path, how: str) -> None:
    """Publish a second version beside the training, and end or be killed before its manifest."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    weights = Weights()
    publisher = weights.publisher(Folder(folder / "to"))
    publisher.publish()
    weights.step(1)
    if how == "ends":
        publisher.publish(wait=False)
        return
    write = PartEncoder.write

    def cut(*given: Any, **named: Any) -> Any:
        write(*given, **named)
        os._exit(9)

    with mock.patch.object(PartEncoder, "write", cut):
        publisher.publish(wait=False)
        threading.Event().wait(60)


@pytest.mark.parametrize(
    ("how", "rc", "version"), by_day([("ends", 0, 2), ("killed", 9, 1)], [("ends", 0, 2)])
)
def test_a_script_that_ends(tmp_path: Path, how: str, rc: int, version: int) -> None:
    """The process waits for the version; if killed, the previous version is whole."""
    process = fork_server().Process(target=publishes_and_ends, args=(tmp_path, how), daemon=False)
    process.start()
    process.join()
    assert process.exitcode == rc
    assert received(tmp_path / "to").version == version
