"""Bad input of a receiver: one line with version, tensor and remedy, and no change."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hybridcomp.errors import ConfigError, PublishError
from hybridcomp.publishing import WeightReceiver
from hybridcomp.publishing.destinations import PARTS, Folder
from hybridcomp.publishing.part_buffers import FileBytes
from hybridcomp.publishing.records import Manifest, _digest, read_manifest
from tests.publishing.made import (
    SHAPES,
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

#: shapes of other models
MODELS: dict[str, dict[str, tuple[int, ...]]] = {
    "more": {**SHAPES, "new.weight": (3,)},
    "less": {name: shape for name, shape in SHAPES.items() if name != "layers.0.bias"},
    "larger": {**SHAPES, "layers.0.weight": (64, 49)},
}


def chains(folder: Path) -> None:
    """Publish two chains of four versions, one from another job; and some of other models."""
    for name in ("one", "other", *MODELS):
        publish_chain(folder / name, 4, 3, MODELS.get(name, SHAPES))


@pytest.fixture(scope="module")
def made(on_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chains")
    on_ranks(2, chains, folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """Return a folder with versions 1 and 2 of a chain; ``bring`` copies later ones."""
    for version in (1, 2):
        bring(made / "one", tmp_path / "here", version)
    return tmp_path / "here"


def bring(source: Path, target: Path, version: int) -> None:
    """Copy a version as an object store's tool would."""
    (target / PARTS).mkdir(parents=True, exist_ok=True)
    for path in source.rglob(f"v{version:010d}*"):
        shutil.copy(path, target / path.relative_to(source))


