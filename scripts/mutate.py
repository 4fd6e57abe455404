#!/usr/bin/env python3
"""Mutation testing: change one expression at a time and count how often the module's tests fail.

mutate.py                        100 mutations of the files that the last commit changed
mutate.py --since COMMIT         of the files that changed since COMMIT
mutate.py hybridcomp/channels    of these files and folders, changed or not

A mutation swaps a comparison or an operator, negates a condition, changes a constant, or removes a
call whose result nobody uses. Its tests are in the folder of tests/ that mirrors the module: first
``test_MODULE.py``, then the files that name the module, then all other files, up to the first
failure. They run in a copy of the checkout, so the working tree never holds a mutation. Each
survivor is printed with its line: a gap in the tests, or a change that makes no difference. A
mutation whose tests reach ``--limit`` does not count. The exit status is 1 if the tests kill less
than the share ``--least`` of the counted mutations, and 2 if a test fails without a mutation too.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult, ast.Mod: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
#: folders that git diff covers; hybridcomp/patches is a link to patches
ROOMS = ("hybridcomp", "patches")
#: expressions never mutated besides types and decorators: messages, including those of assertions
SKIPPED = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutation:
    """Replace the text between two byte offsets of a file."""

    path: Path  # below the root of the checkout
    line: int
    start: int
    end: int
    before: str
    after: str

    def apply(self, source: bytes) -> bytes:
        """Return ``source``, the file's bytes, after the mutation."""
        return source[: self.start] + self.after.encode() + source[self.end :]

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {_short(self.before)} -> {_short(self.after)}"


