#!/usr/bin/env python3
"""Read from upstream releases the signatures that the seams need, and record them for the tests.

read_upstream.py FOLDER            add the archives in FOLDER to tests/patches/upstream.json
read_upstream.py FOLDER --check    write nothing; the exit status is 1 where the file would change

Recorded releases without an archive in FOLDER stay unchanged. It prints each changed release and
the symbols whose parameters differ from the previous recorded release. Inference engines are
recorded in tests/inference/upstream.json. tests/patches/test_arguments.py reads communication
arguments (``ARGUMENTS``) from the installed packages.

FOLDER holds wheels and source distributions, as ``pip download --no-deps`` leaves them, and for
GPT-NeoX, which has no releases, ``git archive --prefix=gpt-neox-COMMIT/ -o gpt-neox-COMMIT.tar.gz
COMMIT``. They are parsed, never run. The file holds the version and SHA-256 of each archive, and
the parameters of each attribute that a seam names: names, kinds, and defaults that are plain
constants.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # hybridcomp, from this checkout

from doc_pages import json_rows
from hybridcomp.inference import sglang_seams, verl_seams, vllm_plugin, vllm_seams
from hybridcomp.inference.upstream import OTHERS
from hybridcomp.patches.registry import patches_of

TESTS = Path(__file__).resolve().parents[1] / "tests"
FILE, ENGINES_FILE = (TESTS / room / "upstream.json" for room in ("patches", "inference"))
#: name of an archive -> upstream packages in it that seams patch
PACKAGES = {
    "deepspeed": ("deepspeed",),
    "megatron-core": ("megatron.core",),
    "gpt-neox": ("megatron.mpu", "megatron.training"),
}
#: name of an inference engine's archive -> attributes that its adapters call or override
ENGINES = {
    "vllm": (*vllm_plugin.SEAMS, *vllm_seams.WORKER_SEAMS, *vllm_seams.TRAINER_SEAMS),
    "verl": verl_seams.SEAMS,
    "sglang": (*sglang_seams.SEAMS, *sglang_seams.WORKER_SEAMS),
}
#: megatron-core's seam whose name depends on the installed version
MOVED = {
    f"megatron.core.pipeline_parallel.p2p_communication:{name}"
    for name in ("_communicate", "P2PCommunicator._communicate")
}


#: module -> classes and functions with communication fields or parameters;
#: tests/patches/arguments.json records how each is handled
ARGUMENTS = {
    "deepspeed.runtime.zero.config": ("DeepSpeedZeroConfig",),
    "megatron.core.model_parallel_config": ("ModelParallelConfig",),
    "megatron.core.transformer.transformer_config": ("TransformerConfig",),
    "megatron.core.distributed.distributed_data_parallel_config": (
        "DistributedDataParallelConfig",
    ),
    "megatron.core.optimizer.optimizer_config": ("OptimizerConfig",),
    "transformer_engine.pytorch.distributed": (
        "allreduce", "gather_along_first_dim", "reduce_scatter_along_first_dim",
        "symmetric_all_reduce",
    ),
    "torch.distributed.fsdp._fully_shard._fully_shard": ("fully_shard",),
    "torch.distributed.fsdp._fully_shard._fsdp_api": ("MixedPrecisionPolicy",),
    "torch.nn.parallel.distributed": ("DistributedDataParallel.__init__",),
    "transformers.distributed.configuration_utils": ("DistributedConfig",),
    "accelerate.utils.dataclasses": ("FullyShardedDataParallelPlugin",),
}  # fmt: skip


def arguments(text: str, name: str) -> set[str]:
    """Return the fields of a class, or the parameters of a function, in a module's ``text``.

    Uses the last of several definitions (overloads). Raises LookupError if there is none.
    """
    node: ast.AST = ast.parse(text)
    for part in name.split("."):
        found = [
            one
            for one in getattr(node, "body", [])
            if isinstance(one, ast.ClassDef | ast.FunctionDef) and one.name == part
        ]
        if not found:
            raise LookupError(name)
        node = found[-1]
    if isinstance(node, ast.FunctionDef):
        given = node.args
        names = {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
        return names - {"self"}
    assert isinstance(node, ast.ClassDef)
    fields = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
    return {one.id for one in fields if isinstance(one, ast.Name)}


def symbols(name: str) -> list[str]:
    """Return ``module:qualified.name`` of every attribute that an upstream's seams name."""
    if name in ENGINES:
        return sorted(map(str, ENGINES[name]))
    found = {str(patch.seam) for package in PACKAGES[name] for patch in patches_of(package)}
    return sorted(found | (MOVED if name == "megatron-core" else set()))