def rewrite(folder: Path, version: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and update its checksum."""
    path = manifest_of(folder, version)
    found = json.loads(path.read_text())
    del found["digest"]
    change(found)
    path.write_text(json.dumps({**found, "digest": _digest(found)}))


def refused(receiver: WeightReceiver, *words: str) -> None:
    """Check that the update fails with one line containing ``words`` and changes nothing."""
    version, before = receiver.version, copy_of(dict(receiver.tensors()))
    text = error_of(receiver.update)
    assert text and all(word in text for word in words), text
    assert receiver.version == version and same(receiver, before)


@pytest.fixture
def receiver(folder: Path) -> WeightReceiver:
    found = WeightReceiver(folder)
    applied = found.update()
    assert applied is not None and applied.version == 2 and applied.versions == 2
    return found


def test_a_part_that_is_not_there_yet(receiver: WeightReceiver, folder: Path, made: Path) -> None:
    bring(made / "one", folder, 3)
    part_of(folder, 3, 1).unlink()
    assert receiver.update() is None
    bring(made / "one", folder, 3)
    assert receiver.update() is not None


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def with_another_part(folder: Path, made: Path) -> None:
    """Name a part with a parameter more, which the table does not list; every checksum is right."""
    said = json.loads(manifest_of(made / "more", 3).read_text())["parts"][1]
    shutil.copy(part_of(made / "more", 3, 1), folder / PARTS)
    rewrite(folder, 3, lambda found: found["parts"].__setitem__(1, said))


def break_manifest(text: str) -> Callable[[Path, Path], None]:
    """Return a change of version 3's manifest: a JSON text for its first 50 bytes."""

    def changed(folder: Path, _: Path) -> None:
        manifest_of(folder, 3).write_text(text)

    return changed


def odd(key: str, value: object) -> Callable[[Path, Path], None]:
    """Return a change of a field of version 3's manifest, under a right checksum."""
    return lambda folder, _: rewrite(folder, 3, lambda found: found.update({key: value}))


def stretch(folder: Path, _: Path) -> None:
    """Give version 3's first part an index of a terabyte, with a right size and checksum."""
    path = part_of(folder, 3, 0)
    tail, nbytes = path.read_bytes()[-24:], 1 << 40
    with path.open("r+b") as file:
        file.truncate(nbytes)
        file.seek(nbytes - 32)
        file.write((nbytes - 48).to_bytes(8, "little") + tail)
    rewrite(folder, 3, lambda found: found["parts"][0].update(nbytes=nbytes))


AGAIN, ASKED = "copy it again", "a full version was asked for"
MANIFEST = ("v0000000003.json", "manifest", AGAIN, ASKED)
#: what happens to version 3 on its way (folder, chains), and words of the error
DAMAGES: list[tuple[Callable[[Path, Path], object], tuple[str, ...]]] = [
    (lambda folder, _: cut_short(part_of(folder, 3, 1)),
     ("version 3", "r00001.part", "half-written", AGAIN, ASKED)),
    *((partial(lambda place, folder, _: flip(part_of(folder, 3, 1), place), place),
       ("version 3", "checksum", AGAIN, ASKED)) for place in (0, 20, None, -30, -100)),
    (lambda folder, _: cut_short(manifest_of(folder, 3)), MANIFEST),
    (break_manifest(""), MANIFEST),
    (break_manifest("[]"), MANIFEST),
    (lambda folder, _: flip(manifest_of(folder, 3)), MANIFEST),
    (odd("parts", [{"rank": 0, "file": "../../secret", "nbytes": 1, "digest": "0" * 32}]),
     MANIFEST),
    (odd("parent", -1), MANIFEST),
    (odd("version", True), MANIFEST),
    (odd("parts", 3), MANIFEST),
    (odd("base", "x"), MANIFEST),
    (lambda folder, _: rewrite(folder, 3, lambda found: found.pop("weights")), MANIFEST),
    (lambda folder, _: os.truncate(manifest_of(folder, 3), 1 << 40), MANIFEST),
    (stretch, ("version 3", "r00000.part", AGAIN, ASKED)),
    (with_another_part, ("version 3", "r00001.part", "its version", AGAIN)),
    (lambda folder, made: bring(made / "other", folder, 3),
     ("version 3", "expected chain", "make a new WeightReceiver")),
    (lambda folder, _: shutil.copy(manifest_of(folder, 2), manifest_of(folder, 3)),
     ("version 3", "holds version 2", "replay")),
    (odd("parent_digest", "0" * 32), ("version 3", "does not follow", "full version", ASKED)),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_a_version_that_is_damaged_or_odd(
    receiver: WeightReceiver,
    folder: Path,
    made: Path,
    damage: Callable[[Path, Path], object],
    words: tuple[str, ...],
) -> None:
    bring(made / "one", folder, 3)
    damage(folder, made)
    refused(receiver, *words)
    bring(made / "one", folder, 3)
    applied = receiver.update()
    assert applied is not None and applied.version == 3


@pytest.mark.parametrize("call", ["size", "at"])
def test_a_disk_that_cannot_be_read(
    receiver: WeightReceiver, folder: Path, made: Path, call: str
) -> None:
    bring(made / "one", folder, 3)
    error = OSError(errno.EIO, "Input/output error")
    with mock.patch.object(FileBytes, call, side_effect=error):
        refused(receiver, "version 3", "Input/output error", AGAIN, ASKED)
    applied = receiver.update()
    assert applied is not None and applied.version == 3


def test_a_folder_that_was_turned_back(receiver: WeightReceiver, folder: Path) -> None:
    manifest_of(folder, 2).unlink()
    refused(receiver, "version 1", "holds version 2", "replay")


def test_a_missing_version(receiver: WeightReceiver, folder: Path, made: Path) -> None:
    """Version 4 is full and loads without version 3; a later delta would not."""
    bring(made / "one", folder, 4)
    applied = receiver.update()
    assert applied is not None and (applied.version, applied.full) == (4, True)


def test_a_missing_version_before_a_delta(tmp_path: Path, made: Path) -> None:
    bring(made / "one", tmp_path / "gap", 3)
    with pytest.raises(PublishError, match="version 1 is missing.*newest: 3.*asked for"):
        received(tmp_path / "gap")
    next((tmp_path / "gap").glob("ask_full.*")).unlink()
    bring(made / "one", tmp_path / "gap", 1)
    receiver = WeightReceiver(tmp_path / "gap")
    for _ in range(2):  # asked for once, however often it looks
        with pytest.raises(PublishError, match="version 2 is missing.*newest: 3.*asked for"):
            receiver.update()
    assert receiver.version == 1 and len(list((tmp_path / "gap").glob("ask_full.*"))) == 1


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("more", ("new.weight", "expected nothing, found ((3,), 'bf16')")),
        ("less", ("layers.0.bias", "expected ((5,), 'bf16'), found nothing")),
        ("larger", ("layers.0.weight", "found ((64, 49), 'bf16')")),
    ],
)
def test_another_model(
    receiver: WeightReceiver, folder: Path, made: Path, model: str, words: tuple[str, ...]
) -> None:
    """A parameter more, less or of another size, in a full version and in a delta."""
    base, digest = receiver.base, receiver._held
    assert digest is not None
    bring(made / model, folder, 4)
    rewrite(folder, 4, lambda found: found.update(base=base))
    refused(receiver, "version 4", *words, "new WeightReceiver")
    manifest_of(folder, 4).unlink()
    bring(made / model, folder, 3)
    rewrite(folder, 3, lambda found: found.update(base=base, parent_digest=digest.digest))
    refused(receiver, "version 3", "other parameters than version 2", "new WeightReceiver")


