"""Imports among modules: no cycle, not even for types; each module alone; few in large rooms."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from tests.paths import ROOT
from tests.ranks import RankPool
from tests.scripts_on_ranks import run_python

PACKAGE = ROOT / "hybridcomp"
Import = ast.Import | ast.ImportFrom


def module_of(path: Path) -> str:
    """Convert ``hybridcomp/codecs/zfp.py`` to ``hybridcomp.codecs.zfp``, without ``__init__``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, Path]:
    """Return every module of the package; ``patches`` is a link, and one of its rooms."""
    rooms = (path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__")
    files = [*PACKAGE.glob("*.py"), *(path for room in rooms for path in room.glob("**/*.py"))]
    return {module_of(path): path for path in files}


@dataclass(frozen=True)
class Outline:
    """A file's import statements, and the names of its classes."""

    early: list[Import]  # that run when the file is imported
    late: list[Import]  # inside functions and for types, which can hide a cycle
    classes: list[str]


@cache
def outline(path: Path) -> Outline:
    """Return what is kept of a file: its tree is large."""
    tree = ast.parse(path.read_text())
    found = Outline([], [], [node.name for node in tree.body if isinstance(node, ast.ClassDef)])
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, is_late = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            (found.late if is_late else found.early).append(node)
        is_late |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_late |= isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):  # statements
            waiting += [(child, is_late) for child in getattr(node, field, ())]
    return found


def targets(node: Import, modules: dict[str, Path]) -> set[str]:
    """Return the package's modules that a statement names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & set(modules)
    found = {f"{node.module}.{alias.name}" for alias in node.names} & set(modules)
    if len(found) < len(node.names) and node.module in modules:
        found.add(node.module)
    return found


def graph(late: bool = True) -> dict[str, set[str]]:
    """Return each module's imports; ``late``: also those that importing it does not run."""
    modules, found = sources(), dict[str, set[str]]()
    for name, path in modules.items():
        seen = outline(path)
        nodes = seen.early + seen.late * late
        found[name] = {target for node in nodes for target in targets(node, modules)} - {name}
    return found


def reached(arrows: dict[str, set[str]], start: str) -> set[str]:
    """Return all modules that ``start`` imports, directly or not."""
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


class Stored:
    """Modules that have run: one imported later finds those that it imports, and no others.

    Each module thus runs once, with exactly the modules that importing it alone loads.
    """

    def __init__(self, below: dict[str, set[str]]) -> None:
        self.modules: dict[str, ModuleType] = {}
        self.below = below

    def import_alone(self, name: str) -> None:
        """Import ``name`` with no other module of the package loaded, and store it."""
        for other in list(filter(_is_ours, sys.modules)):
            self._place(other, None)
        for other in self.below[name] & set(self.modules):
            self._place(other, self.modules[other])
        import_module(name)
        loaded = {other: found for other, found in sys.modules.items() if _is_ours(other)}
        self.modules = {**loaded, **self.modules, name: loaded[name]}

    def _place(self, name: str, module: ModuleType | None) -> None:
        """Put a module where an import finds it, or take it from there."""
        parent, _, child = name.rpartition(".")
        package = vars(self.modules[parent]) if parent in self.modules else {}
        if module is None:
            del sys.modules[name]
            package.pop(child, None)
        else:
            sys.modules[name] = package[child] = module


def _is_ours(name: str) -> bool:
    # compiled modules load once
    return name.partition(".")[0] == "hybridcomp" and not name.startswith("hybridcomp.kernels._")


def import_each_alone(below: dict[str, set[str]]) -> list[str]:
    """Import each of the modules alone, in this process; return failures with reasons.

    ``below``: module -> all that it imports, which come before it.
    """
    stored, failures = Stored(below), []
    for name in below:
        try:
            stored.import_alone(name)
        except (ImportError, AttributeError) as error:
            failures.append(f"{name} alone: {error!r}")
    return failures


#: modules that need a package that hybridcomp does not require -> that package
NEEDS = {
    "hybridcomp.inference.verl_engine": "verl",
    "hybridcomp.inference.vllm_trainer": "vllm",
    "hybridcomp.inference.vllm_worker": "vllm",
    "hybridcomp.kernels.build": "setuptools",  # provided by pip during the build
    "hybridcomp.patches.trainers.hugging_face": "transformers",
    "hybridcomp.patches.trainers.lightning": "lightning",
    "hybridcomp.patches.trainers.torchtitan": "torchtitan",
}


@pytest.mark.nightly
def test_every_module_can_be_imported_alone() -> None:
    absent = {name for name, package in NEEDS.items() if find_spec(package) is None}
    arrows = graph(late=False)
    for name in arrows:
        arrows[name] |= {name.rpartition(".")[0]} - {""}  # importing a module imports its packages
    below = {name: reached(arrows, name) - {name} for name in arrows}
    # importing a module begins with its package: where that imports the module, it is tried with it
    alone = [name for name in arrows if name not in below.get(name.rpartition(".")[0], ())]
    names = sorted(set(alone) - absent, key=lambda name: len(below[name]))
    below = {name: below[name] for name in names if not name.endswith("__main__")}
    with RankPool(1) as pool:
        assert pool.run(import_each_alone, below) == [[]]


#: modules that only jobs which freeze, resume or generate need
UNUSED = (
    r"hybridcomp\.(elastic|gener|patches\.(ds\.)?gener)|hybridcomp.*(freez|patches\.frozen|frozen_|"
    r"stepped|trained_gathers|\.resumed|\.replanned|common\.first_rank|ds\.checkpoint\.conversion)"
)


def test_a_job_imports_nothing_of_what_it_does_not_use() -> None:
    code = (
        "import re, sys, deepspeed, torch.distributed.fsdp, hybridcomp\n"
        "hybridcomp.install({'dp': 'bf16', 'gathered': 'stepcode', 'generate': {}})\n"
        "import hybridcomp.session.process, hybridcomp.patches.ds.attach\n"
        "import hybridcomp.patches.torch.attach\n"
        f"print([name for name in sys.modules if re.match({UNUSED!r}, name)])\n"
        "hybridcomp.generate\n"
        "assert 'hybridcomp.generation' in sys.modules\n"
    )
    found = run_python("-c", code, anew=True)
    assert (found.returncode, found.stdout.splitlines()[-1]) == (0, "[]"), found.stderr
