"""``docs/contributing/dimension.md``, followed literally: a row and a seam are a dimension."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contributing.walk import MOST, Copy, distribution, files, put, steps
from tests.scripts_on_ranks import run_script

#: what the page takes from the page on seams: the upstream whose function is replaced
TOYTRAIN = next(step.text for step in steps("seam.md") if "def average" in step.text)


@dataclass(frozen=True)
class Walked:
    """The copy after the page was followed: its folder, its touched files, what ranks printed."""

    home: Path
    touched: set[str]
    printed: str


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Walked:
    pytest.importorskip("deepspeed")
    copy = Copy(tmp_path_factory.mktemp("repository"), "docs", "scripts", "README.md")
    for step in steps("dimension.md"):
        if step.language == "diff":
            put(step.text, copy.home / step.file)
        elif step.language == "python":
            (copy.home / "try_dimension.py").write_text(step.text)
        elif "torch.distributed.run" not in step.text:
            copy.run(step.text)
    touched = copy.changed() - {"try_dimension.py"}
    distribution(copy.home, "toytrain", "1.3")
    (copy.home / "toytrain").mkdir()
    (copy.home / "toytrain" / "__init__.py").touch()
    (copy.home / "toytrain" / "gradients.py").write_text(TOYTRAIN)
    shutil.rmtree(copy.home / "scripts")  # its modules have names that others have
    ended = run_script(copy.home, "try_dimension.py")
    assert ended.returncode == 0, ended.output
    return Walked(copy.home, touched, ended.output)


def test_it_takes_few_files(walked: Walked) -> None:
    named = files("dimension.md")
    by_hand = {name for name in walked.touched if not name.startswith("docs/")}
    assert by_hand == {name for name in named if name.startswith(("hybridcomp/", "patches/"))}
    assert len(named) <= MOST


def test_its_messages_are_encoded_and_counted(walked: Walked) -> None:
    errors = [float(value) for value in re.findall(r"largest error ([\d.e-]+)", walked.printed)]
    assert len(errors) == 2 and errors[0] == errors[1] and 0 < errors[0] < 0.02
    assert re.search(r"\[hybridcomp\] step 1: sync blockint\(bits=8\) 3\.\d+x", walked.printed)


def test_the_pages_have_it(walked: Walked) -> None:
    docs = walked.home / "docs"
    block = (docs / "block.md").read_text()
    section = block.partition("\n## sync\n")[2].partition("\n## ")[0]
    assert "Averages of islands that meet every few steps. Default: native." in section
    assert "| `guard` | [see below](#guard) |" in section and "`error_feedback`" not in section
    assert "`sync`" in (docs / "presets.md").read_text()
    seam = "| `sync` | Gradients that toytrain averages over its ranks | `toytrain >= 1.0, < 2.0` |"
    assert seam in (docs / "support.md").read_text()
    assert "| a job under DeepSpeed | `sync` |" in (docs / "unsupported.md").read_text()
    table = (docs / "contributing" / "dimension.md").read_text()
    assert "| `sync` | Averages of islands that meet every few steps | one direction |" in table
