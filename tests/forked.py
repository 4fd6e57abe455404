"""Run the collected tests in forked processes: ``--workers N``.

Each worker of pytest-xdist imports and collects all tests, and starts a rank server
(``tests.ranks``). Here the workers share one collection and one server. A file's tests stay in one
worker; files begin in their order.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import signal
from collections import deque
from collections.abc import Iterator
from multiprocessing import Pipe, forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tests.ranks import fork_server

#: names in modules of tests that start ranks
STARTS = {"RankPool", "RunRanks", "fork_server", "run_ranks", "run_script"}
#: positions of a file's tests among those of the session
File = range


def files(session: pytest.Session) -> deque[File]:
    """Return the files of a session's tests."""
    found: deque[File] = deque()
    for _, items in itertools.groupby(enumerate(session.items), lambda place: place[1].path):
        places = [place for place, _ in items]
        found.append(range(places[0], places[-1] + 1))
    return found


class Worker:
    """A forked process, and its tests that have not ended."""

    def __init__(self, number: int, session: pytest.Session, others: list[Worker]) -> None:
        self.number, self.left = number, deque[int]()
        # pytest shows names of pytest-xdist's workers
        self.gateway, self._workerinfocache = SimpleNamespace(id=f"w{number}"), f"[w{number}]"
        self.pipe, theirs = Pipe()
        self.pid = os.fork()
        if not self.pid:
            for each in (self, *others):
                each.pipe.close()  # a worker that ends shows by the end of its pipe
            _work(number, session, theirs)
        theirs.close()

    def end(self) -> None:
        """Kill the process."""
        self.pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def run(session: pytest.Session, count: int) -> None:
    """Run the session's tests in ``count`` processes. Raises Session.Failed as pytest does."""
    waiting, workers, numbers = files(session), list[Worker](), itertools.count()
    terminal = session.config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None:
        terminal.showfspath = False  # files are run side by side
    capture = session.config.pluginmanager.getplugin("capturemanager")
    if any(STARTS & vars(getattr(item, "module", item)).keys() for item in session.items):
        capture.resume_global_capture()  # of what the server's imports print
        fork_server()
        forkserver.ensure_running()
    capture.suspend_global_capture(in_=True)  # workers capture into files of their own
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    try:
        while True:
            while len(workers) < min(count, len(workers) + len(waiting)):
                workers.append(Worker(next(numbers), session, workers))
            if not workers:
                return
            for pipe in wait([worker.pipe for worker in workers]):
                worker = next(one for one in workers if one.pipe is pipe)
                try:
                    _hear(session, worker, worker.pipe.recv(), waiting)
                except (EOFError, ConnectionResetError):
                    workers.remove(worker)
                    _gone(session, worker, waiting)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
    finally:
        for worker in workers:
            worker.end()


def _hear(
    session: pytest.Session, worker: Worker, said: tuple[Any, ...], waiting: deque[File]
) -> None:
    """Answer a worker's question for another file, or pass on what its test reports."""
    kind, *more = said
    hook = session.config.hook
    if kind == "next":
        file = waiting.popleft() if waiting else range(0)
        worker.left.extend(file)
        worker.pipe.send(file)
    elif kind == "report":
        report = hook.pytest_report_from_serializable(config=session.config, data=more[0])
        report.node = worker
        hook.pytest_runtest_logreport(report=report)
    else:
        if kind == "finish":
            worker.left.popleft()
        named = dict(zip(("nodeid", "location"), more, strict=True))
        getattr(hook, f"pytest_runtest_log{kind}")(**named)


def _gone(session: pytest.Session, worker: Worker, waiting: deque[File]) -> None:
    """Report the test in which a worker died, and have its other tests run by another."""
    worker.pipe.close()
    _, status = os.waitpid(worker.pid, 0)
    if not worker.left:
        return
    item = session.items[worker.left.popleft()]
    report: Any = pytest.TestReport(
        item.nodeid, item.location, {}, "failed", when="call",
        longrepr=f"the worker ended in this test: {os.waitstatus_to_exitcode(status)}",
    )  # fmt: skip
    report.node = worker
    item.ihook.pytest_runtest_logreport(report=report)
    if worker.left:
        waiting.appendleft(range(worker.left[0], worker.left[-1] + 1))


class _Sending:
    """Plugin of a worker: sends what its tests report."""

    def __init__(self, pipe: Connection, config: pytest.Config) -> None:
        self.pipe, self.config = pipe, config

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        """Say that a test begins."""
        self.pipe.send(("start", nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a phase's result."""
        made = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.pipe.send(("report", made))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        """Say that a test has ended."""
        self.pipe.send(("finish", nodeid, location))


def _work(number: int, session: pytest.Session, pipe: Connection) -> NoReturn:
    """Run files of tests until there are none; ends the process."""
    status, items = 1, session.items
    try:
        atexit._clear()  # the parent's
        _become_worker(number, session.config, pipe)
        places = _places(pipe)
        place = next(places, None)
        while place is not None:
            # pytest tears down what the next test does not need
            following = next(places, None)
            coming = None if following is None else items[following]
            items[place].ihook.pytest_runtest_protocol(item=items[place], nextitem=coming)
            place = following
        atexit._run_exitfuncs()
        util._exit_function()  # type: ignore[attr-defined]
        status = 0
    finally:
        os._exit(status)


def _places(pipe: Connection) -> Iterator[int]:
    """Yield positions of tests; asks for the next file once the last of a file is taken."""
    while True:
        pipe.send(("next",))
        file = pipe.recv()
        if not file:
            return
        yield from file


def _become_worker(number: int, config: pytest.Config, pipe: Connection) -> None:
    """Take what may not be shared with the parent: captured output, the folder, the terminal."""
    plugins: Any = config.pluginmanager
    capture = plugins.getplugin("capturemanager")
    capture._global_capturing = None
    capture.start_global_capturing()
    if plugins.hasplugin("terminalreporter"):
        plugins.unregister(name="terminalreporter")
    plugins.register(_Sending(pipe, config))
    folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"w{number}"
    folders._basetemp.mkdir(mode=0o700)
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:  # no child of this process, which cannot wait for it
        server.ensure_running = resource_tracker.ensure_running
