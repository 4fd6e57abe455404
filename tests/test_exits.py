"""A user's mistake ends every rank with one status, and is told once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridcomp import exits
from hybridcomp.errors import CodecError, ConfigError
from tests.ranks import python_path

EARLY = """
import hybridcomp
hybridcomp.install({"dq": "bf16"})
"""
LATE = """
import torch.distributed as dist
from hybridcomp.errors import AgreementError
dist.init_process_group("gloo")
raise AgreementError("compression block: rank(s) 1 differ from rank 0")
"""
ALONE = """
import os
from hybridcomp.errors import ConfigError
if os.environ["RANK"] == "2":
    raise ConfigError("compression.dp", 1, "only here")
"""
FOREIGN = "raise ValueError('of the script')"


def launch(folder: Path, script: str, **environment: str) -> tuple[list[int], list[str]]:
    """Statuses and stderr of three ranks under ``hybridcomp.run``, started without a launcher."""
    (folder / "script.py").write_text(script)
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    common = {**os.environ, **port, "WORLD_SIZE": "3", "PYTHONPATH": python_path(), **environment}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "hybridcomp.run", "script.py"],
            cwd=folder, stderr=subprocess.PIPE, text=True,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(3)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    return [rank.returncode for rank in ranks], said


@pytest.mark.parametrize(
    ("script", "message"),
    [(EARLY, 'hybridcomp: compression.dq: found "bf16"'), (LATE, "hybridcomp: compression block")],
    ids=["before the group", "in the group"],
)
def test_one_rank_tells_and_all_end_alike(tmp_path: Path, script: str, message: str) -> None:
    statuses, said = launch(tmp_path, script)
    assert statuses == [exits.BAD_INPUT] * 3
    lines = [line for text in said for line in text.splitlines() if "hybridcomp" in line]
    assert len(lines) == 1 and lines[0].startswith(message), said
    assert "Traceback" not in "".join(said)


def test_a_rank_that_is_alone_with_it_tells_and_names_itself(tmp_path: Path) -> None:
    statuses, said = launch(tmp_path, ALONE)
    assert statuses == [0, 0, exits.BAD_INPUT]
    assert said[2] == "hybridcomp: compression.dp: found 1; only here (told by rank 2)\n"


def test_errors_of_the_script_and_whoever_asks_get_a_traceback(tmp_path: Path) -> None:
    assert all("ValueError: of the script" in text for text in launch(tmp_path, FOREIGN)[1])
    statuses, said = launch(tmp_path, EARLY, HYBRIDCOMP_TRACEBACK="1")
    assert statuses == [1] * 3 and all("Traceback" in text for text in said)


def test_what_is_no_mistake_of_the_user_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(CodecError), exits.in_one_line():
        raise CodecError("damaged")
    with pytest.raises(SystemExit) as caught, exits.in_one_line():
        raise ConfigError("a", 1, "b")
    assert caught.value.code == exits.BAD_INPUT
