"""A user's mistake is one line on one rank, without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest

from hybridcomp import uncaught

MISTAKE = "import hybridcomp; hybridcomp.install({'dq': 'bf16'})"
OWN = (
    "import os, hybridcomp; from hybridcomp import uncaught; uncaught.WAIT_S = 0.2\n"
    "hybridcomp.install({'dq': 'bf16'} if os.environ['RANK'] == '1' else {'dp': 'bf16'})"
)


def ranks(code: str, **more: str) -> list[tuple[int, str]]:
    """Exit status and standard error of two ranks that run ``code``, started by one launcher."""
    job = {"WORLD_SIZE": "2", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": uuid.uuid4().hex, **more}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "RANK": rank, "LOCAL_RANK": rank, **job},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    return [(process.wait(), process.communicate()[1]) for process in started]


def test_a_mistake_is_one_line_on_one_rank() -> None:
    (first, said), (second, silent) = ranks(MISTAKE)
    assert first == second == 1
    assert said.startswith("[hybridcomp] ConfigError: compression.dq: ")
    assert len(said.splitlines()) == 1
    assert silent == ""


def test_a_rank_with_a_mistake_of_its_own_says_so() -> None:
    (first, silent), (second, said) = ranks(OWN)
    assert (first, silent, second) == (0, "", 1)
    assert "compression.dq" in said and "(rank 1)" in said and "Traceback" not in said


def test_the_traceback_is_to_be_had() -> None:
    for status, said in ranks(MISTAKE, HYBRIDCOMP_TRACEBACK="1"):
        assert status == 1 and "Traceback" in said


def test_other_errors_and_other_hooks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: shown.append(kind))
    theirs = sys.excepthook
    uncaught.install()
    uncaught.install()
    sys.excepthook(ValueError, ValueError("theirs"), None)
    assert shown == [ValueError]
    uncaught.uninstall()
    assert sys.excepthook is theirs
