"""Errors anywhere in an update or a version: results report applied changes, files stay whole."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.errors import PublishError
from hybridcomp.publishing import (
    EngineWeights,
    Held,
    Publisher,
    WeightRange,
    WeightReceiver,
    destinations,
    sources,
)
from hybridcomp.publishing.destinations import ASKS, PARTS, Folder, manifests_in
from hybridcomp.publishing.mirror import Mirror
from hybridcomp.publishing.weights import uncovered
from tests.publishing.made import (
    NIGHTLY,
    Weights,
    copy_of,
    error_of,
    flip,
    manifest_of,
    part_of,
    received,
    same,
)
from tests.publishing.raised import raised_at
from tests.ranks import RunRanks

SHAPES: dict[str, tuple[int, ...]] = {"a": (40, 30), "b": (700,), "c": (300,)}
ERRORS = (RuntimeError, MemoryError, KeyboardInterrupt)
#: a folder, and its versions' weights
Made = tuple[Path, list[dict[str, Tensor]]]


def one_changes(folder: Path) -> list[dict[str, Tensor]]:
    """Publish versions 1 to 4: version 2 changes a, 3 b, 4 c, and 4 is full."""
    weights, found = Weights(shapes=dict(SHAPES)), []
    publisher = weights.publisher(Folder(folder))
    for name in ("", "a", "b", "c"):
        before = copy_of(weights.values)
        weights.step(7, share=0.2)
        for other, value in weights.values.items():
            if name and other != name:
                value.copy_(before[other])
        if name == "c":
            publisher.ask_full()
        publisher.publish()
        found.append(copy_of(weights.values))
    return found


@pytest.fixture(scope="module")
def made(on_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    return folder, on_ranks(1, one_changes, folder)[0]


class Program:
    """A program from the page on publishing: it loads the tensors that a result names."""

    def __init__(self, source: Path) -> None:
        self.receiver = WeightReceiver(source)
        self.engine: dict[str, Tensor] = {}

    def update(self, until: int | None = None) -> None:
        applied = self.receiver.update(until)
        for name in () if applied is None else applied.names:
            offsets, values = self.receiver.changed_values(name)
            shape = SHAPES[name]
            flat = self.engine.setdefault(name, torch.zeros(shape, dtype=values.dtype)).view(-1)
            flat[offsets] = values


def test_what_was_applied_before_an_error_belongs_to_the_next_result(
    made: Made, tmp_path: Path
) -> None:
    folder, values = made
    shutil.copytree(folder, tmp_path / "copy")
    moved = (tmp_path / "copy" / "v0000000004.json").rename(tmp_path / "away")
    flip(part_of(tmp_path / "copy", 3))
    program = Program(tmp_path / "copy")
    program.update(until=1)
    with pytest.raises(PublishError, match="version 3"):
        program.update()
    assert program.receiver.version == 2
    where, _ = program.receiver.changed_values("a")
    assert len(where)  # since the last result
    moved.rename(tmp_path / "copy" / "v0000000004.json")
    applied = program.receiver.update()
    assert applied is not None and applied.names == ("a", "b", "c")
    assert (applied.since, applied.version, applied.versions, applied.full) == (1, 4, 2, True)
    changed = sum(int((new != values[0][n]).sum()) for n, new in values[3].items())
    assert applied.changed == changed
    assert program.receiver.update() is None


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_at_any_call_of_an_update_loses_nothing(
    made: Made, error: type[BaseException]
) -> None:
    folder, values = made
    number, step = 1, 1 if NIGHTLY else 29 if error is RuntimeError else 61
    while True:
        program = Program(folder)
        program.update(until=1)
        was = raised_at(number, error, lambda: program.receiver.update(until=3))  # noqa: B023
        held = program.receiver.version
        assert held in (0, 1, 2, 3) and (
            same(program.receiver, values[held - 1])
            if held
            else not list(program.receiver.tensors())
        )
        if not was:
            break
        program.update()
        assert program.receiver.version == 4 and same(program.receiver, values[3]), number
        for name, value in values[3].items():
            right = program.engine[name].view(torch.int16).equal(value.view(torch.int16))
            assert right, f"{name} after an error at call {number}"
        number += step
    assert number > 100


def copied(made: Made, tmp_path: Path) -> tuple[Path, list[dict[str, Tensor]]]:
    """Copy the folder, so that a test may remove files."""
    folder = tmp_path / "copy"
    shutil.copytree(made[0], folder)
    return folder, made[1]


def test_a_lost_part_is_passed_over_for_a_later_full_version(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, values = copied(made, tmp_path)
    receiver = WeightReceiver(folder)
    receiver.update(until=1)
    lost = part_of(folder, 2)
    lost.unlink()
    assert receiver.update(until=3) is None  # no full version up to there
    assert f"waits for parts/{lost.name} of version 2 since 2" in receiver.waits_for
    applied = receiver.update()
    assert applied is not None and (applied.version, applied.full) == (4, True)
    assert same(receiver, values[3]) and receiver.waits_for == ""
    assert f"{lost.name} of version 2 is not there: full version 4" in "".join(capsys.readouterr())


def test_a_new_receiver_takes_an_older_full_version_that_is_all_there(
    made: Made, tmp_path: Path
) -> None:
    folder, values = copied(made, tmp_path)
    lost = part_of(folder, 4)
    kept = lost.rename(tmp_path / "kept")
    receiver = received(folder)
    assert receiver.version == 3 and same(receiver, values[2])
    assert "of version 4" in receiver.waits_for
    kept.rename(lost)
    receiver.update()
    assert receiver.version == 4 and same(receiver, values[3])


def test_what_is_waited_for_is_named_once_and_asked_for(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, values = copied(made, tmp_path)
    manifest_of(folder, 4).unlink()
    receiver = WeightReceiver(folder)
    receiver.update(until=1)
    name = part_of(folder, 2)
    whole = name.read_bytes()
    name.unlink()
    for _ in range(2):
        assert receiver.update() is None
    assert not list(folder.glob(ASKS)) and not "".join(capsys.readouterr())
    monkeypatch.setattr(sources, "LOST_AFTER_S", 0.0)
    for _ in range(3):
        assert receiver.update() is None
    text = "".join(capsys.readouterr())
    assert text.count(f"waits for parts/{name.name} of version 2 since") == 1
    assert "a full version was asked for" in text and len(list(folder.glob(ASKS))) == 1
    name.write_bytes(whole)
    receiver.update()
    assert same(receiver, values[2]) and not list(folder.glob(ASKS))
    for path in folder.glob("v*.json"):
        path.unlink()
    assert receiver.update() is None and receiver.update() is None
    assert "".join(capsys.readouterr()).count("waits for a version in ") == 1
    empty = received(tmp_path / "not there")
    assert f"waits for a version in {tmp_path / 'not there'} since" in empty.waits_for


def test_a_version_that_appears_between_two_looks(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, values = copied(made, tmp_path)
    later = {v: manifest_of(folder, v).rename(tmp_path / str(v)) for v in (3, 4)}
    receiver = received(folder)
    look = manifests_in

    def looks(path: Path) -> dict[int, Path]:
        found = look(path)
        for version, moved in later.items():  # committed right after the look
            moved.rename(manifest_of(folder, version))
        later.clear()
        return found

    monkeypatch.setattr(sources, "manifests_in", looks)
    assert receiver.update() is None and receiver.version == 2
    applied = receiver.update()
    assert applied is not None and same(receiver, values[3])


def test_stretches_that_overlap_and_leave_a_hole_are_no_cover() -> None:
    table: Any = {"a": ((30, 40), "bf16")}

    def of(*rows: tuple[int, ...]) -> list[tuple[str, int, int]]:
        return uncovered(table, [WeightRange("a", *row) for row in rows])

    assert not of((0, 600), (600, 600)) and not of((600, 600), (0, 600), (600, 0))
    assert not of((0, 10, 30, 40), (10, 30, 30, 40)) and not of((0, 40), (40, 10, 29, 40),
                                                                (50, 30, 29, 40))  # fmt: skip
    overlap = [("a", 1200, -1)]
    assert of((0, 600), (300, 600)) == overlap
    assert of((0, 10, 30, 40), (9, 30, 30, 40)) == overlap
    assert of((0, 1200, 1, 0), (0, 0)) == [] and of((0, 600)) == [("a", 1200, 600)]
    assert of((1, 1200)) == overlap
    assert uncovered(table, [WeightRange("b", 0, 0)]) == [("a", 1200, 0), ("b", 0, -1)]


def overlaps(folder: Path) -> None:
    """Return a job that holds some values twice and omits others."""
    values = torch.randn(900).to(torch.bfloat16)
    held = [Held(WeightRange("a", low, 600), lambda: values[:600]) for low in (0, 300)]
    weights = EngineWeights({"a": (30, 40)}, {"a": torch.bfloat16}, held, (0,))
    with pytest.raises(PublishError, match="a: its 1200 values are held in parts that overlap"):
        Publisher(weights, Folder(folder))


def test_a_job_with_a_hole_is_refused_and_a_mirror_begins_as_nan(
    on_ranks: RunRanks, tmp_path: Path
) -> None:
    on_ranks(1, overlaps, tmp_path)
    empty = Mirror.empty({"a": ((3, 2), "bf16"), "b": ((), "fp16")}, {})
    assert all(bool(flat.isnan().all()) for flat in empty.flats.values())


class Lost:
    """Calls whose effect happens but whose answer is lost: the first of each name."""

    def __init__(self, name: str, error: OSError) -> None:
        self.original, self.error, self.calls = getattr(os, name), error, 0

    def __call__(self, *given: Any) -> Any:
        self.calls += 1
        result = self.original(*given)
        if self.calls == 1:
            raise self.error
        return result


def answers_lost(folder: Path) -> list[Any]:
    """Publish while the answers to link, rename and open are lost, once each."""
    found: list[Any] = []
    for name, error in (
        ("link", FileExistsError(17, "File exists")),
        ("link", OSError(5, "Input/output error")),
        ("replace", FileNotFoundError(2, "No such file")),
    ):
        weights, to = Weights(), folder / f"{len(found)}"
        publisher = weights.publisher(Folder(to))
        receiver = WeightReceiver(to)
        publisher.publish()
        weights.step(1)
        with mock.patch.object(os, name, Lost(name, error)):
            publisher.publish()
        receiver.update()
        right = same(receiver, weights.values)
        weights.step(2)
        summary = publisher.publish()
        receiver.update()
        names = sorted(path.name for path in to.iterdir())
        found.append((right, summary.full, same(receiver, weights.values), len(names)))
    return found


def test_an_answer_that_is_lost_is_no_other_job(on_ranks: RunRanks, tmp_path: Path) -> None:
    assert on_ranks(1, answers_lost, tmp_path) == [[(True, False, True, 4)] * 3]


def interrupted(folder: Path) -> list[Any]:
    """Return a version that became readable although the job got an error."""
    found: list[Any] = []
    for error in (RuntimeError("injected"), KeyboardInterrupt("injected")):
        weights, to = Weights(), folder / type(error).__name__
        publisher, receiver = weights.publisher(Folder(to)), WeightReceiver(to)
        publisher.publish()
        weights.step(1)
        rename = destinations._rename_new

        def fails(*given: Path) -> None:
            rename(*given)  # noqa: B023
            raise error  # noqa: B023

        with mock.patch.object(destinations, "_rename_new", fails):
            try:
                found.append(publisher.publish().version)
            except KeyboardInterrupt:
                found.append(publisher.version)
        receiver.update()
        found.append((receiver.version, same(receiver, weights.values)))
        weights.step(2)
        summary = publisher.publish()
        receiver.update()
        found.append((summary.version, summary.full, same(receiver, weights.values)))
    return found


def test_the_parts_of_a_readable_version_stay(on_ranks: RunRanks, tmp_path: Path) -> None:
    told, interrupt = [2, (2, True), (3, False, True)], [1, (2, True), (3, True, True)]
    assert on_ranks(1, interrupted, tmp_path) == [[*told, *interrupt]]


def abandons(folder: Path) -> bool:
    """Take back a version on a rank although its manifest is readable."""
    weights, to = Weights(), Folder(folder)
    weights.publisher(to).publish()
    to.abandon()
    return same(received(folder), weights.values)


def test_a_part_that_a_manifest_names_is_not_taken_back(on_ranks: RunRanks, tmp_path: Path) -> None:
    assert on_ranks(1, abandons, tmp_path) == [True]


def at_any_call(folder: Path) -> list[str]:
    """Raise errors at any call of a publish: receivers see whole versions, the next is right."""
    wrong = []
    for error in ERRORS:
        number, step = 1, 1 if NIGHTLY else 13 if error is RuntimeError else 53
        weights, to = Weights(shapes=dict(SHAPES)), folder / error.__name__
        publisher, receiver = weights.publisher(Folder(to), keep=1), WeightReceiver(to)
        publisher.publish()
        receiver.update()
        was = True
        while was:
            weights.step(number)
            try:
                was = raised_at(number, error, publisher.publish)
            except PublishError as told:
                assert "injected" in str(told), told
            before = receiver.version
            receiver.update()
            if receiver.version != before and not same(receiver, weights.values):
                wrong.append(f"{error} at call {number}: another version")
            weights.step(number + 1)
            publisher.publish()
            receiver.update()
            if not same(receiver, weights.values) or receiver.version != publisher.version:
                wrong.append(f"{error} at call {number}: {receiver.version} {publisher.version}")
            number += step
        named = {part.file for v in manifests_in(to) for part in Folder(to).read(v).parts}
        left = {path.name for path in (to / PARTS).iterdir()} - named
        wrong += [f"{error}: {left} left"] if error is RuntimeError and left else []
        assert number > 300
    return wrong


@pytest.mark.timeout(900)
def test_an_error_at_any_call_of_a_version(on_ranks: RunRanks, tmp_path: Path) -> None:
    assert on_ranks(1, at_any_call, tmp_path) == [[]]


def ready_is_reached_by_all(folder: Path) -> list[str]:
    """Fail to open rank 1's part; the preparation is collective."""
    weights, calls = Weights(), [0]
    held = dataclasses.replace(weights.held(), ready=lambda: dist.barrier())
    publisher = Publisher(held, Folder(folder), bucket=1000)
    publisher.publish()

    def full(path: Path) -> Any:
        calls[0] += 1
        raise OSError(28, "No space left on device")

    with mock.patch.object(destinations, "_open_new", full if dist.get_rank() else opened):
        told = error_of(publisher.publish)
    publisher.publish()
    return [told, str(calls[0])]


