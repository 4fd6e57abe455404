"""Run scripts and other commands of Python in forks of a process with torch and DeepSpeed.

With a launcher two ranks take half a minute of a core before their first step, as the launcher, its
child and every rank import torch and DeepSpeed; any new interpreter takes 4 s. ``run_script`` forks
a job's ranks as in ``tests.ranks``, with a launcher's variables; ``run_python`` runs one command.
Both run the script as ``__main__`` and end with its exit status and exit handlers.
"""

from __future__ import annotations

import atexit
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path

from tests.paths import ROOT
from tests.ranks import LIMIT_S, forget_inherited, fork_server

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


def run_python(
    *words: str, cwd: Path = ROOT, anew: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python *words``: a script, ``-m`` and a module, or ``-c`` and code, with arguments.

    As ``subprocess.run`` with the text of both streams, in a fork. ``anew`` as in ``run_script``;
    ``environment``: variables besides this process's.
    """
    (found,) = run_each([words], cwd, {**os.environ, **environment}, anew=anew)
    return found


def run_each(
    commands: Sequence[Sequence[str]],
    cwd: Path,
    *environments: Mapping[str, str],
    anew: bool = False,
) -> list[subprocess.CompletedProcess[str]]:
    """Run commands of ``python`` at once, each in an environment; return what each printed.

    Raises TimeoutError with what was printed if one does not end.
    """
    with tempfile.TemporaryDirectory() as logs:
        processes, paths = [], []
        for number, (words, given) in enumerate(zip(commands, environments, strict=True)):
            paths.append([f"{logs}/{number}{stream}" for stream in ("out", "err")])
            processes.append(
                fork_server().Process(
                    target=_python, args=(tuple(words), str(cwd), dict(given), *paths[-1], anew)
                )
            )
            processes[-1].start()
        deadline = time.monotonic() + LIMIT_S
        try:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            hanging = [number for number, process in enumerate(processes) if process.is_alive()]
        finally:
            for process in processes:
                process.kill()
        texts = [[Path(path).read_text(errors="replace") for path in pair] for pair in paths]
    if hanging:
        raise TimeoutError(f"commands {hanging} of {commands} hang after {LIMIT_S} s: {texts}")
    return [
        subprocess.CompletedProcess(words, process.exitcode or 0, *pair)
        for words, process, pair in zip(commands, processes, texts, strict=True)
    ]


def run_script(
    folder: Path,
    script: str,
    *arguments: str,
    ranks: int = 2,
    armed: bool = False,
    anew: bool = False,
    timeout: float = LIMIT_S,
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
        processes = []
        for rank, log in enumerate(map(str, paths)):
            local = f"--local_rank={rank}"
            words = ("-m", "hybridcomp.run", local, script) if armed else (script, local)
            given = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            args = ((*words, *arguments), str(folder), given, log, log, anew)
            processes.append(context.Process(target=_python, args=args, daemon=True))
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


def _python(
    words: tuple[str, ...],
    folder: str,
    environment: Mapping[str, str],
    out: str,
    err: str,
    anew: bool,
) -> None:
    """Become ``python *words``: its arguments, folder, variables, streams and exit behaviour."""
    forget_inherited()
    atexit._clear()  # handlers of the process that this one was forked from
    if anew:
        for name in [name for name in sys.modules if name.partition(".")[0] == "hybridcomp"]:
            del sys.modules[name]
    elif "hybridcomp.session.process" in sys.modules:  # registered in the server, once
        atexit.register(sys.modules["hybridcomp.session.process"]._let_go)
    for stream, log in ((1, out), (2, err)):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    status = 0
    try:
        try:
            _execute(*words)
        except Exception as error:
            status = 1
            sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    atexit._run_exitfuncs()
    # hybridcomp closes a ledger there
    util._exit_function()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _execute(first: str, *rest: str) -> None:
    """Run the command that an interpreter with these arguments runs."""
    if first == "-c":
        sys.argv, sys.path[:0] = ["-c", *rest[1:]], [os.getcwd()]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv, sys.path[:0] = list(rest), [os.getcwd()]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = [first, *rest], [str(Path(first).resolve().parent)]
        runpy.run_path(first, run_name="__main__")