def mutations_of(path: Path, root: Path) -> list[Mutation]:
    """List every mutation of the Python file ``path``, relative to ``root``."""
    source = (root / path).read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in _expressions(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        assert node.end_lineno is not None and node.end_col_offset is not None
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = source[start:end].decode()
        found += [Mutation(path, node.lineno, start, end, before, after) for after in _after(node)]
    return found


def _expressions(tree: ast.AST) -> Iterator[ast.expr | ast.Expr]:
    """Walk the expressions that a mutation may change."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, SKIPPED):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            if isinstance(node, ast.expr | ast.Expr):
                yield node
            yield from _expressions(node)


def _after(node: ast.expr | ast.Expr) -> Iterator[str]:
    """Yield the mutated texts of a node."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Expr(value=ast.Call()):
            yield "pass"
        case ast.Compare():
            for place, operator in enumerate(changed.ops):
                changed.ops[place] = SWAPS[type(operator)]()  # type: ignore[call-overload]
                yield f"({ast.unparse(changed)})"
                changed.ops[place] = operator
        case ast.BinOp() | ast.BoolOp() if type(changed.op) in SWAPS:
            changed.op = SWAPS[type(changed.op)]()  # type: ignore[assignment]
            yield f"({ast.unparse(changed)})"
        case ast.UnaryOp(op=ast.Not()):
            yield f"(not not {ast.unparse(changed.operand)})"
        case ast.IfExp():
            changed.test = ast.UnaryOp(ast.Not(), changed.test)
            yield f"({ast.unparse(changed)})"
        case ast.Name() if changed.id in NAMES and isinstance(changed.ctx, ast.Load):
            yield NAMES[changed.id]
        case ast.Constant(value=bool()):
            yield str(not changed.value)
        case ast.Constant(value=int() | float()):
            yield f"({changed.value!r} + 1)"


def drawn(paths: Iterable[Path], count: int, seed: int, root: Path) -> list[Mutation]:
    """Draw at most ``count`` mutations of the files ``paths``, in proportion to their sizes."""
    every = [mutation for path in sorted(paths) for mutation in mutations_of(path, root)]
    return random.Random(seed).sample(every, min(count, len(every)))


def tests_of(path: Path, root: Path) -> list[Path]:
    """List the test files for a module, those most likely to fail first."""
    room = root / "tests" / Path(*path.parent.parts[path.parts[0] == "hybridcomp" :])
    while not (files := sorted(room.glob("**/test_*.py"))) and room != root:
        room = room.parent
    stem = path.parent.name if path.stem == "__init__" else path.stem
    word = re.compile(rf"\b{re.escape(stem)}\b")
    return sorted(
        files, key=lambda file: (file.stem != f"test_{stem}", not word.search(file.read_text()))
    )


def changed_since(commit: str) -> list[Path]:
    """List the modules of the package that differ from ``commit``."""
    command = ["git", "diff", "--name-only", "--diff-filter=d", commit, "--", *ROOMS]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [Path(name) for name in names.split() if name.endswith(".py")]


def modules_in(paths: Iterable[Path]) -> list[Path]:
    """List the modules among ``paths``, including their folders."""
    files = [file for path in paths for file in (path, *path.rglob("*.py"))]
    return [file.resolve().relative_to(ROOT) for file in files if file.suffix == ".py"]


def copy_checkout(target: Path) -> None:
    """Copy the files that git tracks, and the compiled extensions, to ``target``."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    names = [*tracked.stdout.decode().split("\0")[:-1]]
    names += [str(file.relative_to(ROOT)) for file in ROOT.glob("hybridcomp/**/*.so")]
    for name in names:
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def run_tests(root: Path, tests: Sequence[str | Path], limit: float) -> tuple[str, str]:
    """Run tests until the first failure.

    Returns "killed", "survived" or "limit", and the name of the test that failed, if one did.
    """
    command = [sys.executable, "-m", "pytest", "-qx", "-n0", "-rfE", "-p", "no:cacheprovider"]
    variables = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join(map(str, (root, root / "scripts")))
    with subprocess.Popen(
        [*command, *map(str, tests)], cwd=root, env=variables, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # ranks too
            return "limit", ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::[^\n]*?)(?: - |$)", said, re.MULTILINE)
    return "survived" if process.returncode in (0, 5) else "killed", failed[1] if failed else ""


class Trials:
    """Applies mutations, one at a time, in a copy of the checkout."""

    def __init__(self, root: Path, limit: float) -> None:
        self.root, self.limit = root, limit
        self._passing: set[str] = set()  # tests that pass without a mutation

    def run(self, mutation: Mutation) -> str:
        """Return "killed", "survived", "limit" or, if its test fails anyway, "unsound"."""
        file = self.root / mutation.path
        source = file.read_bytes()
        file.write_bytes(mutation.apply(source))
        try:
            found, test = run_tests(self.root, tests_of(mutation.path, self.root), self.limit)
        finally:
            file.write_bytes(source)
        if found == "killed" and test and test not in self._passing:
            if run_tests(self.root, [test], self.limit)[0] == "killed":
                print(f"fails without a mutation: {test}")
                return "unsound"
            self._passing.add(test)
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Mutate, run, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, help="modules and folders of the package")
    parser.add_argument("--since", default="HEAD~1", metavar="COMMIT", help="(HEAD~1)")
    parser.add_argument("--count", type=int, default=100, help="mutations (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (0)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one (300)")
    parser.add_argument("--least", type=float, default=0.8, help="share to be killed (0.8)")
    asked = parser.parse_args(arguments)
    paths = modules_in(asked.paths) if asked.paths else changed_since(asked.since)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        copy_checkout(Path(folder))
        trials = Trials(Path(folder), asked.limit)
        for mutation in drawn(paths, asked.count, asked.seed, ROOT):
            found = trials.run(mutation)
            counts[found] += 1
            print(f"{found:8} {mutation}", flush=True)
    killed, judged = counts["killed"], counts["killed"] + counts["survived"]
    print(f"{killed} of {judged} killed, {counts['limit']} reached the limit")
    return 2 if counts["unsound"] else int(killed < asked.least * judged)


def _short(text: str) -> str:
    return " ".join(text.split())[:80]


if __name__ == "__main__":
    sys.exit(main())
