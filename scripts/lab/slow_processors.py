"""Ranks that each play a processor of their own, so many times slower than a core of this machine.

Ranks that share cores take what the others leave: one that computes alone is faster than beside
others, and its messages wait for a core. A quota of a control group does not mend that: it stops
the threads that move bytes as well, and a rank that has waited begins with a whole grant. Here the
main thread of a process sleeps in proportion to what it has computed (``slow_processor.c``): with
as many times as ranks have to share a core, each is as fast beside the others as it is alone.

A virtual machine gives a core that sleeps away, and gets it back late and with cold caches: so
something that gives way to everything else keeps the cores at work while ranks are limited.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.layout import LabError
from lab.namespaces import end_with_parent

SOURCE = Path(__file__).with_name("slow_processor.c")
VARIABLE = "HYBRIDCOMP_SLOW_PROCESSOR"
#: for the environment of ranks: what a process has freed stays its own. Memory that went back and
#: is touched anew costs a virtual machine microseconds a page, in whatever computes just then
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}


@dataclass(frozen=True)
class SlowProcessors:
    """Slower processors of the ranks. ``times``: how many times slower each is; () as they are.

    words: before a rank's command, they start it on its processor.
    """

    times: tuple[float, ...] = ()
    words: tuple[str, ...] = ()
    folder: Path | None = None
    _awake: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def limit(self, on: bool) -> None:
        """Give every rank its own processor, or one of the machine's (as at the beginning)."""
        for rank, times in enumerate(self.times):
            assert self.folder is not None
            with (self.folder / str(rank)).open("r+b") as file:
                file.write(struct.pack("d", times if on else 1.0))
        self._rest()
        if on and self.times:
            self._awake.extend(_busy(core) for core in sorted(os.sched_getaffinity(0)))

    def _rest(self) -> None:
        """Let cores sleep again that have nothing to do."""
        while self._awake:
            process = self._awake.pop()
            process.kill()
            process.wait()


@contextlib.contextmanager
def slow_processors(times: Sequence[float]) -> Iterator[SlowProcessors]:
    """Yield processors so many times slower, on which ranks start; they end with the context.

    Raises LabError where this machine cannot do that.
    """
    if not times:
        yield SlowProcessors()
        return
    with tempfile.TemporaryDirectory(prefix="slow_processors") as name:
        folder = Path(name)
        library = _compiled(folder)
        for rank in range(len(times)):
            (folder / str(rank)).write_bytes(struct.pack("d", 1.0))
        enter = f'LD_PRELOAD={library} {VARIABLE}={folder}/$RANK exec "$@"'
        found = SlowProcessors(tuple(times), ("sh", "-c", enter, "sh"), folder)
        try:
            yield found
        finally:
            found._rest()


def _busy(core: int) -> subprocess.Popen[bytes]:
    """Start a process that keeps ``core`` at work whenever nothing else wants it."""

    def give_way() -> None:
        end_with_parent()
        os.sched_setaffinity(0, {core})
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    words = [sys.executable, "-S", "-E", "-c", "while True: pass"]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, preexec_fn=give_way)


def _compiled(folder: Path) -> Path:
    library = folder / "slow_processor.so"
    words = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise LabError("no C compiler (cc): needed to play slower processors") from error
    if done.returncode:
        raise LabError(f"{SOURCE.name} does not compile: {done.stderr[-2000:]}")
    return library
