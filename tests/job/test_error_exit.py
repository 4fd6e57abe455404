"""A user's mistake ends every rank with the same status and one line, without a traceback."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hybridcomp.job import error_exit
from tests.ranks import run_ranks
from tests.scripts_on_ranks import free_port, run_each
from tests.selection import by_day

#: both ranks synchronize first: the reporting rank stays for a second only
MEET = """
import os, pathlib, time
import hybridcomp, hybridcomp.config
import hybridcomp.patches.registry, hybridcomp.session.process
pathlib.Path(os.environ["RANK"]).touch()
while not all(pathlib.Path(rank).exists() for rank in "01"):
    time.sleep(0.01)
"""
MISTAKE = MEET + "hybridcomp.install({'dq': 'bf16'})"
OWN = MEET + "hybridcomp.install({'dq': 'bf16'} if os.environ['RANK'] == '1' else {'dp': 'bf16'})"


LATE = """
import hybridcomp
import torch.distributed as dist
from hybridcomp.errors import AgreementError
from hybridcomp.job import error_exit
error_exit.LINGER_S = 60.0  # for slow machines: it ends once the other rank has asked
hybridcomp.install()
dist.init_process_group("gloo")
raise AgreementError("compression block: rank(s) 1 differ from rank 0")
"""


#: the same under ``hybridcomp.run``, whose script need not know of it
UNDER_RUN = """
import torch.distributed as dist
from hybridcomp.errors import AgreementError
from hybridcomp.job import error_exit
error_exit.LINGER_S = 60.0  # for slow machines: it ends once the other rank has asked
dist.init_process_group("gloo")
raise AgreementError("compression block: rank(s) 1 differ from rank 0")
"""


def ranks(code: str, folder: Path, **more: str) -> list[tuple[int, str]]:
    """Return exit status and stderr of two ranks that run ``code``, started by one launcher."""
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job = {"WORLD_SIZE": "2", **port, **more}
    (folder / "script.py").write_text(code)
    words = [*(["-m", "hybridcomp.run"] if code is UNDER_RUN else []), "script.py"]
    given = [{**os.environ, "RANK": rank, "LOCAL_RANK": rank, **job} for rank in "01"]
    return [(ended.returncode, ended.stderr) for ended in run_each([words] * 2, folder, *given)]


def test_a_mistake_is_one_line_on_one_rank(tmp_path: Path) -> None:
    (first, *texts), (second, *more) = ranks(MISTAKE, tmp_path)
    assert first == second == error_exit.BAD_INPUT
    (said,) = (text for text in (*texts, *more) if text)
    assert said.startswith("hybridcomp: compression.dq: ") and len(said.splitlines()) == 1


@pytest.mark.parametrize("code", by_day([LATE, UNDER_RUN], [UNDER_RUN]), ids=["install", "run"])
def test_in_a_process_group_it_is_told_once_as_well(tmp_path: Path, code: str) -> None:
    (first, *texts), (second, *more) = ranks(code, tmp_path)
    assert first == second == error_exit.BAD_INPUT
    (said,) = (text for text in (*texts, *more) if "hybridcomp: " in text)
    assert said.count("hybridcomp: compression block: rank(s) 1 differ") == 1
    assert "Traceback" not in said


def test_a_rank_with_a_mistake_of_its_own_says_so(tmp_path: Path) -> None:
    (first, silent), (second, said) = ranks(OWN, tmp_path)
    assert (first, silent, second) == (0, "", error_exit.BAD_INPUT)
    assert "compression.dq" in said and "rank 1" in said and "Traceback" not in said


def test_the_traceback_is_to_be_had(tmp_path: Path) -> None:
    for status, said in ranks(MISTAKE, tmp_path, HYBRIDCOMP_TRACEBACK="1"):
        assert status == 1 and "Traceback" in said


def test_other_errors_and_other_hooks_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: shown.append(kind))
    theirs = sys.excepthook
    error_exit.install()
    error_exit.install()
    sys.excepthook(ValueError, ValueError("theirs"), None)
    assert shown == [ValueError]
    error_exit.uninstall()
    assert sys.excepthook is theirs


def test_a_hook_in_front_of_ours_that_calls_it_is_called_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``install``, then ``init_process_group``, which installs such a hook, then ``attach``."""
    shown: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda *_: shown.append("python's"))
    first = sys.excepthook
    error_exit.install()
    ours = sys.excepthook

    def distributed(*error: Any) -> None:
        shown.append("torch's")
        ours(*error)

    sys.excepthook = distributed
    error_exit.install()
    assert sys.excepthook is ours
    for _ in range(2):
        sys.excepthook(ValueError, ValueError("theirs"), None)
        assert shown == ["torch's", "python's"]
        shown.clear()
    error_exit.uninstall()
    assert sys.excepthook is distributed
    distributed(ValueError, ValueError("theirs"), None)
    assert shown == ["torch's", "python's"]
    sys.excepthook = ours
    error_exit.uninstall()
    assert sys.excepthook is first


def met() -> tuple[timedelta, timedelta]:
    """Return the shared store's timeout before and after a rank reported its failure."""
    store: Any = dist.distributed_c10d._get_default_store()
    before = store.timeout
    meeting = error_exit._InStore(dist, "name")
    meeting.tell()
    assert meeting.first and meeting.is_told()
    return before, store.timeout


def test_a_meeting_leaves_the_time_out_of_the_store_alone() -> None:
    ((before, after),) = run_ranks(1, met)
    assert before == after > timedelta(seconds=error_exit.LINGER_S)


def test_a_line_that_the_first_rank_did_not_print_is_printed_by_another(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first may be killed before."""
    meeting = error_exit._Alone()
    monkeypatch.setattr(meeting, "first", False)
    monkeypatch.setattr(error_exit, "_meeting", lambda text: meeting)
    monkeypatch.setenv("RANK", "1")
    error_exit.tell("it is wrong")
    assert capfd.readouterr().err == "it is wrong (told by rank 1)\n"
    monkeypatch.setattr(meeting, "is_told", lambda: True)
    error_exit.tell("it is wrong")
    assert capfd.readouterr().err == ""
