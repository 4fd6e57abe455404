#!/usr/bin/env python3
"""Compile every CUDA kernel for every architecture and read what came out, without a GPU.

    scripts/bench/read_gpu_kernels.py            # all, minutes; goes on where it was
    scripts/bench/read_gpu_kernels.py --architectures 90 --only casts radix
    scripts/bench/read_gpu_kernels.py --check    # exit 1 where something is spilled

Needs CuPy and NVRTC (hybridcomp[cuda13], or cuda12 with --architectures 70), and nvdisasm for the
counts of instructions: on the path, or Triton's. What was read is kept in --json, image by image,
with a digest of the sources; --md becomes the page of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from bench.gpu_bench import kernel_page
from bench.gpu_bench.machine_code import ROOM, Kernel, find_disassembler, kernels
from hybridcomp.errors import CodecError
from hybridcomp.kernels.cuda import images

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
#: settings of blockint; those of the tables come first
SETTINGS = (
    "8", "4", "4 gaussian", "4 rotate", "2", "3", "5", "6", "7", "2 rotate", "3 rotate",
    "4 rotate gaussian",
)  # fmt: skip

Image = tuple[str, str]  # a source, and the setting that it is compiled for


def wanted(only: Sequence[str] = ()) -> Iterator[Image]:
    """Return every image, for all dtypes; with ``only``, of sources with one of these in them."""
    sources = [path.name for path in sorted(images.FOLDER.glob("*.cu"))]
    sources = [s for s in sources if not only or any(part in s for part in only)]
    blockint = [source for source in sources if source.startswith("blockint")]
    yield from ((source, "") for source in sources if source not in blockint)
    yield from ((source, setting) for setting in SETTINGS for source in blockint)


def macros(setting: str) -> tuple[str, ...]:
    """Return the compiler's macros for a setting such as ``4 rotate``."""
    bits, *words = setting.split() or [""]
    named = tuple(f"HC_{word.upper()}=1" for word in words)
    return (f"HC_BITS={bits}", *named) if bits else ()


@cache
def digest_of(source: str) -> str:
    """Return the digest of a source, of all that it includes, and of how it is compiled."""
    digest, todo, seen = hashlib.sha256(" ".join(images.OPTIONS[:-2]).encode()), [source], set()
    while todo:
        name = todo.pop()
        place = next(f / name for f in (images.FOLDER, images.FORMATS) if (f / name).is_file())
        text = place.read_text()
        digest.update(text.encode())
        seen.add(name)
        todo += sorted(set(re.findall(r'^#include "(.+)"', text, re.MULTILINE)) - seen - {*todo})
    return digest.hexdigest()[:16]


class Book:
    """File of the kernels read so far; rows of other sources or compilers are dropped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.facts: dict[str, Any] = {
            "nvrtc": ".".join(map(str, images.compiler()[0])),
            "sources": {path.name: digest_of(path.name) for path in images.FOLDER.glob("*.cu")},
        }
        found = json.loads(path.read_text()) if path.is_file() else {"images": {}}
        known = found.get("sources", {}) if found.get("nvrtc") == self.facts["nvrtc"] else {}
        self.rows: dict[str, list[dict[str, Any]]] = {
            key: rows
            for key, rows in found["images"].items()
            if known.get(source := key.split(" ")[1]) == self.facts["sources"].get(source)
        }

    @staticmethod
    def key(architecture: int, image: Image) -> str:
        """Name an image."""
        return " ".join((str(architecture), *image)).strip()

    def put(self, key: str, found: Sequence[Kernel]) -> None:
        """Keep the kernels of an image."""
        self.rows[key] = [asdict(kernel) for kernel in found]
        text = json.dumps({**self.facts, "images": dict(sorted(self.rows.items()))})
        self._path.write_text(text.replace("}], ", "}],\n") + "\n")

    def missing(self) -> list[str]:
        """Return images that are not there, for any architecture, with how many of these."""
        found = []
        for image in wanted():
            count = sum(self.key(architecture, image) not in self.rows for architecture in ROOM)
            if count:
                found.append(f"{' '.join(image).strip()} ({count} of {len(ROOM)})")
        return found

    def kernels(self) -> Iterator[tuple[int, str, str, Kernel]]:
        """Architecture, source, setting and kernel of everything that was read."""
        for key, rows in self.rows.items():
            architecture, source, *setting = key.split(" ", 2)
            for row in rows:
                yield int(architecture), source, "".join(setting), Kernel(**row)


def read(book: Book, asked: argparse.Namespace) -> list[str]:
    """Compile what the book lacks, two at a time; return the images that could not be."""
    disassembler = asked.nvdisasm or find_disassembler()
    if disassembler is None:
        print("no nvdisasm: instructions are not counted", file=sys.stderr)
    todo = [
        (architecture, image)
        for image in wanted(asked.only)
        for architecture in asked.architectures
        if Book.key(architecture, image) not in book.rows
    ]
    failed = []

    def one(case: tuple[int, Image]) -> list[Kernel] | str:
        architecture, (source, setting) = case
        try:
            return kernels(source, macros(setting), architecture, disassembler)
        except CodecError as error:
            return f"{Book.key(*case)}: {error}"

    with ThreadPoolExecutor(asked.jobs) as threads:
        for number, (case, found) in enumerate(zip(todo, threads.map(one, todo), strict=True), 1):
            if isinstance(found, str):
                failed.append(found)
                continue
            book.put(Book.key(*case), found)
            print(f"[{number}/{len(todo)}] {Book.key(*case)}", file=sys.stderr, flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, write the page; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--architectures", type=int, nargs="+", default=list(ROOM), choices=list(ROOM))
    add("--only", nargs="+", default=(), metavar="NAME", help="parts of names of sources")
    add("--jobs", type=int, default=2)
    add("--nvdisasm", metavar="FILE")
    add("--json", type=Path, default=RESULTS / "gpu_kernels.json")
    add("--md", type=Path, default=RESULTS / "gpu_kernels.md")
    add("--check", action="store_true")
    asked = parser.parse_args(arguments)
    book = Book(asked.json)
    problems = read(book, asked)
    found = list(book.kernels())
    asked.md.write_text(kernel_page.document(found, book.facts, book.missing()))
    problems += kernel_page.spilled(found)
    for line in problems:
        print(line, file=sys.stderr)
    return int(bool(problems) and asked.check)


if __name__ == "__main__":
    sys.exit(main())
