"""Settings shared by all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from hybridcomp.job import processes
from tests import forked, selection
from tests.ranks import RankPool, RunRanks, forget_inherited

# before the rank server imports DeepSpeed, which detects the accelerator only once
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HYBRIDCOMP_CACHE"] = ""  # no test reuses another's measurements

# a waking gloo thread must not take the core from the holder of the lock that it polls
# (scripts/lab/namespaces.py). Ranks of tests may change cores, so unlike the lab's they gain even
# when they outnumber them: patches/ds/test_two_levels.py takes 24 s instead of 28
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# a shell that starts this in the background makes it and its children ignore SIGINT, which tests
# send to children
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# wall-clock limits are meaningless on a shared machine
settings.register_profile("hybridcomp", deadline=None, print_blob=True)
settings.load_profile("hybridcomp")


@pytest.fixture(scope="session")
def on_ranks() -> Iterator[RunRanks]:
    """Return ``run_ranks`` on persistent ranks: ``on_ranks(world_size, function, *args)``.

    They serve many short functions, which saves a launch for each.
    """
    yield from _pools(most_threads=24)


@pytest.fixture(scope="module")
def module_ranks() -> Iterator[RunRanks]:
    """Return ``on_ranks`` for a module's functions, which may leave engines behind."""
    yield from _pools()


def _pools(most_threads: float = float("inf")) -> Iterator[RunRanks]:
    """Yield ``run``, which replaces ranks of over ``most_threads``: groups that stayed open."""
    pools: dict[int, RankPool] = {}

    def run(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        pool = pools.setdefault(world_size, RankPool(world_size))
        if pool.threads() > most_threads:
            pool.close()
        return pool.run(function, *args)

    yield run
    for pool in pools.values():
        pool.close()


@pytest.fixture(autouse=True)
def _forget_peers() -> Iterator[None]:
    """Forget the ranks that a test met in this process: later tests would report them as ended."""
    yield
    processes.Known.peers, processes.Known.parts = (), set()
    processes.Known.job = staticmethod(lambda: None)


#: substrings of paths of files that take minutes, the longest first
SLOW = (
    "launch", "restart", "identity", "training", "scripts", "nvrtc", "patches", "autotune",
    "compare",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer ``--nightly``, ``--quick`` and ``--workers``."""
    selection.add_options(parser)
    told = "run files of tests in N forked processes: tests/forked.py"
    parser.addoption("--workers", type=int, default=0, metavar="N", help=told)


def pytest_configure(config: pytest.Config) -> None:
    """Pass ``--nightly`` on to modules that then train longer."""
    if config.getoption("--nightly"):
        os.environ[selection.VARIABLE] = "1"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only the files of ``--quick``."""
    if config.getoption("--quick") and not selection.is_quick(collection_path):
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run slow files first, to balance the workers; skip GPU tests without a GPU."""
    selection.select(config, items)
    items.sort(key=lambda item: _slowness(item.nodeid.partition("::")[0]))
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if "gpu" in selection.marks_of(item):
                item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in workers, if there are several and one is not to be looked into."""
    options, count = session.config.option, session.config.getoption("workers")
    if count < 2 or options.collectonly or options.usepdb or session.testsfailed:
        return None
    forked.run(session, count)
    return True


def pytest_collection_finish() -> None:
    """Exempt all objects imported so far from later garbage collections."""
    gc.collect()
    forget_inherited()


def _slowness(path: str) -> int:
    return next((place for place, part in enumerate(SLOW) if part in path), len(SLOW))
