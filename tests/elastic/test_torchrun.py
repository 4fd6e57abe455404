"""Half of a torchrun job is killed and comes back: it ends with each sample once."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.elastic.agents import Node
from tests.paths import ROOT
from tests.ranks import python_path
from tests.scripts_on_ranks import free_port, run_script

SCRIPT = str(ROOT / "scripts" / "examples" / "train_elastic.py")
STEPS, SAMPLES, LENGTH = 40, 16, 300
PATIENCE_S = 200.0
Agent = subprocess.Popen[bytes] | Node


def arguments(folder: Path, block: str) -> list[str]:
    return [
        "--checkpoints", str(folder / "checkpoints"), "--losses", str(folder / "log.jsonl"),
        "--steps", str(STEPS), "--samples", str(SAMPLES), "--length", str(LENGTH),
        "--save-every", "2", "--micro-batch", "4", "--block", block,
    ]  # fmt: skip


def node(folder: Path, port: int, *words: str) -> subprocess.Popen[bytes]:
    """Start the agent of a node with two ranks, in a process group of its own."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2",
        "--max-restarts=20", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=elastic", "--rdzv-conf=last_call_timeout=2", "--local-addr=127.0.0.1",
        "--monitor-interval=0.5", SCRIPT, *words,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1",
                   "GLOO_SOCKET_IFNAME": "lo",
                   "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # fmt: skip
    with (folder / "agents.log").open("ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def lines(folder: Path) -> list[dict[str, Any]]:
    log = folder / "log.jsonl"
    text = log.read_text() if log.is_file() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def until(holds: Callable[[], bool], agents: list[Agent], folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        ended = [agent.returncode for agent in agents if agent.poll() is not None]
        if any(ended) or time.monotonic() > deadline:
            text = (folder / "agents.log").read_text(errors="replace")
            raise AssertionError(f"agents {ended}, {len(lines(folder))} steps\n{text[-6000:]}")
        time.sleep(0.2)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def kill(agent: Agent) -> None:
    """Kill an agent and, as torchrun starts each in a session of its own, its ranks."""
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(agent.pid)], capture_output=True, text=True, check=False
    )
    for pid in [agent.pid, *map(int, found.stdout.split())]:
        os.kill(pid, signal.SIGKILL)
    agent.wait()


def unbroken(folder: Path, block: str) -> dict[int, dict[str, Any]]:
    """Return the steps of a job that keeps its four ranks."""
    (folder / "checkpoints").mkdir(parents=True)
    ended = run_script(folder, SCRIPT, *arguments(folder, block), ranks=4)
    assert ended.returncode == 0, ended.output
    return {line["step"]: line for line in lines(folder)}


def broken(folder: Path, start: Callable[[int], Agent], at: int = 5, away: int = 4) -> None:
    """Run a job of which half is killed after step ``at``, and comes back ``away`` steps later."""
    (folder / "checkpoints").mkdir(parents=True)
    port = free_port()
    agents = [start(port)]
    try:
        until(lambda: listens(port), agents, folder)  # the first agent holds the rendezvous
        agents.append(start(port))
        until(lambda: any(line["ranks"] == 4 and line["step"] >= at for line in lines(folder)),
              agents, folder)  # fmt: skip
        kill(agents.pop())
        until(lambda: sum(line["ranks"] == 2 for line in lines(folder)) >= away, agents, folder)
        done = len(lines(folder))
        agents.append(start(port))
        until(lambda: any(line["ranks"] == 4 for line in lines(folder)[done:]), agents, folder)
        until(lambda: all(agent.poll() == 0 for agent in agents), agents, folder)
    finally:
        for agent in agents:
            if agent.poll() is None:
                kill(agent)


def hold(folder: Path, wanted: dict[int, dict[str, Any]], within: float) -> None:
    """Check that the broken job has the other job's samples and losses in each step."""
    found = {line["step"]: line for line in lines(folder)}  # a step that was done again counts once
    assert found.keys() == wanted.keys() == set(range(1, STEPS + 1))
    assert {line["ranks"] for line in lines(folder)} == {2, 4}
    assert all(found[step]["samples"] == wanted[step]["samples"] for step in found)
    apart = max(abs(found[step]["loss"] - wanted[step]["loss"]) for step in found)
    assert apart <= within
    text = (folder / "agents.log").read_text(errors="replace")
    assert "2 go on from step" in text and "4 go on from step" in text


def block_of(codec: str) -> tuple[str, float]:
    """Return a block, and the largest difference of losses."""
    feedback = {"codec": "blockint", "bits": 4, "error_feedback": True}
    dp: Any = "none" if codec == "none" else feedback
    return json.dumps({"dp": dp, "min_bytes": 0}), 1e-6 if codec == "none" else 0.02


@pytest.mark.nightly
@pytest.mark.parametrize("codec", ["none", "4bits"])
def test_half_of_the_ranks_leave_and_come_back(codec: str, tmp_path: Path) -> None:
    block, within = block_of(codec)
    wanted, folder = unbroken(tmp_path / "whole", block), tmp_path / "broken"
    words = [*arguments(folder, block), "--pause", "0.5"]
    broken(folder, lambda port: node(folder, port, *words))
    hold(folder, wanted, within)


@pytest.mark.nightly
@pytest.mark.timeout(5400)
def test_half_of_the_ranks_leave_and_come_back_fifty_times(tmp_path: Path) -> None:
    """Fifty jobs, killed at another step each."""
    wanted = {codec: unbroken(tmp_path / codec, block_of(codec)[0]) for codec in ("none", "4bits")}
    draw = random.Random(0)
    for number in range(50):
        codec, folder = ("none", "4bits")[number % 2], tmp_path / f"job{number}"
        block, within = block_of(codec)
        words = (*arguments(folder, block), "--pause", "0.15")

        def start(port: int, folder: Path = folder, words: tuple[str, ...] = words) -> Agent:
            return Node(folder, port, SCRIPT, words)

        began = time.monotonic()
        broken(folder, start, draw.randrange(3, 13), draw.randrange(2, 7))
        hold(folder, wanted[codec], within)
        print(f"job {number} of {codec} ended right, {time.monotonic() - began:.0f} s", flush=True)
