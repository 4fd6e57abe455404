"""Every seam matches the recorded signatures of upstream's releases."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import InvalidRequirement, Requirement

import read_upstream
from hybridcomp.patches.registry import patches_of
from hybridcomp.seams.patching import Seam
from tests.patches.recorded import FILE, RECORDED, bound, parameters, versions
from tests.paths import ROOT

#: releases that the file must have
RELEASES = {
    "deepspeed": {"0.19.0", "0.19.8"},
    "megatron-core": {"0.13.1", "0.16.1", "0.19.2"},
}
#: folder with the archives, for comparison (.ci/upstream fetches them)
ARCHIVES = os.environ.get("HYBRIDCOMP_UPSTREAM_ARCHIVES")


def seams(name: str) -> list[Seam]:
    return [p.seam for package in read_upstream.PACKAGES[name] for p in patches_of(package)]


def fits(seam: Seam, version: str) -> bool:
    """Return whether a version is in a seam's window; a checkout always is."""
    try:
        return Requirement(seam.requirement).specifier.contains(version)
    except InvalidRequirement:
        return True


@pytest.mark.parametrize("name", RECORDED)
def test_every_release_has_the_parameters_that_its_seams_expect(name: str) -> None:
    compared = 0
    for version in versions(name):
        found = bound(name, version)
        for seam in seams(name):
            got = parameters(found[str(seam)])
            if seam.parameters is None or got is None or not fits(seam, version):
                continue
            assert got in seam.alternatives, (
                f"{seam} in {name} {version}:\nexpected {seam.alternatives}\nfound {got}"
            )
            compared += 1
    assert compared >= len(versions(name)) * 5


@pytest.mark.parametrize("name", RECORDED)
def test_every_seam_is_there_in_some_release(name: str) -> None:
    """Except for calls of a layer, which belong to torch."""
    ways = RECORDED[name]["symbols"]
    gone = [s for s in map(str, seams(name)) if set(ways[s]) == {"absent"}]
    assert [symbol for symbol in gone if not symbol.endswith(".__call__")] == []


@pytest.mark.parametrize("name", ["deepspeed", "megatron-core"])
def test_every_alternative_is_that_of_some_release(name: str) -> None:
    ways = RECORDED[name]["symbols"]
    for seam in seams(name):
        found = {parameters(text) for text in ways[str(seam)]} - {None}
        if seam.parameters is not None and len(seam.alternatives) > 1:
            assert set(seam.alternatives) <= found, f"{seam}: {found}"


def test_the_file_says_what_it_was_read_from() -> None:
    for name, wanted in RELEASES.items():
        assert wanted <= set(versions(name))
    for facts in RECORDED.values():
        for version, archive in facts["archives"].items():
            assert version in archive["file"] and re.fullmatch("[0-9a-f]{64}", archive["sha256"])
        for ways in facts["symbols"].values():
            assert sorted(v for having in ways.values() for v in having) == sorted(
                facts["archives"]
            )


SOURCE = '''
import torch
from torch.distributed import all_reduce as _sum
if hasattr(torch, "something"):
    gather = torch.distributed.all_gather_into_tensor
else:
    gather = torch.distributed._all_gather_base
class Layer(torch.nn.Module):
    """An upstream's layer; reading it must not run it."""
    raise SystemExit("this was run")
    @staticmethod
    def forward(ctx, group: int, *, size=torch.Size([1]), wait=True): ...
    def __hidden(self, *rest, **more): ...
'''


def test_archives_are_read_and_never_run(tmp_path: Path) -> None:
    import tarfile
    import zipfile

    (tmp_path / "upstream.py").write_text(SOURCE)
    with zipfile.ZipFile(tmp_path / "deepspeed-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(tmp_path / "upstream.py", "toy/upstream.py")
    with tarfile.open(tmp_path / "deepspeed-1.0.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "upstream.py", "deepspeed-1.0/toy/upstream.py")
    names = ["torch", "_sum", "gather", "Layer", "Layer.forward", "Layer._Layer__hidden", "gone"]
    for path in (tmp_path / "deepspeed-1.0-py3-none-any.whl", tmp_path / "deepspeed-1.0.tar.gz"):
        assert read_upstream.identify(path) == ("deepspeed", "1.0")
        found = read_upstream.read(path, [f"toy.upstream:{name}" for name in names])
        assert list(found.values()) == [
            "import torch", "= torch.distributed.all_reduce",
            "= torch.distributed.all_gather_into_tensor", "class",
            "static def (ctx, group, *, size=..., wait=True)", "def (self, *rest, **more)",
            "absent",
        ]  # fmt: skip
    assert read_upstream.identify(tmp_path / "upstream.py") is None


@pytest.mark.skipif(ARCHIVES is None, reason="set HYBRIDCOMP_UPSTREAM_ARCHIVES to their folder")
def test_the_file_is_what_the_archives_say() -> None:
    assert ARCHIVES is not None
    script = ROOT / "scripts" / "read_upstream.py"
    before = hashlib.sha256(FILE.read_bytes()).hexdigest()
    done = subprocess.run(
        [sys.executable, str(script), ARCHIVES, "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert hashlib.sha256(FILE.read_bytes()).hexdigest() == before