def other_job(folder: Path) -> str:
    """Resume in the folder with a job of another model; return its error."""
    publish_chain(folder, 1)
    return error_of(lambda: Weights(shapes=dict(MODELS["less"])).publisher(Folder(folder)))


def test_a_job_of_another_model_in_the_same_folder(on_ranks: RunRanks, tmp_path: Path) -> None:
    expected = "publish.to: found 'version 1'; it holds the weights of another model or dtype; "
    assert on_ranks(2, other_job, tmp_path) == [f"{expected}name an empty folder"] * 2


@pytest.mark.parametrize("name", list(SHAPES))
def test_weights_that_were_rewritten_by_hand(
    receiver: WeightReceiver, folder: Path, made: Path, name: str
) -> None:
    """It is detected even if the version does not change them; a full version repairs it."""
    tensor = dict(receiver.tensors())[name]
    tensor.view(torch.int16).view(-1)[-1] += 1
    bring(made / "one", folder, 3)
    refused(receiver, "version 3", name, "written to the mirror", "full version")
    bring(made / "one", folder, 4)
    manifest_of(folder, 3).unlink()
    assert receiver.update() is not None
    assert same(receiver, dict(received(folder).tensors()))


def test_an_engine_with_quantized_weights(receiver: WeightReceiver) -> None:
    tensors = dict(receiver.tensors())
    receiver.check_engine({**tensors, "head.weight": tensors["embed.weight"]}.items())
    cases = [
        ({"scale": torch.zeros((), dtype=torch.int8)}, "expected bf16, found torch.int8"),
        ({"scale": torch.zeros(2, dtype=torch.bfloat16)}, "expected shape ()"),
        ({"what": torch.zeros(2)}, "what is in the engine and not published"),
    ]
    for engine, text in cases:
        with pytest.raises(PublishError, match=re.escape(text)) as caught:
            receiver.check_engine(engine.items())
        assert "version 2" in str(caught.value)
    with pytest.raises(PublishError, match="what is not published"):
        receiver.changed_values("what")


def test_sources_and_destinations_of_other_kinds() -> None:
    with pytest.raises(ConfigError, match="s3://bucket/weights.*expected a folder, file:///folder"):
        WeightReceiver("s3://bucket/weights")
    with pytest.raises(ConfigError, match="expected a folder"):
        WeightReceiver(3)
    assert WeightReceiver("/nowhere/at/all").update() is None


def test_a_manifest_is_read_as_it_was_written(folder: Path) -> None:
    text = manifest_of(folder, 1).read_bytes()
    found: Manifest = read_manifest(text, "here")
    assert (
        found.to_json() == text and found.full and found.aliases == {"head.weight": "embed.weight"}
    )
