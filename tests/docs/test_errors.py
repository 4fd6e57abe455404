"""The page of error messages quotes the program's messages."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridcomp.tools.commands import cli
from tests.docs.pages import DOCS, text_of
from tests.paths import ROOT

PAGE = text_of(DOCS / "errors.md")
#: share of a message's adjacent word pairs that must occur in the code; at the others a value is
#: filled in, or two parts of the message meet
OURS = 0.6
#: an f-string expression in a message
GAP = "\0"


def messages() -> Iterator[str]:
    """Return every message in the first column of the page's tables."""
    for row in re.findall(r"^\| (`.*?) \| ", PAGE, re.MULTILINE):
        yield from re.findall(r"`([^`]+)`", row)


def texts() -> Iterator[str]:
    """Return every string in the package's code, with a gap where a value is filled in."""
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
    """Return a message's words, without numbers, keys, and names of packages, codecs and dtypes."""
    kept = re.sub(r"[a-z]+(?:\.[a-z]+)+|\b\w+\([^)]+\)|\b[a-z]+\d+\b", " ", text.lower())
    found = re.findall(r"[a-z][a-z'-]+", kept.replace(GAP, " "))
    return [word for word in found if word not in ("deepspeed", "mpc")]


def pairs(text: str) -> list[tuple[str, str]]:
    """Return each word with its successor."""
    found = words(text)
    return list(zip(found, found[1:], strict=False))


class Known:
    """Words of the program's strings, read once and not while tests are collected."""

    def __init__(self) -> None:
        every = list(texts())
        self.pairs = {pair for text in every for pair in pairs(text)}
        # words of each gapless part of a string
        parts = [found for text in every for part in text.split(GAP) if (found := words(part))]
        self.first, self.last = {part[0] for part in parts}, {part[-1] for part in parts}
        self.words = {word for part in parts for word in part}

    def meet(self, left: str, right: str) -> bool:
        """Return whether two words may be adjacent where two parts, or a part and a value, meet."""
        ends, begins = left in self.last, right in self.first
        return (ends or left not in self.words) and (begins or right not in self.words)


@pytest.fixture(scope="module")
def known() -> Known:
    return Known()


@pytest.mark.parametrize("message", list(messages()))
def test_a_message_of_the_page_is_one_of_the_program(known: Known, message: str) -> None:
    said = pairs(message)
    foreign = [pair for pair in said if pair not in known.pairs]
    assert len(foreign) <= (1 - OURS) * len(said), foreign
    assert [pair for pair in foreign if not known.meet(*pair)] == []


def test_a_wrong_word_is_found(known: Known) -> None:
    """Replaces words by others of the program: most are detected, without ``meet`` all but one."""
    draw, every = random.Random(1), sorted(known.words)
    found = count = 0
    for message in messages():
        for place in 4 * list(range(len(words(message)))):
            changed = words(message)
            changed[place] = draw.choice(every)
            said = set(zip(changed, changed[1:], strict=False)) - known.pairs
            found += not all(known.meet(*pair) for pair in said)
            count += 1
    assert found > 0.55 * count > 100, (found, count)


def test_the_example_is_what_validate_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shown,) = re.findall(r"^```\n(hybridcomp: .*)\n```$", PAGE, re.MULTILINE)
    file = tmp_path / "ds_config.json"
    file.write_text('{"compression": {"dp": {"codec": "blockint", "bits": 9}}}')
    assert cli.main(["validate", str(file)]) == cli.BAD_INPUT
    assert capsys.readouterr().err == f"{shown}\n"
