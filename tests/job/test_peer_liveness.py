"""Missing ranks: ended or stopped processes, unresponsive ranks, last messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.collectives import topology
from hybridcomp.errors import CodecError, ConfigError, PeerError
from hybridcomp.job import peer_liveness, processes
from hybridcomp.job.agreement import start
from hybridcomp.job.processes import Peer
from tests.paths import ROOT
from tests.ranks import LIMIT_S, run_ranks

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
GLOO = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def peer_of(pid: int, rank: int = 1) -> Peer:
    stat = processes.stat(pid)
    assert stat is not None
    return Peer(rank, "host", processes.space(), pid, stat[1])


def until(process: subprocess.Popen[bytes], states: str) -> None:
    """Wait until the kernel has acted on a signal."""
    for _ in range(500):
        stat = processes.stat(process.pid)
        if stat is not None and stat[0] in states:
            return
        time.sleep(0.01)
    pytest.fail(f"process {process.pid} never was in one of {states}")


def test_states_of_a_process(child: subprocess.Popen[bytes]) -> None:
    peer = peer_of(child.pid)
    assert processes.state(peer) is None
    child.send_signal(signal.SIGSTOP)
    until(child, "T")
    assert processes.state(peer) == "is stopped (SIGSTOP, or a debugger)"
    child.send_signal(signal.SIGCONT)
    until(child, "SR")
    assert processes.state(peer) is None
    child.kill()
    until(child, "Z")
    assert processes.state(peer) == "has ended"  # before anyone has read its exit status
    child.wait()
    assert processes.state(peer) == "has ended"


def test_another_process_with_the_number_of_a_rank_is_not_that_rank() -> None:
    reused = replace(peer_of(os.getpid()), began="1")
    assert processes.state(reused) == "has ended"


def test_ended_ranks_belong_to_their_process_group(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, peer = object(), peer_of(child.pid)
    monkeypatch.setattr(processes.Known, "peers", (peer,))
    monkeypatch.setattr(processes.Known, "job", staticmethod(lambda: job))
    child.kill()
    child.wait()
    assert processes.gone([1], job) == [peer]
    assert not processes.gone([0], job) and not processes.gone([1], object())


def test_a_process_of_another_host_cannot_be_seen(child: subprocess.Popen[bytes]) -> None:
    far = replace(peer_of(child.pid), space="another boot")
    child.kill()
    child.wait()
    assert processes.state(far) is None


def test_a_lost_message_names_the_rank_that_ended(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes.Known, "peers", (peer_liveness._myself(), peer_of(child.pid)))
    monkeypatch.setattr(peer_liveness, "LOOK_S", 0.0)
    error = peer_liveness.lost(GLOO, "dp at step 12")
    assert isinstance(error, PeerError)
    assert "dp at step 12 failed: the processes of this host's ranks still run (" in str(error)
    with monkeypatch.context() as patched:
        patched.setattr(peer_liveness, "_world", lambda: 4)  # ranks 2 and 3 have another model
        text = str(peer_liveness.lost(GLOO, "dp at step 12"))
    assert "ranks still run, but rank(s) 2, 3 have not said where they run (" in text
    child.kill()
    child.wait()
    text = str(peer_liveness.lost(GLOO, "dp at step 12"))
    assert f"rank 1 (process {child.pid} on host) has ended" in text
    assert text.startswith(f"rank 0 of 2 (process {os.getpid()} on ")
    assert "Connection closed by peer" in text


def test_a_rank_whose_connection_broke_is_looked_at_until_it_has_ended(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel closes a killed process's sockets before it shows it as ended."""
    monkeypatch.setattr(processes.Known, "peers", (peer_liveness._myself(), peer_of(child.pid)))
    monkeypatch.setattr(peer_liveness, "LOOK_S", 3600.0)
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            child.kill()
            child.wait()

    monkeypatch.setattr(
        peer_liveness, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    )
    assert f"rank 1 (process {child.pid} on host) has ended" in str(peer_liveness.lost(GLOO))
    # when time is up and no connection broke, nothing will come
    assert peer_liveness.lost(RuntimeError("Timed out waiting 5000ms for recv")) is not None
    assert len(looks) == 3


@pytest.mark.parametrize(
    "error",
    [CodecError("gloo"), RuntimeError("shapes differ: 3 and 4"), ValueError("connection closed")],
)
def test_errors_about_other_things_are_left_alone(error: Exception) -> None:
    assert peer_liveness.lost(error) is None


@pytest.mark.parametrize(
    "text",
    [
        "Timed out waiting 5000ms for recv operation to complete",
        "NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited or there was a network "
        "error",
        "Connection reset by peer",
    ],
)
def test_what_back_ends_say_of_a_lost_peer(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.Known, "peers", ())
    assert peer_liveness.lost(RuntimeError(text)) is not None


def far_peers() -> tuple[Peer, ...]:
    return tuple(Peer(rank, f"node{rank}", f"boot {rank}", 7, "") for rank in range(3))