opened = destinations._open_new


def test_a_rank_without_a_part_gets_ready_with_the_others(
    on_ranks: RunRanks, tmp_path: Path
) -> None:
    first, second = on_ranks(2, ready_is_reached_by_all, tmp_path)
    assert first[0] == second[0] and first[1:] == ["0"] and second[1:] == ["1"]
    assert "version 2 was not published: rank 1: version 2: " in first[0]
    assert "cannot be written (No space left on device)" in first[0]


def cannot_look(folder: Path) -> str:
    """Fail to read rank 1's weights when the chain is examined again."""
    weights = Weights()
    weights.publisher(Folder(folder)).publish()

    def fails() -> Tensor:
        raise RuntimeError("no weights here")

    held = weights.held()
    if dist.get_rank():
        parts = [dataclasses.replace(one, read=fails) for one in held.held]
        held = dataclasses.replace(held, held=parts)
    return error_of(Publisher(held, Folder(folder), bucket=1000).publish)


def test_a_rank_that_cannot_read_when_a_chain_goes_on(on_ranks: RunRanks, tmp_path: Path) -> None:
    for told in on_ranks(2, cannot_look, tmp_path):
        assert "rank 1: RuntimeError: no weights here" in told


def first_refuses() -> str:
    """Raise on all ranks an error that only rank 0 detects."""
    model = DistributedDataParallel(torch.nn.Linear(3, 2).to(torch.bfloat16))
    return error_of(lambda: hybridcomp.publish(model, None if dist.get_rank() else 7))


def test_a_destination_that_one_rank_refuses(on_ranks: RunRanks) -> None:
    for told in on_ranks(2, first_refuses):
        assert told.startswith("publish.to: found int; expected a folder")


def test_of_two_jobs_one_writes_a_version_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second looks between the first one's look and its rename."""

    def no_link(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_link)
    first, second, target = tmp_path / "first", tmp_path / "second", tmp_path / "v1.json"
    first.write_text("first")
    second.write_text("second")
    replace = os.replace

    def late(source: Path, name: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        with pytest.raises(FileExistsError, match="another job writes this version"):
            destinations._rename_new(second, target)
        replace(source, name)

    monkeypatch.setattr(os, "replace", late)
    destinations._rename_new(first, target)
    assert target.read_text() == "first" and sorted(tmp_path.iterdir()) == [second, target]
    target.unlink()
    claim = tmp_path / "v1.claim"
    claim.touch()
    os.utime(claim, (0, 0))  # as left by a job that was killed
    destinations._rename_new(second, target)
    assert target.read_text() == "second" and not claim.exists()
