"""bench_waits.py: what two islands wait for at a rendezvous, with and without a delay."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.paths import SCRIPTS
from tests.scripts_on_ranks import free_port


@pytest.mark.nightly
def test_two_islands_wait_less_with_a_delay_and_agree() -> None:
    command = [sys.executable, str(SCRIPTS / "bench" / "bench_waits.py"), "--mbytes", "1"]
    command += ["--every", "4", "--rounds", "1", "--step", "0.05", "--cases", "1:0", "2:2"]
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **names, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    told = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert told[0].count("the same bits on all") == 2 and "2 fragment(s), delay 2" in told[0]
