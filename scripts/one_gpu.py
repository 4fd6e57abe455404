#!/usr/bin/env python3
"""Run a distributed job over NCCL with all ranks on one GPU.

    python scripts/one_gpu.py --ranks 2 -- -m hybridcomp.run scripts/examples/train_gpt.py \\
        --deepspeed_config configs/ds_zero1_recommended.json
    python scripts/one_gpu.py --ranks 4 --per-node 2 -- my_job.py

NCCL rejects two ranks of a host on one GPU. Each rank therefore gets a different NCCL_HOSTID, which
makes NCCL use loopback sockets, as slow as nodes without RDMA. ``--per-node`` only sets the ranks
that count as a node for "hierarchy". A command that begins with a script or a Python option runs
under this Python; ranks get the variables of torchrun and of DeepSpeed's launcher.

When a rank fails, the others get ``--grace`` seconds to report, then they are ended. Exits with the
status of the first rank that failed by itself, or 124 after ``--timeout``.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.namespaces import end_with_parent
from lab.team import STOPPED, TIMED_OUT, Team, sigterm_raises

#: final lines of a failed rank's output to repeat at the end
TAIL = 15


def environment(
    rank: int, ranks: int, *, per_node: int = 1, port: int = 29500, device: str = "cuda"
) -> dict[str, str]:
    """Return a rank's environment: its rank, the shared GPU, a separate NCCL host id."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        # every rank sees the GPU as device 0
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_SIZE": "1",
        # node variables of DeepSpeed's launcher and torchrun
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
    """Return ``command``, prefixed with this Python if it is a script or begins with an option."""
    python = command[0].startswith("-") or command[0].endswith(".py")
    return [sys.executable, *command] if python else list(command)


def free_port() -> int:
    """Return an unused loopback port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run(args: argparse.Namespace, inherited: Mapping[str, str]) -> Team:
    """Start every rank, wait and end stragglers; return the team with statuses and output."""
    team, port = Team(), free_port()
    defaults = {"OMP_NUM_THREADS": "2", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with tempfile.TemporaryDirectory(prefix="onegpu") as folder:
        try:
            for rank in range(args.ranks):
                own = environment(
                    rank, args.ranks, per_node=args.per_node, port=port, device=args.device
                )
                # ranks that build extensions at once wait for each other's lock; a folder that the
                # user names has finished builds, and all ranks share it
                defaults["TORCH_EXTENSIONS_DIR"] = str(Path(folder, f"extensions{rank}"))
                team.start(
                    words(args.command),
                    end_with_parent,  # or the ranks of a killed launcher would keep the GPU
                    {**defaults, **inherited, **own, "PYTHONUNBUFFERED": "1"},
                    f"[{rank}] " if not args.quiet else "" if rank == 0 else None,
                )
            team.wait(args.timeout, args.grace)
        finally:
            team.end()
    return team


def report(statuses: Sequence[int], texts: Sequence[str]) -> list[str]:
    """Describe failed ranks, the first failure last; empty if all succeeded."""
    lines = []
    for rank, status in sorted(enumerate(statuses), key=lambda pair: pair[1] != STOPPED):
        if status == STOPPED:
            lines.append(f"one_gpu: rank {rank} still ran and was ended, since another failed")
        elif status:
            lines += ["", f"one_gpu: rank {rank} {how(status)}. Its last lines:"]
            lines += [f"  {text}" for text in texts[rank].splitlines()[-TAIL:]]
    return lines


def how(status: int) -> str:
    """Describe an exit status."""
    if status == TIMED_OUT:
        return "ran out of time (--timeout) and was ended"
    if status > 128:
        return f"was killed by signal {status - 128}"
    return f"failed with status {status}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run; return the exit status."""
    args = arguments(argv)
    try:
        with sigterm_raises():
            team = run(args, os.environ)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"one_gpu: {error}", file=sys.stderr)
        return 2
    for line in report(team.statuses, team.texts):
        print(line, file=sys.stderr)
    failed = [status for status in team.statuses if status]
    return next((status for status in failed if status != STOPPED), failed[0] if failed else 0)


if __name__ == "__main__":
    sys.exit(main())
