"""Accepted releases of torch: too old, tested, newer unchanged, newer changed."""

from __future__ import annotations

import re
from contextlib import ExitStack

import pytest
import torch
from packaging.version import Version
from torch import nn

from hybridcomp import log
from hybridcomp.errors import SeamError
from hybridcomp.patches.torch import attach, steps, torch_versions
from hybridcomp.seams.patching import Patch
from hybridcomp.session import process

OLDEST = {torch_versions.DDP: "2.6", torch_versions.FSDP2: "2.9", torch_versions.RING: "2.13"}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Simulate a process without messages yet, whose torch has the version ``pretend``."""
    monkeypatch.setattr(torch_versions, "say_once", log.Once())
    return monkeypatch


def pretend(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch_versions, "version", lambda name: version)


def settle(monkeypatch: pytest.MonkeyPatch, requirement: str, changed: str = "") -> None:
    """Make this process's torch count as the tested one, except for the symbol ``changed``."""
    known = {
        symbol: "other" if symbol.endswith(f":{changed}") else torch_versions.digest(symbol)
        for symbol in torch_versions.SOURCES[requirement]
    }
    monkeypatch.setitem(torch_versions.SOURCES, requirement, known)


@pytest.mark.parametrize("requirement", OLDEST)
def test_an_older_one_is_told_what_to_install(found: pytest.MonkeyPatch, requirement: str) -> None:
    pretend(found, "2.5.1")
    with pytest.raises(SeamError) as caught:
        torch_versions.check("engine", requirement)
    expected = f"engine: needs {requirement}, found torch 2.5.1; install torch "
    assert str(caught.value) == f"{expected}{OLDEST[requirement]} to {torch_versions.NEWEST}"


@pytest.mark.parametrize(
    "version", ["2.13.0+cpu", "2.14.0", "2.14.1+cu130", f"{torch_versions.NEWEST}.3"]
)
@pytest.mark.parametrize("requirement", OLDEST)
def test_one_that_was_tested_is_taken_without_a_word(
    found: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: str, requirement: str
) -> None:
    pretend(found, version)
    assert torch_versions.check("engine", requirement) == f"torch {version}"
    assert not capsys.readouterr().out


@pytest.mark.parametrize("version", ["2.99.0", "3.0.0.dev20270101"])
def test_a_newer_one_with_the_same_functions_is_taken_and_said_once(
    found: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], version: str
) -> None:
    pretend(found, version)
    settle(found, torch_versions.DDP)
    for _ in range(2):
        assert torch_versions.check("ddp", torch_versions.DDP) == f"torch {version}"
    (line,) = capsys.readouterr().out.splitlines()
    assert f"torch {version} is newer than {torch_versions.NEWEST}" in line and "unchanged" in line


def test_a_newer_one_with_other_functions_is_refused(found: pytest.MonkeyPatch) -> None:
    pretend(found, "2.99.0")
    settle(found, torch_versions.DDP, "GradScaler.update")
    for check in (lambda: torch_versions.check("GradScaler", torch_versions.DDP), Patch(
        steps.UPDATE, steps.make_update).apply):  # fmt: skip
        with pytest.raises(SeamError) as caught:
            check()
        said = str(caught.value)
        assert said.startswith("GradScaler: torch 2.99.0 is newer") and "\n" not in said
        assert "GradScaler.update changed since; install torch 2.6 to" in said


def test_a_model_under_another_torch_is_an_error_at_start(found: pytest.MonkeyPatch) -> None:
    pretend(found, "2.8.0+cu128")
    with pytest.raises(SeamError, match=r"fsdp2: needs torch >= 2\.9, found torch 2\.8\.0\+cu128"):
        attach._attach_sharded(nn.Linear(1, 1), {"dp": {"codec": "blockint"}}, ExitStack())


def test_without_a_block_another_torch_is_none(found: pytest.MonkeyPatch) -> None:
    pretend(found, "2.8.0")
    found.delenv(process.ENVIRONMENT, raising=False)
    process.configure(None)
    assert attach._attach_sharded(nn.Linear(1, 1), None, ExitStack()) is None


def test_comments_docstrings_and_layout_are_no_change(tmp_path: object) -> None:
    one = 'def f(a):\n    """Says."""\n    return {"a": "#b"}  # why\n'
    other = 'def f(a):\n    """Says more.\n\n    Much.\n    """\n    return {\n    "a": "#b"}\n'
    lines = ["".join("".join(torch_versions._code_lines(text)).split()) for text in (one, other)]
    assert lines[0] == lines[1] == 'deff(a):return{"a":"#b"}'


def test_digests_are_those_of_the_newest_torch() -> None:
    """Exact if this is the newest tested torch; otherwise each has an entry."""
    is_newest = ".".join(torch.__version__.split(".")[:2]) == torch_versions.NEWEST
    for table in torch_versions.SOURCES.values():
        for symbol, known in table.items():
            assert re.fullmatch("[0-9a-f]{16}", known), symbol
            if is_newest:
                assert torch_versions.digest(symbol) == known, (
                    f"{symbol}: {torch_versions.digest(symbol)}"
                )
    assert torch_versions.digest("torch.nn.parallel.distributed:Nothing.here") == ""
    if Version(torch.__version__) >= Version("2.13"):
        assert not torch_versions.changed(torch_versions.DDP)  # unchanged from 2.13 to 2.15
