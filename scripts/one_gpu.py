#!/usr/bin/env python3
"""Run a distributed job over NCCL with all of its ranks on one GPU.

    python scripts/one_gpu.py --ranks 2 -- -m hybridcomp.run scripts/examples/train_gpt.py \\
        --deepspeed_config configs/ds_zero1.json
    python scripts/one_gpu.py --ranks 4 --per-node 2 -- my_job.py

NCCL refuses two ranks of one host on one GPU. It knows hosts by NCCL_HOSTID, so each rank gets one
of its own here, and they talk through sockets of the loopback, as nodes without RDMA do: real
NCCL, and as slow as such nodes. ``--per-node`` only says which ranks count as one node for
"hierarchy". A command that begins with a script or an option of Python runs under this Python;
each rank has the variables of torchrun and of DeepSpeed's launcher.

When a rank fails the others get ``--grace`` seconds to say what they saw, then they are ended.
Exits with the status of the first rank that failed by itself, 124 after ``--timeout``.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.team import STOPPED, TIMED_OUT, Team

#: the last lines of a failed rank that are told again at the end
TAIL = 15


def environment(
    rank: int, ranks: int, *, per_node: int = 1, port: int = 29500, device: str = "cuda"
) -> dict[str, str]:
    """Return a rank's environment: its rank, the GPU it shares, a host name of its own for NCCL."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        # every rank sees the one GPU as its own
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_SIZE": "1",
        # the node, as DeepSpeed's launcher and torchrun set it
        "CROSS_RANK": str(rank // per_node),
        "CROSS_SIZE": str(ranks // per_node),
        "GROUP_RANK": str(rank // per_node),
        "GROUP_WORLD_SIZE": str(ranks // per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_HOSTID": f"one-gpu-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": device,
    }


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--per-node", type=int, default=1, metavar="N", help="ranks of a node")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: gloo")
    parser.add_argument("--timeout", type=float, default=86400.0, metavar="SECONDS")
    parser.add_argument("--grace", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--quiet", action="store_true", help="show the output of rank 0 only")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ...")
    found = parser.parse_args(argv)
    found.command = found.command[1:] if found.command[:1] == ["--"] else found.command
    if not found.command:
        parser.error("expected a command after --, such as -- scripts/examples/train_gpt.py ...")
    if found.ranks < 1 or found.per_node < 1 or found.ranks % found.per_node:
        parser.error(
            f"--per-node: expected a number that divides --ranks {found.ranks}, "
            f"found {found.per_node}"
        )
    return found


def words(command: Sequence[str]) -> list[str]:
    """``command``, under this Python where it is a script or begins with an option."""
    python = command[0].startswith("-") or command[0].endswith(".py")
    return [sys.executable, *command] if python else list(command)


def free_port() -> int:
    """Return a port of the loopback that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(args: argparse.Namespace, inherited: Mapping[str, str]) -> Team:
    """Start every rank, wait, end what still runs; the team with its statuses and texts."""
    team, port = Team(), free_port()
    defaults = {"OMP_NUM_THREADS": "2", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with tempfile.TemporaryDirectory(prefix="onegpu") as folder:
        try:
            for rank in range(args.ranks):
                own = environment(
                    rank, args.ranks, per_node=args.per_node, port=port, device=args.device
                )
                # extensions that ranks build at once would wait for each other's lock; a folder
                # that the user names holds what is built already, and all have that
                defaults["TORCH_EXTENSIONS_DIR"] = str(Path(folder, f"extensions{rank}"))
                team.start(
                    words(args.command),
                    _nothing,
                    {**defaults, **inherited, **own, "PYTHONUNBUFFERED": "1"},
                    None,
                    f"[{rank}] " if not args.quiet else "" if rank == 0 else None,
                )
            team.wait(args.timeout, args.grace)
        finally:
            team.end()
    return team


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _nothing() -> None:
    """A rank needs no other surroundings."""


def report(statuses: Sequence[int], texts: Sequence[str]) -> list[str]:
    """Sentences about the ranks that failed, the one that began it last; empty: all went well."""
    lines = []
    for rank, status in sorted(enumerate(statuses), key=lambda pair: pair[1] != STOPPED):
        if status == STOPPED:
            lines.append(f"one_gpu: rank {rank} still ran and was ended, since another failed")
        elif status:
            lines += ["", f"one_gpu: rank {rank} {how(status)}. Its last lines:"]
            lines += [f"  {text}" for text in texts[rank].splitlines()[-TAIL:]]
    return lines


def how(status: int) -> str:
    """Put an exit status into words."""
    if status == TIMED_OUT:
        return "ran out of time (--timeout) and was ended"
    if status > 128:
        return f"was killed by signal {status - 128}"
    return f"failed with status {status}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    args = arguments(argv)
    # ranks are ended with the launcher, whoever ends it
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        team = run(args, os.environ)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"one_gpu: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
    for line in report(team.statuses, team.texts):
        print(line, file=sys.stderr)
    failed = [status for status in team.statuses if status]
    return next((status for status in failed if status != STOPPED), failed[0] if failed else 0)


if __name__ == "__main__":
    sys.exit(main())
