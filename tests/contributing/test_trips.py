"""Follow the pages on a codec, a dimension and a release literally, one after the other.

They share one copy of the repository, since generating its pages takes longest: by day the edits
are made in it, at night they are run. ``tests/codecs/test_native.py`` compiles the codec's kernels
and checks their bytes.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contributing.walk import MOST, Copy, distribution, files, put, steps
from tests.paths import ROOT
from tests.scripts_on_ranks import run_script

#: page -> the files that the test writes; others are written out of habit
WRITES = {
    "codec.md": {
        "hybridcomp/kernels/formats/trim.h",
        "hybridcomp/kernels/cpu/bind_trim.cpp",
        "hybridcomp/codecs/trim.py",
    },
    "dimension.md": {
        "hybridcomp/dimensions.py",
        "patches/toytrain_gradients.py",
        "patches/registry.py",
    },
    "release.md": {
        "patches/ds/requirement.py",
        "pyproject.toml",
        "tests/patches/upstream.json",
    },
}
#: recorded signatures of upstream releases
RECORDS = ("tests/patches/upstream.json", "tests/inference/upstream.json")
#: the upstream that the page on dimensions patches, as in the page on seams
TOYTRAIN = next(step.text for step in steps("seam.md") if "def average" in step.text)
#: class of the page on codecs, which is a separate file inside hybridcomp
TOY = next(step.text for step in steps("codec.md") if "class Toy(Codec)" in step.text)
#: a seam of a made-up DeepSpeed 0.20.0, with a renamed argument
RENAMED = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.allreduce_bucket"
NEWER = "def (self, bucket, communication_data_type, rank=None, log=None, divide=True, group=None)"
#: checks the single-file codec against the contract; prints each seam's status for DeepSpeed
ASK = """
import json
from hybridcomp.codecs import make_codec
from hybridcomp.codecs.testing import check
check(make_codec("toy", keep=3))
from hybridcomp.patches.registry import patches_of
print(json.dumps([patch.seam.found_version() for patch in patches_of("deepspeed")]))
"""


@dataclass(frozen=True)
class Walked:
    """The copy after its scripts: its folder, and the ranks' output."""

    home: Path
    printed: str
    versions: list[str]
    compared: str

    def page(self, name: str) -> str:
        """Return a page of the copy below docs/."""
        return (self.home / "docs" / name).read_text()


def follow(page: str, copy: Copy) -> set[str]:
    """Follow a page except for its scripts and page generation; return the touched files."""
    before = copy.changed()
    for step in steps(page):
        if step.language == "diff":
            put(step.text, copy.home / step.file)
        elif step.file.startswith(("kernels/", "codecs/")):
            path = copy.home / "hybridcomp" / step.file
            assert not path.exists()
            path.write_text(step.text)
        elif step.text.startswith("sed "):
            copy.run(step.text)
        elif "read_upstream" in step.text:
            fetch, read = step.text.splitlines()
            assert fetch.startswith("pip download") and " --dest archives deepspeed==" in fetch
            archive(copy.home / "archives", fetch.rpartition("==")[2])
            (copy.home / "compared").write_text(copy.run(read))
    return copy.changed() - before


def archive(folder: Path, version: str) -> None:
    """Write a DeepSpeed release with a seam's function, one of its arguments renamed."""
    module, _, qualname = RENAMED.partition(":")
    owner, _, name = qualname.partition(".")
    text = f"class {owner}:\n    def {name}{NEWER.removeprefix('def ')}: ...\n"
    member = tarfile.TarInfo(f"deepspeed-{version}/{module.replace('.', '/')}.py")
    member.size = len(text)
    folder.mkdir()
    with tarfile.open(folder / f"deepspeed-{version}.tar.gz", "w:gz") as made:
        made.addfile(member, io.BytesIO(text.encode()))


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Copy, Mapping[str, set[str]]]:
    """Return the copy with the pages' edits, and the files of each page."""
    parts = ("docs", "configs", "scripts", "README.md", "pyproject.toml", *RECORDS)
    copy = Copy(tmp_path_factory.mktemp("repository"), *parts)
    return copy, {page: follow(page, copy) for page in WRITES}


