"""Make the n-th step of an operation fail on one rank: any call that can fail.

Python's profiler counts the steps while the operation runs: calls from a hybridcomp function into
torch, files, the network or another library. It skips the few before an operation and after its
last gate (``KEPT``), the code that reports a failure (``SPARED``), and DeepSpeed's code between our
operations, which sends messages too.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import hybridcomp
from hybridcomp.job.gates import here

HERE = str(Path(hybridcomp.__file__).parent)
PATCHES = str(Path(HERE).parent / "patches")
#: functions that report a failure, format it, or post messages after a gate, whose failure loses a
#: rank
SPARED = tuple(
    f"/hybridcomp/{name}.py"
    for name in (
        "job/gates", "job/agreement", "job/together", "job/statements", "job/processes",
        "job/devices",
        "job/small_messages", "errors", "log", "collectives/wire/transport", "sync/exact_sends",
        "channels/messages/comparisons", "inference/together",
    )
)  # fmt: skip
#: functions before an operation, which check arguments that are equal on all ranks, and after its
#: last gate, which only store results
KEPT = {
    ("__init__.py", "save_state"), ("__init__.py", "load_state"),
    ("__init__.py", "attach"), ("steps.py", "living"),
    ("attach.py", "_ranks"), ("attach.py", "attach"),
    ("attach.py", "is_sharded"), ("attach.py", "<genexpr>"), ("attach.py", "<listcomp>"),
    ("__init__.py", "__getattr__"),
    ("attach.py", "unwrapped"), ("weights.py", "members_of"), ("weights.py", "mesh_ranks"),
    ("weights.py", "<genexpr>"), ("weights.py", "<setcomp>"),
    ("island_masters.py", "ranks_of_model"), ("topology.py", "ranks_of"),
    ("membership.py", "post"), ("transfer.py", "send"),
    ("transfer.py", "expect"), ("sync_follower.py", "close"),
    ("sync_follower.py", "resume"), ("kept_gradients.py", "stop"),
    ("frozen.py", "_natively"), ("frozen.py", "gather"),
    ("frozen.py", "_put"), ("frozen.py", "_gather"),
    ("frozen.py", "_stretches"), ("members.py", "chunk"),
    ("all_gather_all_to_all.py", "gather_words"), ("channel.py", "group"), ("channel.py", "meter"),
    ("parameter_gathers.py", "make_dist_allgather_fn"), ("scope.py", "get"),
    ("steps.py", "transfer"), ("steps.py", "steps"), ("handle.py", "_advance"),
}  # fmt: skip
#: owners of C functions that fail only for lack of memory: containers, types
HARMLESS = (dict, list, set, tuple, str, bytes, frozenset, int, float, type, deque, Counter)
#: other such functions: they inspect objects and clocks
LOOKS = {
    "isinstance", "len", "getattr", "setattr", "hasattr", "callable", "id", "iter", "next", "min",
    "max", "repr", "issubclass", "hash", "perf_counter", "monotonic", "sorted", "any", "all",
    "sum", "vars", "object.__setattr__", "time", "sleep", "print", "lock.__enter__",
    "lock.__exit__",  # skipping it would hold the lock forever
}  # fmt: skip
#: standard modules that are mere syntax
SYNTAX = (
    "contextlib", "functools", "collections", "abc", "typing", "dataclasses", "enum", "weakref",
    "threading", "operator", "_weakrefset", "inspect",
)  # fmt: skip


class Injected(OSError, RuntimeError):
    """The injected failure: of a file, the network or torch."""


@dataclass
class Outcome:
    """Results of all failures, equal on all ranks except for ``problems``."""

    tried: int = 0
    failed: int = 0
    longest_s: float = 0.0
    problems: list[str] = field(default_factory=list)


@dataclass
class Steps:
    """Counts the steps that can fail, and makes one fail.

    Attributes:
        fails_at: number of the failing step; None: no failure.
        inside: whether only steps inside operations count: an attach looks at the model in front of
            its own, to find the ranks of it.
        found: number of steps so far.
        where: the step that failed.
    """

    fails_at: int | None = None
    inside: bool = False
    found: int = 0
    where: str = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        caller = frame if event == "c_call" else frame.f_back
        if event not in ("call", "c_call") or caller is None or not _counts(caller):
            return
        if event == "c_call":
            called = argument.__qualname__
            if called in LOOKS or isinstance(getattr(argument, "__self__", None), HARMLESS):
                return
        else:
            called = frame.f_code.co_name
            if _is_own(frame) or str(frame.f_globals.get("__name__")).startswith(SYNTAX):
                return
        if not here.operations and (self.inside or _is_upstreams(frame)):
            return
        self.found += 1
        if self.found - 1 == self.fails_at:
            place = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
            self.where = f"{place} {caller.f_code.co_name}: {called}"
            sys.setprofile(None)
            raise Injected(self.where)


def _is_upstreams(frame: FrameType | None) -> bool:
    """Return whether DeepSpeed runs or is called."""
    while frame is not None:
        if "/site-packages/deepspeed/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _is_own(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith((HERE, PATCHES, "<"))


def _counts(frame: FrameType) -> bool:
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if not file.startswith((HERE, PATCHES)) or file.endswith(SPARED):
        return False
    return (Path(file).name, name) not in KEPT


@contextlib.contextmanager
def steps(fails_at: int | None = None, inside: bool = False) -> Iterator[Steps]:
    """Count the steps of the body, and make one fail."""
    counter = Steps(fails_at, inside)
    sys.setprofile(counter)
    try:
        yield counter
    finally:
        sys.setprofile(None)
