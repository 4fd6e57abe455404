"""Update the upstream releases named in pages to those of the package's requirements."""

from __future__ import annotations

import re
from collections.abc import Mapping

from packaging.requirements import Requirement

from hybridcomp.patches.ds import requirement as ds
from hybridcomp.patches.mcore import requirement as mcore

DEEPSPEED, MEGATRON = "DeepSpeed", "megatron-core"
#: page that quotes a message with DeepSpeed's requirement
ERRORS = "errors.md"
#: name in sentences -> requirement
REQUIREMENTS: Mapping[str, str] = {DEEPSPEED: ds.REQUIREMENT, MEGATRON: mcore.REQUIREMENT}
#: page below docs/ -> upstreams whose releases it names. For megatron-core only the first range is
#: updated, since its other releases in pages describe a script or measurement
PAGES: Mapping[str, tuple[str, ...]] = {
    "../README.md": (DEEPSPEED, MEGATRON),
    "getting_started.md": (DEEPSPEED, MEGATRON),
    "engines/deepspeed.md": (DEEPSPEED,),
    "engines/megatron.md": (MEGATRON,),
    "engines/neox.md": (DEEPSPEED,),
    ERRORS: (DEEPSPEED,),
}
#: minor releases in a sentence: "0.19", "0.13 to 0.19", but not the patch release 0.19.8
_MINORS = r"\d+\.\d+(?: to \d+\.\d+)?(?![.\d])"
_SPAN = r"\d+\.\d+ to \d+\.\d+"


def minors(requirement: str) -> str:
    """Format the minor releases of a range: ``0.13 to 0.19``."""
    limits = {limit.operator: limit.version for limit in Requirement(requirement).specifier}
    major, oldest = map(int, limits[">="].split(".")[:2])
    newest = int(limits["<"].split(".")[1]) - 1
    first, last = f"{major}.{oldest}", f"{major}.{newest}"
    return first if first == last else f"{first} to {last}"


def current(page: str, text: str) -> str:
    """Return a page's text with the releases of the current requirements."""
    if page == ERRORS:
        return re.sub(r"needs deepspeed [^,]+, < [\d.]+,", f"needs {ds.REQUIREMENT},", text)
    for name in PAGES[page]:
        found_in, count = (_MINORS, 0) if name == DEEPSPEED else (_SPAN, 1)
        words = f"{name} {minors(REQUIREMENTS[name])}"
        text, found = re.subn(f"{name} {found_in}", words, text, count=count)
        if not found:
            raise ValueError(f"docs/{page}: expected a sentence with {name} and its releases")
    return text
