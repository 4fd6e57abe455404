"""The page of error messages shows what the program says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridcomp.tools.commands import cli
from tests.docs.pages import DOCS, text_of
from tests.paths import ROOT

PAGE = text_of(DOCS / "errors.md")
#: share of a message's pairs of neighbouring words that stand so in the code; at the others a value
#: is filled in, or two parts of the message meet
OURS = 0.6
#: an expression in a message
GAP = "\0"


def messages() -> Iterator[str]:
    """Every message in the first column of the page's tables."""
    for row in re.findall(r"^\| (`.*?) \| ", PAGE, re.MULTILINE):
        yield from re.findall(r"`([^`]+)`", row)


def texts() -> Iterator[str]:
    """Every string in the package's code, with a gap where a value is filled in."""
    rooms = (ROOT / "hybridcomp", ROOT / "patches")
    for path in sorted(path for room in rooms for path in room.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(p.value) if isinstance(p, ast.Constant) else GAP for p in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def words(text: str) -> list[str]:
    """The words of a message, without numbers, keys, and names of packages, codecs and dtypes."""
    kept = re.sub(r"[a-z]+(?:\.[a-z]+)+|\b\w+\([^)]+\)|\b[a-z]+\d+\b", " ", text.lower())
    found = re.findall(r"[a-z][a-z'-]+", kept.replace(GAP, " "))
    return [word for word in found if word not in ("deepspeed", "mpc")]


def pairs(text: str) -> list[tuple[str, str]]:
    """Each word with the one behind it."""
    found = words(text)
    return list(zip(found, found[1:], strict=False))


KNOWN = {pair for text in texts() for pair in pairs(text)}


@pytest.mark.parametrize("message", list(messages()))
def test_a_message_of_the_page_is_one_of_the_program(message: str) -> None:
    said = pairs(message)
    foreign = [pair for pair in said if pair not in KNOWN]
    assert len(foreign) <= (1 - OURS) * len(said), foreign


def test_the_example_is_what_validate_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shown,) = re.findall(r"^```\n(hybridcomp: .*)\n```$", PAGE, re.MULTILINE)
    file = tmp_path / "ds_config.json"
    file.write_text('{"compression": {"dp": {"codec": "blockint", "bits": 9}}}')
    assert cli.main(["validate", str(file)]) == cli.BAD_INPUT
    assert capsys.readouterr().err == f"{shown}\n"
