"""Rooms of the package: one-way imports, declared packages, a single copy of patches/."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.scripts_on_ranks import run_python
from tests.test_imports import PACKAGE, outline, sources

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

#: room -> rooms that it may import
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "log": set(),
    "escaping": set(),
    # the ranks of a job: agreement, dead ranks, shared files
    "job": {"errors", "log"},
    "kernels": {"errors"},
    "codecs": {"errors", "kernels"},
    "collectives": {"codecs", "errors", "job"},
    # a row for each dimension of parallelism
    "dimensions": set(),
    # the block: models, presets, and a message's codec
    "config": {"codecs", "dimensions", "errors", "escaping"},
    # replacing an upstream's functions, at once or at import
    "seams": {"errors"},
    # names of figures that reports write and comparisons read
    "metric_names": set(),
    "autotune": {"codecs", "collectives", "config", "dimensions", "job"},
    "channels": {
        "autotune", "codecs", "collectives", "config", "dimensions", "errors", "escaping", "job",
        "log",
    },
    # attaching to an engine, and the session of a process without one
    "session": {
        "channels", "codecs", "collectives", "config", "dimensions", "errors", "job", "log",
        "metric_names",
    },
    # local-SGD islands: arithmetic, groups, meetings, state
    "sync": {"channels", "codecs", "collectives", "config", "errors", "job"},
    # weight versions, from an engine adapter's description to a receiver's mirror
    "publishing": {"codecs", "errors", "escaping", "job", "log"},
    # layers and pipelines whose traffic uses a session's channels, or stays native
    "nn": {
        "channels", "codecs", "collectives", "config", "dimensions", "errors", "escaping", "job",
        "log", "session",
    },
    # text generation on the ranks of a training, and the weights for it
    "generation": {
        "channels", "codecs", "collectives", "config", "errors", "job", "log", "nn", "session",
    },
    # everything about upstreams: seams, rules, checkpoints, trainers' callbacks
    "patches": {
        "autotune", "channels", "codecs", "collectives", "config", "dimensions", "elastic",
        "errors", "escaping", "generation", "job", "log", "metric_names", "nn", "publishing",
        "seams", "session", "sync",
        "",  # callbacks and GPT-NeoX's launcher call public functions, as scripts do
    },
    # jobs resumed on another number of ranks: shared parts of the engines' adapters
    "elastic": {"channels", "codecs", "config", "errors", "job", "log"},
    # adapters to inference engines; each module imports its engine
    "inference": {"errors", "escaping", "job", "log", "publishing", "seams"},
    "run": {"", "job", "log"},
    "missing_run": {"config", "errors", "job", "log"},
    # hybridcomp/__init__.py: lazily imported public names
    "": {
        "channels", "collectives", "config", "elastic", "errors", "generation", "job", "log",
        "patches", "publishing", "seams", "session", "sync",
    },
}  # fmt: skip
FREE = {"tools"}  # offline tools: may import every room, and no job imports them
UPSTREAM = {"deepspeed", "megatron"}
NAMES_UPSTREAM = {"patches"}


def room_of(path: Path) -> str:
    """Map ``hybridcomp/codecs/zfp.py`` to ``codecs``; ``hybridcomp/__init__.py`` to ``""``."""
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Return the dotted names of all modules that a file imports, at any depth."""
    names: set[str] = set()
    for node in (*outline(path).early, *outline(path).late):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def foreign(path: Path) -> set[str]:
    """Return the rooms and upstreams that a file imports and may not."""
    room = room_of(path)
    allowed = ALLOWED.get(room, set()) | {room} | (UPSTREAM if room in NAMES_UPSTREAM else set())
    found = set()
    for name in imported(path):
        first, *rest = name.split(".")
        if first in UPSTREAM:
            found.add(first)
        if first == "hybridcomp" and room not in FREE:
            target = rest[0] if rest else ""
            is_room = (PACKAGE / target).is_dir() or (PACKAGE / f"{target}.py").is_file()
            found.add(target if is_room else "")
    return found - allowed


def test_imports_run_one_way() -> None:
    wrong = {str(path): found for path in sources().values() if (found := foreign(path))}
    assert not wrong, "these files may not import these"


def test_every_room_has_its_rule() -> None:
    rooms = {room_of(path) for path in sources().values()}
    assert rooms == set(ALLOWED) | FREE


def packages() -> list[Path]:
    """Return the ``__init__.py`` of every package below hybridcomp; patches/ is a link."""
    rooms = [path for path in PACKAGE.iterdir() if path.is_dir()]  # a glob does not follow a link
    return [path for room in rooms for path in room.glob("**/__init__.py")]


def test_packages_are_declared() -> None:
    declared = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    found = {
        ".".join(("hybridcomp", *path.parent.relative_to(PACKAGE).parts))
        for path in (PACKAGE / "__init__.py", *packages())
    }
    assert declared == found


def test_top_level_is_as_agreed() -> None:
    allowed = {
        "pyproject.toml", "hybridcomp", "patches", "configs", "scripts", "tests", "README.md",
        "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in",
        "docs",
    }  # fmt: skip
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= allowed


