"""``docs/contributing/seam.md``, followed literally in a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

PAGE = ROOT / "docs" / "contributing" / "seam.md"
METADATA = "Metadata-Version: 2.1\nName: toytrain\nVersion: 1.3\n"


def code() -> Iterator[tuple[str, str]]:
    """Language and text of every block of code on the page, in order."""
    for indent, language, body in re.findall(
        r"^( *)```(\w+)\n(.*?)^ *```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    ):
        yield language, textwrap.dedent(body) if indent else body


def put(diff: str, file: Path) -> None:
    """Apply a diff of one line that stands before it and the lines that are new."""
    old = [line[1:] for line in diff.splitlines() if line.startswith(" ")]
    new = [line[1:] for line in diff.splitlines() if line[0] in " +"]
    text = file.read_text()
    assert text.count("\n".join(old)) == 1
    file.write_text(text.replace("\n".join(old), "\n".join(new)))


def run(command: str, home: Path) -> str:
    """Run a line of the page where the page says; returns what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(home), "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "PATH": f"{Path(sys.executable).parent}:/bin"}
    done = subprocess.run(
        command, shell=True, cwd=home, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What every command of the page printed, by its words."""
    home = tmp_path_factory.mktemp("repository")
    unneeded = shutil.ignore_patterns("__pycache__", "*.cu", "*.cpp", "*.pyc")
    shutil.copytree(ROOT / "hybridcomp", home / "hybridcomp", symlinks=True, ignore=unneeded)
    shutil.copytree(ROOT / "patches", home / "patches", ignore=unneeded)
    (home / "toytrain-1.3.dist-info").mkdir()
    (home / "toytrain-1.3.dist-info" / "METADATA").write_text(METADATA)
    (home / "toytrain").mkdir()
    (home / "toytrain" / "__init__.py").touch()
    found = {}
    for language, text in code():
        if language == "python":
            name = text.splitlines()[0].removeprefix("# ")
            (home / name).write_text(text)
        elif language == "diff":
            put(text, home / "patches" / "registry.py")
        else:
            assert language == "sh"
            found[text.strip()] = run(text, home)
    return found


def test_the_seam_is_in_the_support_matrix(printed: dict[str, str]) -> None:
    matrix = printed["python -m hybridcomp.commands.cli seams"]
    row = "| `dp` | Gradients that toytrain averages over its ranks | `toytrain >= 1.0, < 2.0` |"
    assert row in matrix.splitlines()


def test_the_seam_acts(printed: dict[str, str]) -> None:
    (said,) = (text for command, text in printed.items() if "try_seam.py" in command)
    errors = [float(value) for value in re.findall(r"largest error ([\d.e-]+)", said)]
    assert len(errors) == 2 and errors[0] == errors[1] and 0 < errors[0] < 0.02
    assert re.search(r"\[hybridcomp\] step 1: dp blockint\(bits=8\) 3\.\d+x", said)
