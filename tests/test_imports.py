"""Imports among modules: no cycle, not even for types; each module alone; few in large rooms."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

from tests.paths import ROOT
from tests.ranks import RankPool
from tests.scripts_on_ranks import run_python

PACKAGE = ROOT / "hybridcomp"


def module_of(path: Path) -> str:
    """Convert ``hybridcomp/codecs/zfp.py`` to ``hybridcomp.codecs.zfp``, without ``__init__``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, Path]:
    """Return every module of the package; ``patches`` is a link, and one of its rooms."""
    rooms = (path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__")
    files = [*PACKAGE.glob("*.py"), *(path for room in rooms for path in room.glob("**/*.py"))]
    return {module_of(path): path for path in files}


def at_import(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """Return the import statements outside functions, including those under TYPE_CHECKING."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield node
            elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                waiting.append(node)


def targets(node: ast.Import | ast.ImportFrom, modules: dict[str, Path]) -> set[str]:
    """Return the package's modules that a statement names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names} & set(modules)
    found = {f"{node.module}.{alias.name}" for alias in node.names} & set(modules)
    if len(found) < len(node.names) and node.module in modules:
        found.add(node.module)
    return found


def graph(nodes: Callable[[ast.Module], Iterable[ast.AST]] = ast.walk) -> dict[str, set[str]]:
    """Return each module's imports, also inside functions, which can hide a cycle.

    ``nodes``: ``at_import`` for imports outside functions only.
    """
    modules = sources()
    return {
        name: {
            target
            for node in nodes(ast.parse(path.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for target in targets(node, modules) - {name}
        }
        for name, path in modules.items()
    }


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


class Stored(MetaPathFinder, Loader):
    """Importer that restores a stored module without running it, and then its imports.

    Each module thus runs once, with exactly the modules that importing it alone loads.
    """

    def __init__(self, imports: dict[str, set[str]]) -> None:
        self.modules: dict[str, ModuleType] = {}
        self.imports = imports

    def import_alone(self, name: str) -> None:
        """Import ``name`` with no other module of the package loaded, and store it."""
        for other in [other for other in sys.modules if other.partition(".")[0] == "hybridcomp"]:
            if other.startswith("hybridcomp.kernels._"):  # compiled modules load once
                continue
            del sys.modules[other]
            parent, _, child = other.rpartition(".")
            if parent in self.modules:
                vars(self.modules[parent]).pop(child, None)
        self.modules[name] = import_module(name)

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        """Return the stored module's spec."""
        return spec_from_loader(name, self) if name in self.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Take the stored module."""
        return self.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Import its imports."""
        for other in self.imports[module.__name__]:
            import_module(other)


def import_each_alone(names: list[str]) -> list[str]:
    """Import each of the modules alone, in this process; return failures with reasons."""
    stored, failures = Stored(graph(at_import)), []
    sys.meta_path.insert(0, stored)
    for name in names:
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
    "hybridcomp.kernels.build": "pybind11",  # provided by pip during the build
    "hybridcomp.patches.trainers.hugging_face": "transformers",
    "hybridcomp.patches.trainers.lightning": "lightning",
    "hybridcomp.patches.trainers.torchtitan": "torchtitan",
}


def test_every_module_can_be_imported_alone() -> None:
    absent = {name for name, package in NEEDS.items() if find_spec(package) is None}
    arrows = graph()
    names = [name for name in arrows if not name.endswith("__main__") and name not in absent]
    names.sort(key=lambda name: len(reached(arrows, name)))  # a module's imports come before it
    with RankPool(1) as pool:
        assert pool.run(import_each_alone, names) == [[]]


#: modules that only jobs which freeze, resume or generate need
UNUSED = (
    r"hybridcomp\.(elastic|gener|patches\.(ds\.)?gener)|hybridcomp.*(freez|patches\.frozen|frozen_|"
    r"stepped|trained_gathers|\.resumed|\.replanned|common\.first_rank|ds\.conversion)"
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