def identify(path: Path) -> tuple[str, str] | None:
    """Return name and version of an archive from its file name; None for other files."""
    match = re.match(r"([A-Za-z0-9_.-]+?)-([0-9a-f][A-Za-z0-9.]*)(-.*\.whl|\.tar\.gz)$", path.name)
    if match is None:
        return None
    name = match[1].replace("_", "-").lower()
    name = next((one for one, others in OTHERS.items() if name in others), name)
    return (name, match[2]) if name in PACKAGES or name in ENGINES else None


def opener(path: Path) -> Callable[[str], str | None]:
    """Return a function from a path inside the archive to its text, None if missing."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            texts = {name: wheel.read(name) for name in wheel.namelist() if name.endswith(".py")}
    else:
        texts = {}
        with tarfile.open(path) as archive:
            for member in archive:
                inside = member.name.partition("/")[2]
                if member.isfile() and inside.endswith(".py"):
                    stream = archive.extractfile(member)
                    texts[inside] = b"" if stream is None else stream.read()
    return lambda name: texts[name].decode() if name in texts else None


def read(path: Path, names: Iterable[str]) -> dict[str, str]:
    """Return by symbol its binding in the archive: ``def (...)``, ``= ...``, or ``absent``."""
    text_of = opener(path)
    trees: dict[str, ast.Module | None] = {}
    found = {}
    for symbol in names:
        module, _, qualname = symbol.partition(":")
        if module not in trees:
            base = module.replace(".", "/")
            text = text_of(f"{base}.py") or text_of(f"{base}/__init__.py")
            trees[module] = None if text is None else ast.parse(text)
        found[symbol] = _bound(trees[module], qualname.split("."))
    return found


def _bound(tree: ast.AST | None, path: list[str]) -> str:
    for place, name in enumerate(path):
        if tree is None:
            return "absent"
        owner = getattr(tree, "name", "")
        plain = name.removeprefix(f"_{owner.lstrip('_')}") if owner else name
        tree = next(_bindings(tree, {name, plain}), None)
        if isinstance(tree, ast.ClassDef) and place == len(path) - 1:
            return "class"
    if isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef):
        kinds = {ast.unparse(one) for one in tree.decorator_list}
        static = "static " if "staticmethod" in kinds else ""
        return f"{static}def {_parameters(tree.args)}"
    if isinstance(tree, ast.Assign | ast.AnnAssign) and tree.value is not None:
        value = tree.value
        is_name = isinstance(value, ast.Attribute | ast.Name)
        return f"= {ast.unparse(value)}" if is_name else "value"
    if isinstance(tree, ast.Import):
        return f"import {path[-1]}"
    if isinstance(tree, ast.ImportFrom):
        own = next(one.name for one in tree.names if path[-1] in (one.asname, one.name))
        return f"= {tree.module}.{own}" if not tree.level else "value"
    return "absent"


def _bindings(owner: ast.AST, names: set[str]) -> Iterator[ast.AST]:
    """Yield the statements in the body of ``owner`` that bind a name, including ``if`` and ``try``.

    An ``if`` counts with its first branch, which upstream writes for the newer torch.
    """
    for node in getattr(owner, "body", []):
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _bindings(node, names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name in names:
                yield node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if any((alias.asname or alias.name) in names for alias in node.names):
                yield node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(one, ast.Name) and one.id in names for one in targets):
                yield node
    for node in getattr(owner, "orelse", []):
        yield from _bindings(ast.Module([node], []), names)


def _parameters(arguments: ast.arguments) -> str:
    """Return names, kinds and plain defaults in Python syntax, without annotations."""
    for one in ast.walk(arguments):
        if isinstance(one, ast.arg):
            one.annotation = None
    arguments.defaults = [_plain(value) for value in arguments.defaults]
    arguments.kw_defaults = [value and _plain(value) for value in arguments.kw_defaults]
    return f"({ast.unparse(arguments)})"


def _plain(value: ast.expr) -> ast.expr:
    return value if isinstance(value, ast.Constant) else ast.Constant(...)


def facts(folder: Path) -> dict[str, Any]:
    """Return for each upstream its archives, and each symbol's bindings with their versions."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        known = identify(path)
        if known is None:
            continue
        name, version = known
        mine = found.setdefault(name, {"archives": {}, "symbols": {}})
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        mine["archives"][version] = {"file": path.name, "sha256": digest}
        for symbol, bound in read(path, symbols(name)).items():
            mine["symbols"].setdefault(symbol, {}).setdefault(bound, []).append(version)
    return found