def test_who_says_nothing_in_the_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 have failed too and report it; rank 2 is silent."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    names = distributed_c10d.PrefixStore(f"hybridcomp/failed/{start()}", store)
    names.set("0", "true")
    monkeypatch.setattr(peer_liveness, "ROLL_CALL_S", 0.5)
    monkeypatch.setattr(peer_liveness, "_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(processes.Known, "peers", far_peers())
    text = str(peer_liveness.lost(GLOO))
    assert "rank 2 (process 7 on node2) does not answer" in text
    assert "node0" not in text and "node1" not in text
    assert names.check(["1"])  # the others read this


@pytest.mark.parametrize("answer", ["refuses", "never"])
def test_a_store_that_is_gone_names_its_host(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def store() -> Any:
        if answer == "never":
            time.sleep(2.0)
        raise RuntimeError("Connection refused")

    monkeypatch.setattr(peer_liveness, "ROLL_CALL_S", -0.5)  # and one more second
    monkeypatch.setattr(peer_liveness, "_store", store)
    monkeypatch.setattr(processes.Known, "peers", far_peers())
    assert "rank 0 (process 7 on node0) does not answer" in str(peer_liveness.lost(GLOO))


def test_the_hook_adds_one_line_below_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    monkeypatch.setattr(processes.Known, "peers", ())
    peer_liveness._hook()
    for error in (
        ValueError("a\nb"),
        ConfigError("compression.dp", 3, "a codec"),
        KeyboardInterrupt(),
        GLOO,
    ):
        sys.excepthook(type(error), error, None)
    assert len(shown) == 4
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].endswith("fails: ValueError: a") and lines[0].startswith("[hybridcomp] rank 0")
    assert "a message of the training program or of upstream failed" in lines[1]


def test_a_rank_that_its_agent_ends_says_who_is_missing(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    monkeypatch.setattr(processes.Known, "peers", (peer_of(os.getpid(), 0), peer_of(child.pid)))
    ended = SignalException("Process 7 got signal: 15", sigval=signal.SIGTERM)
    said = peer_liveness._last_words(ended)
    assert said.endswith("fails: SignalException: Process 7 got signal: 15")
    child.kill()
    until(child, "Z")
    assert (
        peer_liveness._last_words(ended)
        == f"{said}; rank 1 (process {child.pid} on host) has ended"
    )


def seconds(group: dist.ProcessGroup) -> float:
    """Return a group's timeout."""
    return peer_liveness._waits(group).total_seconds()


def limits() -> list[float]:
    """Return timeouts of a group that upstream created later, and of one with its own timeout."""
    later, explicit = dist.new_group([0]), dist.new_group([0], timeout=timedelta(hours=3))
    limits_s = [seconds(later)]
    c10d, limit = dist.distributed_c10d, timedelta(seconds=7)
    getattr(dist, "set_timeout", c10d._set_pg_timeout)(limit, c10d._get_default_group())
    assert peer_liveness.time_limit() == limit
    peer_liveness.limit_waits()
    return [*limits_s, seconds(later), seconds(explicit)]


def test_groups_wait_no_longer_than_the_default_group() -> None:
    before, after, explicit = run_ranks(1, limits)[0]
    assert before > 7 and after == 7 and explicit == 3 * 3600


def limits_of_models() -> list[float]:
    """Return timeouts of the user's groups after attaching two models, and of one of ours."""
    groups = [dist.new_group(), dist.new_group(timeout=timedelta(hours=3))]
    replicated = DistributedDataParallel(nn.Linear(8, 8), process_group=groups[0])
    hybridcomp.attach(replicated, {"dp": {"codec": "blockint"}})
    sharded: Any = fully_shard(nn.Linear(8, 8))
    hybridcomp.attach(sharded, {"dp": {"codec": "blockint"}})
    limits = [peer_liveness.time_limit(group) for group in groups]
    assert [limit.total_seconds() for limit in limits if limit is not None] == [LIMIT_S, 3 * 3600]
    own = topology._group((1, 0))
    assert own is not None
    return [*map(seconds, groups), seconds(own)]


def test_attach_leaves_the_time_outs_of_the_user_s_groups_alone() -> None:
    for default, explicit, own in run_ranks(2, limits_of_models):
        assert default == 1800 and explicit == 3 * 3600
        assert own == LIMIT_S, "the time-out of the default group (tests/ranks.py)"


LAST_WORDS = """
import os, signal, subprocess, sys, time
sys.path.insert(0, {root!r})
from hybridcomp.job import _last_words
if "own" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: (print("my handler"), sys.exit(3)))
gone = subprocess.Popen([sys.executable, "-c", ""])
gone.wait()
me = open("/proc/self/stat").read().split()[21]
peers = [(f"/proc/{{gone.pid}}/stat", "5", "rank 1"), ("/proc/self/stat", me, "rank 2"),
         ("/proc/self/stat", "1", "rank 3")]
_last_words.set("rank 0 of 4", peers)
if "fork" in sys.argv and (pid := os.fork()):
    sys.exit(os.waitpid(pid, 0)[1] != signal.SIGTERM)
os.kill(os.getpid(), getattr(signal, sys.argv[1]))
time.sleep(5)
"""


def last_words(*words: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("hybridcomp.job._last_words")
    program = LAST_WORDS.format(root=str(ROOT))
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("name", "said"), [("SIGTERM", "was told to end (SIGTERM)"), ("SIGABRT", "aborts")]
)
def test_a_rank_that_a_signal_ends_says_who_is_missing(name: str, said: str) -> None:
    ended = last_words(name)
    assert ended.returncode == -getattr(signal, name)  # the signal has its default effect
    assert ended.stderr == (
        f"[hybridcomp] rank 0 of 4 {said}: rank 1 has ended; rank 3 has ended\n"
    )


def test_a_handler_of_the_program_is_left_alone() -> None:
    ended = last_words("SIGTERM", "own")
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "my handler\n", "")


def test_a_forked_worker_says_nothing() -> None:
    ended = last_words("SIGTERM", "fork")
    assert (ended.returncode, ended.stderr) == (0, "")
