"""Tests that run by day, nightly and with ``--quick``; the nightly workflow runs all."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests import selection
from tests.paths import ROOT


@dataclass
class Config:
    """Minimal pytest config for the selection; records deselected tests."""

    nightly: bool = False
    quick: bool = False
    markexpr: str = ""
    args: tuple[str, ...] = ("tests",)
    left_out: list[Any] = field(default_factory=list)

    def getoption(self, name: str, _default: Any = None) -> Any:
        return getattr(self, name.lstrip("-"))

    @property
    def hook(self) -> SimpleNamespace:
        return SimpleNamespace(pytest_deselected=lambda items: self.left_out.extend(items))


def selected(config: Config) -> list[str]:
    """Return the names selected from one test of each kind, in a checkout named like marks."""
    marks: dict[str, tuple[str, ...]] = {"plain": (), "night": ("nightly",), "slow": ("slow",)}
    items = [
        SimpleNamespace(
            name=name, keywords={"nightly", "slow"},
            iter_markers=partial(map, lambda mark: SimpleNamespace(name=mark), found),
        )
        for name, found in marks.items()
    ]  # fmt: skip
    whole = len(items)
    selection.select(cast(Any, config), cast(Any, items))
    assert len(items) + len(config.left_out) == whole
    return [item.name for item in items]


def test_by_day_and_by_night(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(selection.VARIABLE, raising=False)
    everything = ["plain", "night", "slow"]
    assert selected(Config()) == ["plain", "slow"]
    assert selected(Config(quick=True)) == ["plain"]
    assert selected(Config(nightly=True)) == everything
    assert selected(Config(markexpr="nightly and gpu")) == everything  # pytest has selected already
    assert selected(Config(args=("tests/test_x.py::test_y",))) == everything  # named explicitly
    monkeypatch.setenv(selection.VARIABLE, "1")
    assert selected(Config()) == everything
    assert selected(Config(quick=True)) == ["plain"]


def test_cases_of_the_day() -> None:
    one, two, three = selection.by_day("abc", "b")
    assert two == "b"
    assert [param.values for param in (one, three)] == [("a",), ("c",)]
    assert all(mark.name == "nightly" for param in (one, three) for mark in param.marks)
    with pytest.raises(AssertionError, match="not all in"):
        selection.by_day("abc", "d")


def test_quick_names_what_is_there() -> None:
    for name in selection.QUICK:
        assert (ROOT / "tests" / name).exists(), name
    assert selection.is_quick(ROOT / "tests") and selection.is_quick(ROOT / "tests/test_layout.py")
    assert selection.is_quick(ROOT / "tests/config/test_config.py")
    assert not selection.is_quick(ROOT / "tests/training/test_launch.py")


def test_everything_runs_at_night() -> None:
    assert "run: scripts/test --nightly\n" in (ROOT / ".github/workflows/nightly.yml").read_text()
