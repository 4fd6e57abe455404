"""Imports among modules: no circle, in types neither; each module alone; few in the large rooms."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from tests.paths import ROOT

PACKAGE = ROOT / "hybridcomp"


def module_of(path: Path) -> str:
    """``hybridcomp/codecs/zfp.py`` -> ``hybridcomp.codecs.zfp``, a package without ``__init__``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, Path]:
    """Every module of the package; ``patches`` is a link, and one of its rooms."""
    rooms = (path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__")
    files = [*PACKAGE.glob("*.py"), *(path for room in rooms for path in room.glob("**/*.py"))]
    return {module_of(path): path for path in files}


def at_import(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements outside of functions: those under TYPE_CHECKING are among them."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield node
            elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                waiting.append(node)


def targets(node: ast.Import | ast.ImportFrom, modules: dict[str, Path]) -> set[str]:
    """The modules of the package that a statement names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & set(modules)
    found = {f"{node.module}.{alias.name}" for alias in node.names} & set(modules)
    if len(found) < len(node.names) and node.module in modules:
        found.add(node.module)
    return found


def graph() -> dict[str, set[str]]:
    """By module the modules that it imports, inside of functions too: that hides a circle."""
    modules = sources()
    return {
        name: {
            target
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for target in targets(node, modules) - {name}
        }
        for name, path in modules.items()
    }


def reached(arrows: dict[str, set[str]], start: str) -> set[str]:
    """Everything that ``start`` imports, and what that imports."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for target in arrows[waiting.pop()] - seen:
            seen.add(target)
            waiting.append(target)
    return seen


def test_no_circle() -> None:
    arrows = graph()
    below = {name: reached(arrows, name) for name in arrows}
    circles = {
        frozenset(other for other in below[name] if name in below[other])
        for name in arrows
        if name in below[name]
    }
    assert not circles, [sorted(circle) for circle in circles]


ALONE = """
import importlib, sys
for name in sys.argv[1:]:
    room = ".".join(name.split(".")[:2])
    for other in list(sys.modules):  # imports run one way: rooms below stay
        if other == "hybridcomp" or other == room or other.startswith(room + "."):
            if not other.startswith("hybridcomp.kernels._"):  # compiled ones load once
                del sys.modules[other]
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(f"{name} alone: {error}")
"""


#: modules that need a package which hybridcomp does not bring -> that package
NEEDS = {
    "hybridcomp.inference.verl_engine": "verl",
    "hybridcomp.inference.vllm_trainer": "vllm",
    "hybridcomp.inference.vllm_worker": "vllm",
    "hybridcomp.kernels.build": "pybind11",  # brought by pip while it builds
    "hybridcomp.patches.trainers.hugging_face": "transformers",
    "hybridcomp.patches.trainers.lightning": "lightning",
    "hybridcomp.patches.trainers.torchtitan": "torchtitan",
}


def test_every_module_can_be_imported_alone() -> None:
    absent = {name for name, package in NEEDS.items() if find_spec(package) is None}
    names = sorted(name for name in sources() if not name.endswith("__main__"))
    names = [name for name in names if name not in absent]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *names], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