@pytest.fixture(scope="module")
def walked(edited: tuple[Copy, Mapping[str, set[str]]]) -> Walked:
    pytest.importorskip("deepspeed")
    copy, home = edited[0], edited[0].home
    (made,) = {step.text for page in WRITES for step in steps(page) if "make_docs" in step.text}
    copy.run(made)
    distribution(home, "deepspeed", "0.20.3")
    distribution(home, "toytrain", "1.3")
    (home / "toytrain").mkdir()
    (home / "toytrain" / "__init__.py").touch()
    (home / "toytrain" / "gradients.py").write_text(TOYTRAIN)
    script = next(step.text for step in steps("dimension.md") if step.language == "python")
    (home / "try_dimension.py").write_text(script)
    (home / "hybridcomp" / "codecs" / "toy.py").write_text(TOY)
    (home / "ask.py").write_text(ASK)
    ended = run_script(home, "try_dimension.py", anew=True)
    asked = run_script(home, "ask.py", ranks=1, anew=True)
    assert (ended.returncode, asked.returncode) == (0, 0), ended.output + asked.output
    found = json.loads(asked.output.splitlines()[-1])
    return Walked(home, ended.output, found, (home / "compared").read_text())


@pytest.mark.parametrize("page", WRITES)
def test_a_trip_takes_few_files(edited: tuple[Copy, Mapping[str, set[str]]], page: str) -> None:
    named, (copy, by_hand) = files(page), edited
    assert by_hand[page] == WRITES[page] <= set(named)
    assert len(named) <= MOST
    for name in named:
        assert (copy.home / name).exists() or (ROOT / name).parent.is_dir(), name


@pytest.mark.nightly
def test_messages_of_the_dimension_are_encoded_and_counted(walked: Walked) -> None:
    errors = [float(value) for value in re.findall(r"largest error ([\d.e-]+)", walked.printed)]
    assert len(errors) == 2 and errors[0] == errors[1] and 0 < errors[0] < 0.02
    assert re.search(r"\[hybridcomp\] step 1: sites blockint\(bits=8\) 3\.\d+x", walked.printed)


@pytest.mark.nightly
def test_the_pages_have_the_dimension(walked: Walked) -> None:
    section = walked.page("block.md").partition("\n## sites\n")[2].partition("\n## ")[0]
    assert "Averages of sites that meet every few steps. Default: native." in section
    assert (
        "* **`guard`**, **`ramp`**: as in [dp](#dp)." in section
        and "`error_feedback`" not in section
    )
    assert "`sites`" in walked.page("choosing.md")
    seam = "| `sites` | Gradients that toytrain averages over its ranks"
    assert f"{seam} | `toytrain >= 1.0, < 2.0` |" in walked.page("support.md")
    assert "* **a job under DeepSpeed** (`sites`): " in walked.page("unsupported.md")
    row = "| `sites` | Averages of sites that meet every few steps | one direction |"
    assert row in walked.page("contributing/dimension.md")


@pytest.mark.nightly
def test_the_pages_have_the_codec(walked: Walked) -> None:
    assert "trim: bytes of a value that are sent, 2 (default) or 3." in walked.page("block.md")
    formats = walked.page("wire_formats.md")
    assert "| `trim` | the upper `keep` bytes (2 or 3) of every value" in formats
    places = [formats.index(f"| `{name}` |") for name in ("stepcode", "trim", "zfp")]
    assert places == sorted(places)


@pytest.mark.nightly
def test_the_pages_name_the_releases(walked: Walked) -> None:
    window, old = "deepspeed >= 0.19, < 0.21", "deepspeed >= 0.19, < 0.20"
    assert walked.page("support.md").count(f"`{window}`") >= 10
    assert f"needs {window}, found" in walked.page("errors.md")
    for page in ("../README.md", "getting_started.md", "engines/neox.md"):
        assert "DeepSpeed 0.19 to 0.20" in walked.page(page), page
    left = [path.name for path in walked.home.rglob("*.md") if old in path.read_text()]
    assert left == ["release.md"], "which shows the step"


@pytest.mark.nightly
def test_every_seam_accepts_the_release(walked: Walked) -> None:
    assert len(walked.versions) > 20 and set(walked.versions) == {"deepspeed 0.20.3"}


@pytest.mark.nightly
def test_a_release_is_added_to_the_record(walked: Walked) -> None:
    """All earlier records are kept, and differences are printed."""
    for name in RECORDS:
        before, after = (json.loads((root / name).read_text()) for root in (ROOT, walked.home))
        if name == RECORDS[0]:
            assert after["deepspeed"]["archives"].pop("0.20.0")["file"] == "deepspeed-0.20.0.tar.gz"
            for ways in after["deepspeed"]["symbols"].values():
                (bound,) = (bound for bound, having in ways.items() if "0.20.0" in having)
                ways[bound].remove("0.20.0")
                if not ways[bound]:
                    del ways[bound]
        assert after == before
    old = NEWER.replace("group", "process_group")
    assert walked.compared.startswith("deepspeed 0.20.0: added\n")
    assert f"  {RENAMED}: {old} -> {NEWER}, since 0.19.8\n" in walked.compared
