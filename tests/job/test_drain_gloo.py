"""A gloo thread that finishes its last message late does not crash the process at exit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hybridcomp.job import drain_gloo
from tests.paths import ROOT

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into /proc")

#: two ranks in a process; at the script's end rank 0's thread still works after its message, and
#: needs Python's lock once more
LATE = """
import threading, zlib
import torch, torch.distributed as dist
import hybridcomp.session.process

data = bytes(16 << 20)
store = dist.HashStore()
groups = [None, None]

def join(rank):
    groups[rank] = dist.ProcessGroupGloo(store, rank, 2)

def late(future):
    for _ in range(100):
        zlib.crc32(data)  # without the lock, and with it again
    print("let go", flush=True)

threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
groups[0].allreduce([torch.ones(4)]).get_future().then(late)
groups[1].allreduce([torch.ones(4)]).wait()
print("over", flush=True)
"""


def test_an_interpreter_ends_after_the_threads_of_its_messages() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LATE],
        cwd=ROOT, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout.split("\n")) == (0, ["over", "let go", ""]), ended.stderr


def fake(folder: Path, *threads: tuple[str, str]) -> Path:
    for number, (name, state) in enumerate(threads, 100):
        (folder / str(number)).mkdir(exist_ok=True)
        (folder / str(number) / "stat").write_text(f"{number} ({name}) {state} 1 1")
    return folder


def test_threads_of_others_and_sleeping_ones_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_gloo, "_TASKS", tmp_path / "none")
    assert drain_gloo.let_go(0.0)  # not Linux
    monkeypatch.setattr(drain_gloo, "_TASKS", fake(tmp_path, ("python (x)", "R")))
    assert drain_gloo.let_go(0.0)
    fake(tmp_path, ("python (x)", "R"), (drain_gloo.CARRIER, "S"))
    assert drain_gloo.let_go(0.0)


def test_a_thread_that_never_sleeps_is_waited_for_until_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_gloo, "_TASKS", fake(tmp_path, (drain_gloo.CARRIER, "R")))
    assert not drain_gloo.let_go(0.0)
    waits = threading.Thread(target=drain_gloo.let_go)
    waits.start()
    fake(tmp_path, (drain_gloo.CARRIER, "S"))
    waits.join()
