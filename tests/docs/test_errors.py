"""The page of error messages shows what the program says."""

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
#: words of each stretch of a text without a gap
PARTS = [found for text in texts() for part in text.split(GAP) if (found := words(part))]
FIRST, LAST = {part[0] for part in PARTS}, {part[-1] for part in PARTS}
EVERY = {word for part in PARTS for word in part}


def meets(left: str, right: str) -> bool:
    """Whether the two words may stand side by side where two parts, or a part and a value, meet."""
    return (left in LAST or left not in EVERY) and (right in FIRST or right not in EVERY)


@pytest.mark.parametrize("message", list(messages()))
def test_a_message_of_the_page_is_one_of_the_program(message: str) -> None:
    said = pairs(message)
    foreign = [pair for pair in said if pair not in KNOWN]
    assert len(foreign) <= (1 - OURS) * len(said), foreign
    assert [pair for pair in foreign if not meets(*pair)] == []


def test_a_wrong_word_is_found() -> None:
    """Three of four words that are replaced by another of the program's; without ``meets`` one."""
    draw, every = random.Random(1), sorted(EVERY)
    found = count = 0
    for message in messages():
        for place in range(len(words(message))):
            changed = words(message)
            changed[place] = draw.choice(every)
            said = [pair for pair in zip(changed, changed[1:], strict=False) if pair not in KNOWN]
            found += not all(meets(*pair) for pair in said)
            count += 1
    assert found > 0.6 * count > 100, (found, count)


def test_the_example_is_what_validate_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shown,) = re.findall(r"^```\n(hybridcomp: .*)\n```$", PAGE, re.MULTILINE)
    file = tmp_path / "ds_config.json"
    file.write_text('{"compression": {"dp": {"codec": "blockint", "bits": 9}}}')
    assert cli.main(["validate", str(file)]) == cli.BAD_INPUT
    assert capsys.readouterr().err == f"{shown}\n"
