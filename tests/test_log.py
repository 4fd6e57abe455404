"""Log lines for the user: one logger, rank 0, a prefix, once where requested."""

from __future__ import annotations

import logging

import pytest

from hybridcomp import log


@pytest.fixture(autouse=True)
def _rank_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")


def test_rank_0_says_it_behind_the_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    log.say("first", "100 % of it")
    assert capsys.readouterr() == ("[hybridcomp] first\n[hybridcomp] 100 % of it\n", "")


def test_other_ranks_are_silent_unless_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    log.say("nothing")
    log.say("something", anywhere=True)
    log.complain("trouble")
    assert capsys.readouterr() == ("[hybridcomp] something\n", "[hybridcomp] trouble\n")


def test_once_is_once_until_it_is_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    once = log.Once()
    once("a", "a", "b")
    once("b", "c")
    once.forget()
    once("a")
    assert capsys.readouterr().out.replace("[hybridcomp] ", "").split() == ["a", "b", "c", "a"]


def test_a_job_can_silence_it(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("hybridcomp")
    logger.setLevel(logging.WARNING)
    try:
        log.say("nothing")
    finally:
        logger.setLevel(logging.INFO)
    assert capsys.readouterr().out == ""
