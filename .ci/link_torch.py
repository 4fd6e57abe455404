"""Link torch, and what it needs, into the packages of another environment: link_torch.py FOLDER.

A second download of torch would take longer than everything that the wheel is tried with.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def closure(name: str) -> Iterator[Distribution]:
    """Yield the distribution ``name`` and every installed one that it needs."""
    waiting, seen = [name], set()
    while waiting:
        if (name := waiting.pop()) in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue  # needed on another platform only, or optional
        yield found
        requirements = map(Requirement, found.requires or ())
        waiting += [
            need.name for need in requirements
            if need.marker is None or need.marker.evaluate({"extra": ""})
        ]  # fmt: skip


def main(folder: Path) -> None:
    """Link the top-level files and folders of all of them into ``folder``."""
    for found in closure("torch"):
        for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (link := folder / name).exists():
                link.symlink_to(Path(str(found.locate_file(name))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
