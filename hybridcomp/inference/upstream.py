"""Check an inference engine before use: its version, and the parameters of what an adapter calls.

An adapter lists what it calls and overrides as seams; none of them is replaced. They are the only
record of signatures and of the version: stand-ins in the tests are held against them, and so is the
engine itself wherever it is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from hybridcomp.seams.patching import Patch, Seam

#: the versions of which the signatures are; others are refused
VLLM = "vllm >= 0.33, < 0.34"
VERL = "verl >= 0.9.1, < 0.10"
SGLANG = "sglang >= 0.5.23, < 0.6"


def _itself(original: Any) -> Any:
    return original


@functools.cache
def check(seams: tuple[Seam, ...]) -> None:
    """Raise SeamError unless the engine has the version and the parameters of all ``seams``."""
    for seam in seams:
        Patch(seam, _itself).check()


def names(seams: Iterable[Seam]) -> list[str]:
    """Return what the seams name, for messages and documents."""
    return [f"{seam.module}.{seam.qualname}" for seam in seams]
