"""Texts from other people's files stay data in every file written from them."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hybridcomp import escaping

#: texts that act if a writer forgets to quote them; CANARY is replaced by a path
HOSTILE = (
    "x\ntouch CANARY\n",
    "x\r\ntouch CANARY",
    "x\vtouch CANARY\f\x85\u2028touch CANARY",
    "$(touch CANARY)",
    "`touch CANARY`",
    "'; touch CANARY; '",
    '"; touch CANARY; "',
    "x && touch CANARY #",
    "${IFS}touch${IFS}CANARY",
    "-o\n--exec=touch CANARY",
    '": 1, "preset": "none", "x": "',
    "x: !!python/object/apply:os.system ['touch CANARY']",
    "# no comment\n- 1",
    "| a | b |\n|---|---|\n<script>alert(1)</script> [x](javascript:alert(1)) ![i](http://h/i)",
    "```\n# title\n```",
    r"$\frac{1}{$ and $\nonsense$ and \$5",
    "_hidden",
    "\x1b]0;title\x07\x1b[2J\x1b[31m",
    "\u202egnp.exe\u2066",
    "\ud800 alone",
    "\x00 and \x7f and \ufeff",
    "\U0001f600 emoji \u4e2d\u6587",
    "{tensor} {config} {folder} {port}",
    "../../etc/passwd",
    "~ null Yes 1e-05 0x10 1_000 2020-01-01 .inf <<",
    "x" * 5000,
    "",
)


def armed(canary: Path) -> list[str]:
    return [text.replace("CANARY", str(canary)) for text in HOSTILE]


@pytest.mark.parametrize("text", HOSTILE)
def test_one_line_is_one_and_nothing_in_it_acts(text: str) -> None:
    shown = escaping.one_line(text)
    assert shown.isprintable() and len(shown) <= escaping.MOST + 3
    shown.encode("utf-8")
    assert escaping.one_line(shown) == shown or len(shown) > escaping.MOST


@pytest.mark.parametrize("text", HOSTILE)
def test_a_path_is_shown_as_the_one_it_is(text: str) -> None:
    shown = escaping.quoted_path(text)
    assert shown.isprintable() and (shown == text or ast.literal_eval(shown) == text)


def test_a_path_that_looks_like_another_is_quoted() -> None:
    for text in ("/a  b", "/a'b", "a/\u00e9\U0001f600", "x" * 3000):
        assert escaping.quoted_path(Path(text)) == text
    assert escaping.quoted_path("/a\u00a0b") == r"'/a\xa0b'"
    assert escaping.quoted_path("/a ") == "'/a '"


def test_printable_keeps_lines_and_shows_the_rest() -> None:
    assert escaping.printable("a\n\x1b[2J\u202e\ud800é") == "a\n\\x1b[2J\\u202e\\ud800é"


def test_a_comment_and_a_word_of_a_shell_run_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for number, text in enumerate(armed(canary)):
        if "\x00" in text or "\ud800" in text:
            continue  # a process argument cannot hold them
        script = tmp_path / f"{number}.sh"
        words = escaping.shell_words(["printf", "%s", text])
        lines = f"#!/bin/sh\n# {escaping.one_line(text)}\nexec {words}\n"
        script.write_text(lines, encoding="utf-8", newline="")
        for shell in ("sh", "bash"):
            subprocess.run([shell, "-n", script], check=True)
            done = subprocess.run([shell, script], capture_output=True, check=True)
            assert done.stdout.decode() == text
    assert not canary.exists()


VALUES: dict[str, Any] = {
    "texts": list(HOSTILE), **{f"{number}{text[:99]}": text for number, text in enumerate(HOSTILE)},
    "numbers": [1e-05, 1e300, 5e-324, 1.0, -0.1, 3, 10**40, 1e16], "switches": [True, False, None],
    "empty": [{}, []], "yes": "yes", "null": "null", "1e-05": "1e-05", "0o7": "0o7",
    "inside": {"a": {"b": [{"c": "d"}]}},
}  # fmt: skip


def test_yaml_and_json_are_read_back_as_they_were() -> None:
    yaml = pytest.importorskip("yaml")
    written = escaping.yaml_document(VALUES)
    assert yaml.safe_load(written) == VALUES
    assert json.loads(written) == VALUES, "GPT-NeoX's files are read as JSON elsewhere"
    assert json.loads(escaping.json_document(VALUES)) == VALUES
    odd = {1: float("inf"), None: [float("-inf")], 2.5: 2}
    assert yaml.safe_load(escaping.yaml_document(odd)) == odd
    dates = yaml.safe_load("a: 2020-01-02\nb: 2020-01-02 03:04:05\n")
    assert yaml.safe_load(escaping.yaml_document(dates)) == dates


def test_figures_are_read_by_strict_parsers() -> None:
    inside = {"a": [float("inf"), (float("-inf"), 1.5)], "b": {"c": float("nan")}, 3: None}
    found = json.loads(escaping.strict_json(inside), parse_constant=pytest.fail)
    assert found == {"a": ["Infinity", ["-Infinity", 1.5]], "b": {"c": "NaN"}, "3": None}


def test_what_is_no_setting_is_told() -> None:
    inside: dict[str, Any] = {}
    inside["itself"] = inside
    for bad in ({"a": {1, 2}}, {"a": b"x"}, {(1, 2): 3}, inside, {"x" * 2000: 1}):
        with pytest.raises(ValueError, match=r"a (value|key) of |themselves"):
            escaping.yaml_document(bad)
    with pytest.raises(ValueError, match="set"):
        escaping.json_document({"a": {1}})


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_holds_no_mark_of_a_text(text: str) -> None:
    shown = escaping.markdown(text)
    assert "\n" not in shown and "<" not in shown
    bare = shown.replace("\\\\", "")
    for mark in "`|*[":
        assert bare.count(mark) == bare.count(f"\\{mark}")


@pytest.mark.parametrize("text", HOSTILE)
def test_a_fence_is_longer_than_any_inside(text: str) -> None:
    first, inside, last = escaping.fenced(text)
    assert first == last and first not in inside and set(first) == {"`"}


def test_a_label_of_a_picture_is_no_formula() -> None:
    label = pytest.importorskip("matplotlib.text").Text()
    for text in HOSTILE:
        assert label._preprocess_math(escaping.picture(text))[1] is False
    assert not escaping.picture("_x").startswith("_")


def test_damaged_texts_are_one_line() -> None:
    pytest.importorskip("yaml")
    for read in (escaping.parsed_json, escaping.parsed_yaml):
        for text in ("[" * 5000, "{" * 5000, '{"a": ', "[1, 2\n\n"):
            with pytest.raises(ValueError) as caught:
                read(text)
            assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="digits"):
        escaping.parsed_json("1" * 5000)
    with pytest.raises(ValueError, match="month"):
        escaping.parsed_yaml("a: 2020-99-01")
