"""``docs/contributing/release.md``, followed literally: the window of an upstream moves once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contributing.walk import MOST, Copy, distribution, files, put, steps

#: prints what every seam says of the installed DeepSpeed
ASK = """
import json
from hybridcomp.patches.registry import patches_of
print(json.dumps([patch.seam.found_version() for patch in patches_of("deepspeed")]))
"""


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Copy, set[str]]:
    """The copy in which the window was moved, and the files that this took."""
    pytest.importorskip("deepspeed")
    parts = ("docs", "scripts", "README.md", "pyproject.toml")
    copy = Copy(tmp_path_factory.mktemp("repository"), *parts)
    for step in steps("release.md"):
        if step.language == "diff":
            put(step.text, copy.home / step.file)
        else:
            copy.run(step.text)
    return copy, copy.changed()


def test_it_takes_few_files(walked: tuple[Copy, set[str]]) -> None:
    made = {name for name in walked[1] if name.endswith(".md")}
    named = files("release.md")
    assert walked[1] - made == {"patches/ds/requirement.py", "pyproject.toml"}
    assert walked[1] - made < set(named) and len(named) <= MOST


def test_the_pages_name_the_releases(walked: tuple[Copy, set[str]]) -> None:
    home = walked[0].home
    window = "`deepspeed >= 0.19, < 0.21`"
    rows = [row for row in (home / "docs/support.md").read_text().splitlines() if window in row]
    assert len(rows) >= 10
    for page in ("README.md", "docs/getting_started.md", "docs/engines/neox.md"):
        assert "DeepSpeed 0.19 to 0.20" in (home / page).read_text(), page
    assert "needs deepspeed >= 0.19, < 0.21, found" in (home / "docs/errors.md").read_text()
    old = "deepspeed >= 0.19, < 0.20"
    left = [path.name for path in home.rglob("*.md") if old in path.read_text()]
    assert left == ["release.md"], "which shows the step"


def test_every_seam_accepts_the_release(walked: tuple[Copy, set[str]]) -> None:
    home: Path = walked[0].home
    distribution(home, "deepspeed", "0.20.3")
    (home / "ask.py").write_text(ASK)
    found = json.loads(walked[0].run("python ask.py").splitlines()[-1])
    assert len(found) > 20 and set(found) == {"deepspeed 0.20.3"}
