"""Broken blocks raise one line each that begins with the key, before any engine is built."""

from __future__ import annotations

from typing import Any

from fuzzing import blocks


def test_every_broken_block_is_one_line_that_names_the_key() -> None:
    tried: list[tuple[Any, str]] = blocks.broken()
    assert len(tried) >= 150
    wrong = [(block, key, blocks.problem_of(block, key)) for block, key in tried]
    assert [case for case in wrong if case[2]] == []


def test_a_right_block_has_no_error() -> None:
    assert blocks.problem_of({"preset": "recommended"}, "compression") == "no error"
