"""Links, anchors, pictures and paths in the documents resolve."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import (
    DOCS,
    PAGES,
    anchors,
    commands,
    in_a_named_commit,
    links,
    prose_of,
    text_of,
)
from tests.paths import ROOT, SCRIPTS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors(page: Path) -> None:
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{path} is not there"
        assert target.is_relative_to(ROOT), f"{path} leads out of the repository"
        on_site = not page.is_relative_to(DOCS) or target.is_relative_to(DOCS)
        assert on_site, f"{path} is dead on the site, which has docs/ alone; write it in backquotes"
        if anchor:
            assert anchor in anchors(target), f"{path}#{anchor}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_words_exist(page: Path) -> None:
    rooms = "scripts|configs|tests|patches|docs|hybridcomp"
    for path in re.findall(rf"`((?:{rooms})/[\w./-]+)`", prose_of(page)):
        assert (ROOT / path).exists() or in_a_named_commit(page, path), path
    for name in re.findall(r"`((?:bench|train)_\w+\.py)`", prose_of(page)):
        if not name.startswith(("train_hf", "train_accelerate")):  # the reader's
            assert list(SCRIPTS.rglob(name)) or in_a_named_commit(page, name), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_that_pages_name_exist(page: Path) -> None:
    for name in set(re.findall(r"\bhybridcomp(?:\.[A-Za-z_]\w*)+", text_of(page))):
        if name == "hybridcomp.kernels._cpu.trim":  # the reader's
            continue
        folder, rest = ROOT, name.split(".")
        while rest and (folder / rest[0]).is_dir():
            folder /= rest.pop(0)
        if rest and (folder / f"{rest[0]}.py").exists():
            module = folder / f"{rest.pop(0)}.py"
        else:
            module = folder / "__init__.py"
        assert not rest or re.search(rf"\b{rest[0]}\b", text_of(module)), f"{name} is not there"


def test_paths_in_commands_exist() -> None:
    for fence, line in commands():
        for path in re.findall(r"(?:^|[\s=])((?:scripts|configs)/[\w./-]+)", line):
            known = (ROOT / path).exists() or "gpt-neox" in fence.body or "deepy.py" in line
            assert known or in_a_named_commit(fence.page, path), f"{fence.place}: {path}"


def test_every_page_of_the_site_is_in_its_navigation() -> None:
    listed = re.findall(r"([\w/]+\.md)", text_of(DOCS / "mkdocs" / "mkdocs.yml"))
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
