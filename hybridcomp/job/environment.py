"""Name the environment variables that hybridcomp reads, and report unknown ones."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping

PREFIX = "HYBRIDCOMP_"
#: path of a file with a block, or with one under "compression"
CONFIG = f"{PREFIX}CONFIG"
#: path of the file into which the losses of a DeepSpeed engine are written
RECORD = f"{PREFIX}RECORD"
#: shows the traceback of a configuration mistake
TRACEBACK = f"{PREFIX}TRACEBACK"
#: runs GPT-NeoX on CPUs
NEOX_CPU = f"{PREFIX}NEOX_CPU"
#: path of the folder in which ``"when": "auto"`` saves verdicts; empty: none
CACHE = f"{PREFIX}CACHE"
#: variables that a job reads
VARIABLES = (CONFIG, RECORD, TRACEBACK, NEOX_CPU, CACHE)
#: variables that only tests and scripts of a checkout read, but that may be set in a job
CHECKOUT = tuple(
    PREFIX + name
    for name in (
        "EMULATED_WAVE", "FUZZ_CASES", "NCCL_DEVICE", "NIGHTLY", "SEED", "TEST_INSTALL",
        "UPSTREAM_NEWEST",
        "TEST_WORKERS", "TORCH_VENVS", "UPSTREAM_ARCHIVES",
    )
)  # fmt: skip


def unknown(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield a sentence about each variable with our prefix that no code reads."""
    for name in sorted(name for name in environment if name.startswith(PREFIX)):
        if name not in VARIABLES + CHECKOUT:
            ends = [known.removeprefix(PREFIX) for known in VARIABLES]
            near = difflib.get_close_matches(name.removeprefix(PREFIX), ends, n=1)
            todo = (
                f"did you mean {PREFIX}{near[0]}?" if near else f"there are {', '.join(VARIABLES)}"
            )
            yield f"{name} is not known and has no effect; {todo}"