def test_patches_is_one_package() -> None:
    link = PACKAGE / "patches"
    assert link.is_symlink()
    assert str(link.readlink()) == "../patches"
    code = "import sys; sys.path.insert(0, sys.argv[1]); import patches"
    result = subprocess.run(
        [sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "import hybridcomp.patches, not patches" in result.stderr


def test_import_needs_no_upstream_and_loads_what_a_job_uses() -> None:
    """A job without tables loads nothing of them, nor of states on NVMe and planned memory."""
    code = (
        "import sys\n"
        "upstreams = ('deepspeed', 'megatron')\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in upstreams:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "for name in [name for name in sys.modules if name.split('.')[0] in upstreams]:\n"
        "    del sys.modules[name]\n"
        "import hybridcomp, hybridcomp.nn\n"
        "import hybridcomp.patches.torch.ddp.reducer, hybridcomp.patches.torch.fsdp2.fsdp2\n"
        "print(*(name for name in sys.modules if name.startswith('hybridcomp.')))\n"
        "hybridcomp.install()\n"
        "hybridcomp.CompressionConfig\n"
        "import hybridcomp.channels, hybridcomp.session.reporter, hybridcomp.tools.commands.cli\n"
    )
    done = run_python("-c", code, anew=True)
    assert done.returncode == 0, done.stderr
    parts = ("tables.", "row_sums", "ignored_", "state_files", "state_io", "zero3_moves", "ds.")
    found = done.stdout.splitlines()[0].split()
    assert len(found) > 100
    assert not [name for name in found if any(part in name for part in parts)]


def seam_modules() -> dict[str, Path]:
    """Return every module below patches/, by its dotted name."""
    folder = ROOT / "patches"
    return {
        ".".join(("hybridcomp.patches", *path.relative_to(folder).with_suffix("").parts)): path
        for path in folder.rglob("*.py")
        if path.name != "__init__.py"
    }


#: folder of patches/ -> folders of other upstreams that it may import
ASKS: dict[str, set[str]] = {
    "common": set(),
    "rules": set(),
    "torch": {"common", "rules"},
    "mcore": {"common", "rules"},
    "neox": {"common", "rules"},
    # DeepSpeed trains models whose groups Megatron or GPT-NeoX created
    "ds": {"common", "mcore", "neox", "rules"},
    "trainers": {"common", "ds", "torch"},
    "drafts": {"common", "generating"},
    "generating": {"common", "ds"},
    "gathered": {"common", "ds", "torch"},
    "generated": {"common", "drafts", "ds", "generating"},
    "published": {"common", "ds", "mcore", "torch"},
    "frozen": {"common", "ds", "torch"},
    "freeze_schedule": {"common", "frozen"},
    "resumed": {"common", "ds", "frozen", "mcore", "torch"},
    "registry": {"common", "ds", "mcore", "neox", "torch"},
    "template": {"common"},
}


def test_folders_of_patches_ask_few_others() -> None:
    """A folder covers one upstream; no seam imports another's, except what upstreams share."""
    for name, path in seam_modules().items():
        folder = name.split(".")[2]
        asked = {
            found.split(".")[2]
            for found in imported(path)
            if found.startswith("hybridcomp.patches.") and found.split(".")[2] in ASKS
        }
        allowed = ASKS.get(folder, {"common"})  # an upstream of a single module
        assert asked - {folder} <= allowed, f"{name} asks {asked}"


#: folder -> its rooms and modules, each of which may import only those in front of it
INNER: dict[str, tuple[str, ...]] = {
    "channels": (
        "residuals", "accounting", "engine_state", "error_samples", "known_groups", "memory_use",
        "channel", "messages", "online_tuner", "offload", "engine_channels", "checkpoint",
    ),
    "patches/ds": (
        "requirement", "job_facts", "settings", "engine_of", "expert_weights", "record",
        "step_begins", "step_ends", "zero", "offload", "pipeline", "layers", "island_unit",
        "checkpoint", "gathered", "generation", "rollout", "trained_set", "weights",
        "step_messages", "freezing", "attach",
    ),
    "patches/torch": (
        "session", "loss_scale", "step_detection", "torch_versions", "rules", "ignored_tables",
        "context_parallel", "state", "attached", "steps", "trained_set", "ddp", "fsdp2",
        "weights", "island_masters", "attach", "auto_attach", "freezing", "gathered", "replanned",
    ),
}  # fmt: skip


@pytest.mark.parametrize("folder", INNER)
def test_rooms_inside_import_one_way(folder: str) -> None:
    known, prefix, seen = INNER[folder], f"hybridcomp.{folder.replace('/', '.')}.", set()
    for path in (PACKAGE / folder).rglob("*.py"):
        room = path.relative_to(PACKAGE / folder).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        seen.add(room)
        names = (name for name in imported(path) if name.startswith(prefix))
        asked = {name.removeprefix(prefix).split(".")[0] for name in names}
        wrong = asked & set(known) - set(known[: known.index(room) + 1])
        assert not wrong, f"{path} imports {wrong}"
    assert seen == set(known)


def test_a_class_has_a_name_of_its_own() -> None:
    """Classes that share a name cannot be told apart; private ones only inside their room."""
    defined: dict[str, list[str]] = {}
    for path in sources().values():
        for name in outline(path).classes:
            known = f"{room_of(path)}: " * name.startswith("_") + name
            defined.setdefault(known, []).append(str(path.relative_to(PACKAGE)))
    assert {name: files for name, files in defined.items() if len(files) > 1} == {}


#: torch's functions that make tensors of the default dtype, and on the default device
OF_A_DTYPE = {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}
ON_A_DEVICE = OF_A_DTYPE | {"arange", "full", "randint", "randperm", "tensor"}


def test_tensors_do_not_follow_torchs_defaults() -> None:
    """A script may set its default dtype and device; neither changes sums or moves host memory."""
    wrong = []
    for path in sources().values():
        if room_of(path) == "tools":  # processes of their own
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            name, given = node.func.attr, {keyword.arg for keyword in node.keywords}
            if ast.unparse(node.func.value) == "torch" and (
                (name in OF_A_DTYPE and "dtype" not in given)
                or (name in ON_A_DEVICE and "device" not in given)
            ):
                wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not wrong
