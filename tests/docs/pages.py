"""Read the documents: pages, fences, links and anchors."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.paths import ROOT

DOCS = ROOT / "docs"
#: hand-written pages, and pages with generated parts
PAGES = sorted(
    [
        *(path for path in DOCS.rglob("*.md")),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "configs/README.md")),
        ROOT / "tests" / "README.md",
    ]
)
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<kind>\w*)\n(?P<body>.*?)^ *```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Fence:
    """A fenced example of a page."""

    page: Path
    kind: str  # json, python, diff, ...; empty for commands and output
    body: str

    @property
    def place(self) -> str:
        """Return page and first line, for messages."""
        return f"{self.page.relative_to(ROOT)}: {self.body.strip().splitlines()[0]}"


def text_of(page: Path) -> str:
    """The page as it is."""
    return page.read_text(encoding="utf-8")


def prose_of(page: Path) -> str:
    """Return the page without its fences, where brackets are not links."""
    return _FENCE.sub("", text_of(page))


def fences(*kinds: str) -> Iterator[Fence]:
    """Return all fences of these kinds, in all pages, without the indentation of lists."""
    for page in PAGES:
        for match in _FENCE.finditer(text_of(page)):
            if match["kind"] in kinds:
                indent = len(match["indent"])
                lines = [line[indent:] for line in match["body"].splitlines()]
                yield Fence(page, match["kind"], "\n".join(lines) + "\n")


def commands() -> Iterator[tuple[Fence, str]]:
    """Return every shell line of a fence, with continued lines joined."""
    for fence in fences("", "bash", "diff"):
        joined = re.sub(r"\\\n\s*", " ", fence.body)
        for line in joined.splitlines():
            yield fence, line.removeprefix("+").strip()


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Return target and anchor (or "") of every link and picture into the repository."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield path, anchor


def anchors(page: Path) -> set[str]:
    """Return a page's heading anchors, as the site and GitHub create them."""
    headings = re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)
    return {slug(heading) for heading in headings}


def counted_bytes() -> list[dict[str, Any]]:
    """Return the rows of docs/results/bytes.csv: job, layout and arm, and the figures it has."""
    with (DOCS / "results/bytes.csv").open(encoding="utf-8", newline="") as lines:
        return [
            {key: text if key in ("job", "layout", "arm") else float(text)
             for key, text in row.items() if text}
            for row in csv.DictReader(lines)
        ]  # fmt: skip


def slug(heading: str) -> str:
    """Return Python-Markdown's slug of a heading."""
    plain = re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "]", heading)).strip().lower()
    return re.sub(r"[-\s]+", "-", plain)


@lru_cache
def _tree(commit: str) -> list[str] | None:
    """Return the paths of a commit's files; None if this checkout lacks the commit."""
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", commit],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return listed.stdout.splitlines() if listed.returncode == 0 else None


def in_a_named_commit(page: Path, path: str) -> bool:
    """Return whether a commit that ``page`` names has ``path``, or a file of that name.

    Also true if the checkout lacks the commit, as a shallow one does.
    """
    trees = [_tree(commit) for commit in re.findall(r"commit ([0-9a-f]{7,40})", text_of(page))]
    return any(
        tree is None or any(f"/{name}".endswith(f"/{path}") for name in tree) for tree in trees
    )


def texts_in_named_commits(page: Path, path: str) -> list[str | None]:
    """Return the file in each commit that ``page`` names; None if this checkout lacks it."""
    found: list[str | None] = []
    for commit in re.findall(r"commit ([0-9a-f]{7,40})", text_of(page)):
        shown = subprocess.run(
            ["git", "show", f"{commit}:{path}"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        found.append(shown.stdout if shown.returncode == 0 else None)
    return found
