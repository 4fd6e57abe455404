"""Signatures of upstream releases for the seams, from ``upstream.json``, and stand-ins from them.

``scripts/read_upstream.py`` writes the file from upstream's published archives.
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

import pytest

from hybridcomp.errors import SeamError
from hybridcomp.patches.registry import patches_of
from hybridcomp.seams.patching import Seam, apply_all, revert_all

FILE = Path(__file__).with_name("upstream.json")
RECORDED: dict[str, Any] = json.loads(FILE.read_text())


def versions(name: str) -> list[str]:
    """Return the recorded versions of an upstream."""
    return list(RECORDED[name]["archives"])


def bound(name: str, version: str) -> dict[str, str]:
    """Return a version's bindings by ``module:qualified.name``."""
    return {
        symbol: next(text for text, having in ways.items() if version in having)
        for symbol, ways in RECORDED[name]["symbols"].items()
    }


def raw(seam: Seam) -> Any:
    """Return the attribute that a seam names, as it stands in its owner."""
    owner, name = seam.owner_and_name()
    return inspect.getattr_static(owner, name)


def hold_to_revert(package: str) -> None:
    """Apply the patches of ``package``, which refuse a second application, and revert them."""
    fresh = patches_of(package)
    before = [raw(patch.seam) for patch in fresh]
    apply_all(fresh)
    assert all(raw(patch.seam) is not was for patch, was in zip(fresh, before, strict=True))
    with pytest.raises(SeamError, match="do not stack"):
        patches_of(package)[0].apply()
    revert_all(fresh)
    assert all(raw(patch.seam) is was for patch, was in zip(fresh, before, strict=True))


def parameters(text: str) -> tuple[str, ...] | None:
    """Return the parameter names of a binding; None if it is not a function."""
    if not text.removeprefix("static ").startswith("def "):
        return None
    return tuple(inspect.signature(_function("it", text)).parameters)


def stand_in(symbol: str, text: str) -> None:
    """Bind names in modules of ``sys.modules``, creating missing modules."""
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
    """Return a function with the parameters written in ``text``."""
    scope: dict[str, Any] = {}
    exec(f"def {name}{text.removeprefix('static ').removeprefix('def ')}: return 'original'", scope)
    found: Callable[..., str] = scope[name]
    return found
