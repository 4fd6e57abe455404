"""Follow a page of ``docs/contributing/`` literally in a copy of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.paths import ROOT

PAGES = ROOT / "docs" / "contributing"
#: maximum number of files per page, generated pages aside
MOST = 5
#: files that pages may touch
READ = (".py", ".md", ".toml", ".json", ".h", ".cpp")
#: files that pages never need: sources of built kernels
UNNEEDED = shutil.ignore_patterns("__pycache__", "*.cu", "*.cpp", "*.pyc")


class Step(NamedTuple):
    """A code block of a page: its language, the file that its sentence names, and its text."""

    language: str
    file: str
    text: str


def steps(page: str) -> list[Step]:
    """Return every code block of a page, in order, except the list of files."""
    text = (PAGES / page).read_text()
    fence = re.compile(r"^( *)```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
    found = []
    for match in fence.finditer(text):
        indent, language, body = match.groups()
        before = text[: match.start()].rpartition("\n\n")[0].rpartition("\n\n")[2]
        named = re.findall(r"\*\*`([\w./-]+)`\*\*", before)
        if language != "text":
            file = named[-1] if named else ""
            found.append(Step(language, file, textwrap.dedent(body) if indent else body))
    return found


def files(page: str) -> list[str]:
    """Return the paths below ``## Files``, which the page touches."""
    text = (PAGES / page).read_text().partition("\n## Files\n")[2]
    fence = re.search(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert fence is not None, f"{page}: expected a list of paths below ## Files"
    return [line.split()[0] for line in fence[1].splitlines()]


def put(diff: str, file: Path) -> None:
    """Apply a diff hunk: context, removed and added lines."""
    lines = diff.splitlines()
    old = "\n".join(line[1:] for line in lines if line[0] in " -")
    new = "\n".join(line[1:] for line in lines if line[0] in " +")
    text = file.read_text()
    assert text.count(old) == 1, f"{file}: {old}"
    file.write_text(text.replace(old, new))


class Copy:
    """A copy of some folders and files of the repository, which tracks changes."""

    def __init__(self, home: Path, *parts: str) -> None:
        self.home = home
        for part in ("hybridcomp", "patches", *parts):
            there = ROOT / part
            (home / part).parent.mkdir(parents=True, exist_ok=True)
            if there.is_dir():
                shutil.copytree(there, home / part, symlinks=True, ignore=UNNEEDED)
            else:
                shutil.copyfile(there, home / part)
        self._before = dict(self._contents())

    def _contents(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for path in self.home.rglob("*"):
            if path.suffix in READ and path.is_file():
                found = path.stat()
                yield str(path.relative_to(self.home)), (found.st_mtime_ns, found.st_size)

    def changed(self) -> set[str]:
        """Return the paths of new or rewritten files, not following links."""
        now = {name for name, found in self._contents() if self._before.get(name) != found}
        links = ("hybridcomp/patches/", "hybridcomp/configs/")
        return {name for name in now if not name.startswith(links)}

    def run(self, command: str) -> str:
        """Run a line of the page in its stated folder; return the output."""
        environment = {**os.environ, "PYTHONPATH": str(self.home), "OMP_NUM_THREADS": "1"}
        environment |= {
            "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu", "PYTHONDONTWRITEBYTECODE": "1",
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        }  # fmt: skip
        done = subprocess.run(
            command, shell=True, cwd=self.home, env=environment, capture_output=True, text=True,
            timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def distribution(home: Path, name: str, version: str) -> None:
    """Write the metadata that ``pip install`` leaves of a package."""
    info = home / f"{name}-{version}.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(text)
