"""What upstream's releases bind to the names of the seams, by ``upstream.json``; stand-ins of it.

``scripts/read_upstream.py`` writes the file from the archives that upstream has published.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("upstream.json")
RECORDED: dict[str, Any] = json.loads(FILE.read_text())


def versions(name: str) -> list[str]:
    """The versions of an upstream that the file has."""
    return list(RECORDED[name]["archives"])


def bound(name: str, version: str) -> dict[str, str]:
    """By ``module:qualified.name`` what a version binds to it."""
    return {
        symbol: next(text for text, having in ways.items() if version in having)
        for symbol, ways in RECORDED[name]["symbols"].items()
    }


def parameters(text: str) -> tuple[str, ...] | None:
    """The names of the parameters of what is bound; None where it is no function."""
    if not text.removeprefix("static ").startswith("def "):
        return None
    return tuple(inspect.signature(_function("it", text)).parameters)


def stand_in(symbol: str, text: str) -> None:
    """Put what is bound to a name into modules of ``sys.modules``, which are made where missing."""
    module, _, qualname = symbol.partition(":")
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        if name not in sys.modules:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = []
    owner: Any = sys.modules[module]
    *path, last = qualname.split(".")
    for part in path:
        if not hasattr(owner, part):
            setattr(owner, part, type(part, (), {}))
        owner = getattr(owner, part)
    if text != "absent":
        setattr(owner, last, _made(last, text))


def _made(name: str, text: str) -> Any:
    if text.startswith("static "):
        return staticmethod(_function(name, text.removeprefix("static ")))
    if text.startswith("def "):
        return _function(name, text)
    if text.startswith("import "):
        return importlib.import_module(text.removeprefix("import "))
    assert text.startswith("= torch."), f"{name} is bound by {text}"
    module, _, attribute = text.removeprefix("= ").rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _function(name: str, text: str) -> Callable[..., str]:
    """A function with the parameters that are written in ``text``."""
    scope: dict[str, Any] = {}
    exec(f"def {name}{text.removeprefix('static ').removeprefix('def ')}: return 'original'", scope)
    found: Callable[..., str] = scope[name]
    return found
