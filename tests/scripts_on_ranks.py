"""Run scripts as the ranks of a job, each forked from a process with torch and DeepSpeed.

With a launcher two ranks take half a minute of a core before their first step, as the launcher, its
child and every rank import torch and DeepSpeed. Tests of the script alone fork ranks as in
``tests.ranks``; these have a launcher's variables, run the script as ``__main__`` and end with its
exit status and exit handlers.
"""

from __future__ import annotations

import atexit
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path

from tests.ranks import forget_inherited, fork_server

#: seconds in which other ranks may end by themselves after a failure
GRACE_S = 10.0


@dataclass(frozen=True)
class Ended:
    """End of a job: the worst status of its ranks, and their output."""

    returncode: int
    output: str


def free_port() -> int:
    """Return an unused TCP port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


def run_script(
    folder: Path,
    script: str,
    *arguments: str,
    ranks: int = 2,
    armed: bool = False,
    anew: bool = False,
    timeout: float = 240.0,
    until: Callable[[], bool] = lambda: False,
    **environment: str,
) -> Ended:
    """Run ``script`` in ``folder`` on ``ranks`` ranks.

    Args:
        armed: run through ``hybridcomp.run``, as a launcher's ``--module hybridcomp.run`` does.
        anew: import hybridcomp again: ``folder`` has another one, or a codec that it finds there.
        timeout: seconds after which ranks that still run are killed, and the job has failed.
        until: polled condition that kills all ranks.
        environment: variables besides a launcher's.
    """
    context = fork_server()
    common = {
        "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": f"{folder}/ext",
        **environment,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as logs:
        paths = [Path(logs, str(rank)) for rank in range(ranks)]
        processes = [
            context.Process(
                target=_rank,
                args=(rank, str(folder), script, arguments, armed, anew, common, str(paths[rank])),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        while (running := [p for p in processes if p.is_alive()]) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if until():
                break
            running[0].join(0.1)
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        output = "".join(path.read_text(errors="replace") for path in paths if path.exists())
    return Ended(max(abs(process.exitcode or 0) for process in processes), output)


def _rank(
    rank: int,
    folder: str,
    script: str,
    arguments: tuple[str, ...],
    armed: bool,
    anew: bool,
    environment: Mapping[str, str],
    log: str,
) -> None:
    """Become the script: its arguments, folder, variables and exit behaviour."""
    forget_inherited()
    atexit._clear()  # handlers of the process that this one was forked from
    if anew:
        for name in [name for name in sys.modules if name.partition(".")[0] == "hybridcomp"]:
            del sys.modules[name]
    elif "hybridcomp.session.process" in sys.modules:  # registered in the server, once
        atexit.register(sys.modules["hybridcomp.session.process"]._let_go)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.chdir(folder)
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    status = 0
    try:
        if armed:
            from hybridcomp import run

            run.main([f"--local_rank={rank}", script, *arguments])
        else:
            sys.argv = [script, f"--local_rank={rank}", *arguments]
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    atexit._run_exitfuncs()
    # hybridcomp closes a ledger there
    util._exit_function()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
