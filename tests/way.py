"""Trace which functions of the package a message passes from ``Channel.run`` down."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.paths import ROOT

#: where ``hybridcomp.patches`` lies
FOLDERS = ("hybridcomp", "patches")


class Way:
    """Functions and files of the package that are entered below ``Channel.run``.

    Attributes:
        files: in the order in which they are met.
        functions: their code objects.
        switches: calls from a function of one file to one of another.
    """

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.functions: set[CodeType] = set()
        self.switches = 0
        self._known: dict[str, str] = {}  # file name of a code -> path below ROOT, or ""

    def _file(self, frame: FrameType | None) -> str:
        name = "" if frame is None else frame.f_code.co_filename
        if name not in self._known:
            path = Path(name).resolve() if name else ROOT
            ours = path.is_relative_to(ROOT) and path.parts[len(ROOT.parts) :][:1] in [
                (folder,) for folder in FOLDERS
            ]
            self._known[name] = str(path.relative_to(ROOT)) if ours else ""
        return self._known[name]

    def enter(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        file = self._file(frame)
        if not file:
            return
        self.files.setdefault(file)
        if not frame.f_code.co_name.endswith("comp>"):  # which later Pythons do not call
            self.functions.add(frame.f_code)
        before = frame.f_back
        while before is not None and not self._file(before):
            before = before.f_back
        self.switches += before is not None and self._file(before) != file

    def size(self) -> tuple[int, int, int]:
        """Return the numbers of files, functions and switches."""
        return len(self.files), len(self.functions), self.switches


@contextmanager
def followed(ways: list[tuple[str, Way]]) -> Iterator[None]:
    """Append the dimension and the way of every message that is sent encoded inside to ``ways``."""
    from hybridcomp.channels import Channel

    original = Channel.run

    def run(self: Channel, message: Any, *, native: Any, encoded: Any) -> Any:
        way = Way()
        was_encoded = []

        def noted(result: Any) -> Any:
            was_encoded.append(True)
            return encoded(result)

        sys.setprofile(way.enter)
        try:
            result = original(self, message, native=native, encoded=noted)
            if hasattr(result, "wait"):
                result.wait()
            return result
        finally:
            sys.setprofile(None)
            if was_encoded:
                ways.append((self.dimension, way))

    Channel.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        Channel.run = original  # type: ignore[method-assign]
