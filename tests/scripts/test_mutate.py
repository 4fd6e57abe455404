"""Mutations: the generated ones, the tests that judge them, and the report."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

import mutate
from tests.paths import ROOT

SOURCE = '''
"""Names that are 1."""
from typing import Literal
LIMIT: Literal[4] = 3


def clamped(größe: int, low: int = 0) -> int | None:
    """Return 7."""
    print(f"{größe + 1}")
    if größe < low and not LIMIT == 3:
        raise ValueError(1 + 1)
    return max(größe, low) if low else größe - 2
'''


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a checkout of one module, whose test covers one of its two functions."""
    files = {
        "hybridcomp/room/sizes.py": "def larger(a, b):\n    return a > b\n\n\n"
        "def two():\n    return 2\n",
        "tests/room/test_others.py": "def test_nothing():\n    pass\n",
        "tests/room/test_sizes.py": "from hybridcomp.room import sizes\n\n\n"
        "def test_larger():\n    assert not sizes.larger(1, 1)\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    return tmp_path


def test_every_kind_of_mutation(tmp_path: Path) -> None:
    """Excludes types, texts and raised errors; offsets count bytes."""
    (tmp_path / "module.py").write_text(SOURCE)
    found = mutate.mutations_of(Path("module.py"), tmp_path)
    assert [(m.before, m.after) for m in found] == [
        ("3", "(3 + 1)"),
        ("0", "(0 + 1)"),
        ('print(f"{größe + 1}")', "pass"),
        ("größe < low and not LIMIT == 3", "(größe < low or not LIMIT == 3)"),
        ("größe < low", "(größe <= low)"),
        ("not LIMIT == 3", "(not not LIMIT == 3)"),
        ("LIMIT == 3", "(LIMIT != 3)"),
        ("3", "(3 + 1)"),
        ("max(größe, low) if low else größe - 2", "(max(größe, low) if not low else größe - 2)"),
        ("max", "min"),
        ("größe - 2", "(größe + 2)"),
        ("2", "(2 + 1)"),
    ]
    for mutation in found:
        ast.parse(mutation.apply(SOURCE.encode()))
    assert mutate.drawn([Path("module.py")], 5, 1, tmp_path) != mutate.drawn(
        [Path("module.py")], 5, 2, tmp_path
    )


def test_its_own_test_comes_first(root: Path) -> None:
    found = mutate.tests_of(Path("hybridcomp/room/sizes.py"), root)
    assert [file.name for file in found] == ["test_sizes.py", "test_others.py"]
    assert mutate.tests_of(Path("patches/ds/zero/zero3.py"), ROOT)[0].parts[-3:-1] == (
        "patches",
        "ds",
    )


@pytest.mark.nightly
def test_survivors_are_named_and_counted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = mutate.modules_in([root / "hybridcomp"])
    before = (root / source).read_text()
    assert mutate.main([str(root / "hybridcomp"), "--least", "0.6"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "survived hybridcomp/room/sizes.py:6: 2 -> (2 + 1)",
        "killed   hybridcomp/room/sizes.py:2: a > b -> (a >= b)",
        "1 of 2 killed, 0 reached the limit",
    ]
    assert (root / source).read_text() == before


@pytest.mark.nightly
def test_a_test_that_fails_anyway_kills_nothing(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "tests/room/test_others.py").write_text("def test_nothing():\n    assert False\n")
    assert mutate.main([str(root / "hybridcomp"), "--count", "1"]) == 2
    assert "fails without a mutation: tests/room/test_others.py" in capsys.readouterr().out
