"""Check when the machine is idle enough for timing, and how many ranks fit its memory."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path


def ticks() -> tuple[int, int]:
    """Return busy and total clock ticks of all cores since boot."""
    figures = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    total = sum(figures)
    return total - figures[3] - figures[4], total


def busy(seconds: float = 1.0) -> float:
    """Return the share of the cores that other processes use, sampled for ``seconds``; 0 to 1."""
    then = ticks()
    time.sleep(seconds)
    now = ticks()
    return (now[0] - then[0]) / max(1, now[1] - then[1])


def gpu_name() -> str:
    """Return the name of the first GPU from its driver, without creating a context."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "a GPU without a name"
    return found.stdout.splitlines()[0].strip()


#: GB per rank with torch, DeepSpeed and the example's model: 0.25 to 0.5 here
RANK_NBYTES = 0.5e9


def room() -> int:
    """Return the number of ranks that fit the free memory, at least 2."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return max(2, int(1024 * free / RANK_NBYTES))


def wait_until_quiet(limit: float, patience: float, force: bool) -> float:
    """Wait until the load is at most ``limit``; return it. Raises SystemExit after ``patience``."""
    deadline = time.monotonic() + patience
    found = busy()
    while found > limit and not force:
        if time.monotonic() > deadline:
            raise SystemExit(
                f"bench_training: {found:.0%} of the cores are busy (load "
                f"{os.getloadavg()[0]:.1f}), expected at most {limit:.0%}; stop what runs beside, "
                "or --force to time nevertheless. What is measured stays; start again to go on"
            )
        found = busy()
    return found