def merged(written: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return ``written`` with the releases of ``found`` added or replaced.

    Drops symbols of these upstreams that no seam names any more.
    """
    result = dict(written)
    for name, new in found.items():
        old = written.get(name, {"archives": {}, "symbols": {}})
        symbols: dict[str, dict[str, list[str]]] = {}
        for symbol, ways in new["symbols"].items():
            mine = symbols.setdefault(symbol, {})
            for bound, versions in old["symbols"].get(symbol, {}).items():
                if kept := [version for version in versions if version not in new["archives"]]:
                    mine[bound] = kept
            for bound, versions in ways.items():
                mine[bound] = [*mine.get(bound, []), *versions]
        archives = {**old["archives"], **new["archives"]}
        order = sorted(archives, key=_order)
        for ways in symbols.values():
            for versions in ways.values():
                versions.sort(key=_order)
        result[name] = {"archives": {v: archives[v] for v in order}, "symbols": symbols}
    return result


def _order(version: str) -> tuple[Version, str]:
    """Sort releases by version, and commits by name."""
    try:
        return Version(version), ""
    except InvalidVersion:
        return Version("0"), version


def remarks(written: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each new or changed release and for each changed binding.

    Bindings are compared with the previous release in the file. It also lists symbols not recorded
    for an older release, whose archive has to be read again.
    """
    for name, facts in now.items():
        before = _by_version(written.get(name, {"archives": {}, "symbols": {}}))
        after = _by_version(facts)
        versions = list(facts["archives"])
        for place, version in enumerate(versions):
            if before.get(version) == after[version]:
                continue
            yield f"{name} {version}: {'changed' if version in before else 'added'}"
            older = after[versions[place - 1]] if place else {}
            for symbol, bound in after[version].items():
                if older.get(symbol, bound) != bound:
                    yield f"  {symbol}: {older[symbol]} -> {bound}, since {versions[place - 1]}"
        for version, bindings in after.items():
            if lacking := sorted(facts["symbols"].keys() - bindings.keys()):
                yield f"{name} {version}: fetch its archive too; not read yet: {', '.join(lacking)}"


def _by_version(facts: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the bindings by version and symbol."""
    found: dict[str, dict[str, str]] = {version: {} for version in facts["archives"]}
    for symbol, ways in facts["symbols"].items():
        for bound, versions in ways.items():
            for version in versions:
                found[version][symbol] = bound
    return found


def main() -> int:
    """Write or compare; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    found = facts(given.folder)
    if not found:
        parser.error(f"{given.folder} holds no archive of {', '.join([*PACKAGES, *ENGINES])}")
    status = 0
    for file, names in ((FILE, PACKAGES), (ENGINES_FILE, ENGINES)):
        mine = {name: facts for name, facts in found.items() if name in names}
        if not mine:
            continue
        written = json.loads(file.read_text())
        now = merged(written, mine)
        for line in remarks(written, now):
            print(line)
        if now != written:
            print(f"{file}: {'differs from the archives' if given.check else 'written'}")
            status = int(given.check)
        if not given.check:
            file.write_text(json_rows.dumps(now, depth=3), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
