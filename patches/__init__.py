"""Every upstream attribute that hybridcomp replaces, one module per seam.

Patches are armed per upstream package: applied at once when it is imported already, otherwise when
it is. They dispatch per engine, so that a process may hold several engines, or one without a block.
"""

from __future__ import annotations

if __name__ != "hybridcomp.patches":
    # from the repository root `import patches` finds this folder too, and would give a second copy
    # of every module and of what is applied
    raise ImportError("import hybridcomp.patches, not patches")

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

from wrapt import register_post_import_hook

from hybridcomp.errors import SeamError
from hybridcomp.patches.neox.checkout import is_neox
from hybridcomp.patching import Patch, apply_all, revert_all
from hybridcomp.policy import DIMENSIONS

#: upstream package -> patch modules, in the order of application
MODULES: dict[str, tuple[str, ...]] = {
    "deepspeed": (
        "ds.attach",
        "ds.zero0",
        "ds.zero12",
        "ds.zero3",
        "ds.parameter_gathers",
        "ds.offload12",
        "ds.offload3",
        "ds.pipeline",
        "ds.pipeline_partition",
        "ds.tied_weights",
        "ds.moe",
        "ds.autotp",
        "ds.ulysses",
    ),
    "megatron.core": (
        "mcore.attach",
        "mcore.check",
        "mcore.tensor_parallel",
        "mcore.experts",
        "mcore.pipeline",
        "mcore.ddp",
    ),
    "transformer_engine.pytorch": ("mcore.transformer_engine",),
    "megatron.mpu": ("neox.mpu",),
    "megatron.training": ("neox.log",),
}
#: packages whose name another upstream bears too -> whether this process has the one that is meant
TOLD_BY: dict[str, Callable[[], bool]] = {"megatron.mpu": is_neox, "megatron.training": is_neox}

#: packages that a job may have and not need: what keeps their patches away is told to whoever asks
OPTIONAL = frozenset({"transformer_engine.pytorch"})

_armed = False
_unfit: dict[str, str] = {}
_hooked: set[str] = set()
_applied: dict[str, list[Patch]] = {}


def modules_of(package: str) -> list[ModuleType]:
    """The patch modules of an upstream package, imported."""
    return [importlib.import_module(f"{__name__}.{name}") for name in MODULES[package]]


def patches_of(package: str) -> list[Patch]:
    """Fresh, unapplied patches of an upstream package, in order."""
    return [Patch(seam, make) for module in modules_of(package) for seam, make in module.PATCHES]


def support_matrix() -> str:
    """What is compressed where, as a Markdown table made from the seams themselves.

    A seam module says with ``COVERS`` which dimensions it carries; the first sentence of its
    docstring says what of them.
    """
    rows = ["| dimension | what | upstream |", "|---|---|---|"]
    found = []
    for package in MODULES:
        for module in modules_of(package):
            what = (module.__doc__ or "").partition("\n\n")[0].partition(", dimension ``")[0]
            requirement = module.PATCHES[0][0].requirement
            found += [(name, what.rstrip("."), requirement) for name in covers(module)]
    order = DIMENSIONS
    found.sort(key=lambda row: order.index(row[0]))
    rows += [f"| `{name}` | {what} | `{requirement}` |" for name, what, requirement in found]
    return "\n".join(rows)


def covers(module: ModuleType) -> tuple[str, ...]:
    """The dimensions whose traffic a seam module carries."""
    found: tuple[str, ...] = getattr(module, "COVERS", ())
    return found


def arm() -> None:
    """Apply the patches of every imported upstream package, the others at their import."""
    global _armed
    _armed = True
    for package in MODULES:
        if package in sys.modules:
            _apply(package)
        elif package not in _hooked:
            _hooked.add(package)
            register_post_import_hook(_on_import, package)


def disarm() -> None:
    """Revert everything that is applied."""
    global _armed
    _armed = False
    for package in list(_applied):
        revert_all(_applied.pop(package))


def applied(package: str) -> list[Patch]:
    """The patches that are in place."""
    return list(_applied.get(package, ()))


def missing(package: str) -> str | None:
    """Why the patches of an optional package are not in place; None where they are."""
    if package in _applied:
        return None
    return _unfit.get(package, f"{package} is not imported, or hybridcomp not installed")


def _on_import(module: ModuleType) -> None:
    # the hook cannot be taken back, so it asks whether it is still wanted
    if _armed:
        _apply(module.__name__)


def _apply(package: str) -> None:
    if package in TOLD_BY and not TOLD_BY[package]():
        return
    if package in _applied:
        return
    try:
        _applied[package] = apply_all(patches_of(package))
    except SeamError as error:
        if package not in OPTIONAL:
            raise
        _unfit[package] = str(error)
