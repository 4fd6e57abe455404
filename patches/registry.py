"""List the seam modules of every upstream, and apply their patches when upstream is imported.

Patches are armed per upstream package: applied at once if the package is imported already, else at
its import. A patch looks up the engine of each call, so a process may hold several engines, or one
without a block. A new seam is a module in one of the folders next to this file, and a line in
``MODULES``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

from hybridcomp.dimensions import DIMENSIONS
from hybridcomp.errors import SeamError
from hybridcomp.patches.neox.checkout import is_neox
from hybridcomp.seams.arming import IN_PLACE, UNFIT, ArmedPatches
from hybridcomp.seams.patching import Patch, apply_all
from hybridcomp.session import engine_session

#: upstream package -> patch modules, in the order of application
MODULES: dict[str, tuple[str, ...]] = {
    "deepspeed": (
        "ds.attach",
        "ds.step_ends",
        "ds.checkpoint.checkpoints",
        "ds.checkpoint.universal",
        "ds.zero.zero0",
        "ds.layers.sparse_rows",
        "ds.zero.zero12",
        "ds.zero.zero12_elsewhere",
        "ds.zero.zero3",
        "ds.zero.node_sums",
        "ds.zero.parameter_gathers",
        "ds.zero.secondary",
        "ds.zero.frozen",
        "ds.offload.offload12",
        "ds.offload.offload3",
        "ds.offload.nvme",
        "ds.offload.planned_memory",
        "ds.pipeline.pipeline",
        "ds.pipeline.partition",
        "ds.pipeline.tied_weights",
        "ds.layers.moe",
        "ds.layers.autotp",
        "ds.layers.ulysses",
    ),
    "megatron.core": (
        "mcore.attach",
        "mcore.check",
        "mcore.tensor_parallel",
        "mcore.experts",
        "mcore.pipeline",
        "mcore.ddp",
        "mcore.context_parallel",
    ),
    "transformer_engine.pytorch": ("mcore.transformer_engine",),
    "megatron.mpu": ("neox.mpu",),
    "megatron.training": ("neox.log",),
    "torch.distributed.tensor.experimental._context_parallel._attention": (
        "torch.context_parallel",
    ),
}
#: packages whose name another upstream also uses -> returns whether the right one is installed
TOLD_BY: dict[str, Callable[[], bool]] = {"megatron.mpu": is_neox, "megatron.training": is_neox}

#: packages that a job may have without using them: if patches do not fit, UNFIT stores the reason
#: instead of an error
OPTIONAL = frozenset(
    {
        "transformer_engine.pytorch",
        "torch.distributed.tensor.experimental._context_parallel._attention",
    }
)


def modules_of(package: str) -> list[ModuleType]:
    """Import and return the patch modules of an upstream package.

    Registers their callbacks for an attached engine (``ATTACHED``) in ``session``.
    """
    modules = [importlib.import_module(f"{__package__}.{name}") for name in MODULES[package]]
    engine_session.WHEN_ATTACHED[package] = [m.ATTACHED for m in modules if hasattr(m, "ATTACHED")]
    return modules


def patches_of(package: str) -> list[Patch]:
    """Return fresh, unapplied patches of an upstream package, in order."""
    return [Patch(seam, make) for module in modules_of(package) for seam, make in module.PATCHES]


def support_matrix() -> str:
    """Return a Markdown table of the compressed messages, made from the seams themselves."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, what, requirement in compressed():
        rows.setdefault((what, requirement), []).append(f"`{name}`")
    lines = ["| dimension | what | upstream |", "|---|---|---|"]
    lines += [
        f"| {', '.join(names)} | {what} | `{requirement}` |"
        for (what, requirement), names in rows.items()
    ]
    return "\n".join(lines)


def compressed() -> list[tuple[str, str, str]]:
    """Return (dimension, what is sent, requirement) of all compressed messages, by dimension.

    ``COVERS`` of a seam module has the dimensions whose messages it encodes; the first sentence of
    its docstring names these messages.
    """
    from hybridcomp import nn
    from hybridcomp.patches.torch import attach, torch_versions  # importing DTensor takes long

    found = []
    for package in MODULES:
        for module in modules_of(package):
            what = (module.__doc__ or "").partition("\n\n")[0].partition(", dimension ``")[0]
            requirement = module.PATCHES[0][0].requirement
            found += [(name, what.rstrip("."), requirement) for name in covers(module)]
    found += attach.rows()  # torch's own engines have slots, and no seams
    # messages of hybridcomp.nn, which belong to no upstream, are listed under its name
    found += nn.rows(torch_versions.TORCH)
    order = DIMENSIONS
    found.sort(key=lambda row: order.index(row[0]))
    return found


def covers(module: ModuleType) -> tuple[str, ...]:
    """Return the dimensions whose messages a seam module encodes."""
    found: tuple[str, ...] = getattr(module, "COVERS", ())
    return found


def arm() -> None:
    """Apply the patches of imported upstream packages now, and those of others at their import."""
    ARMED.arm(MODULES)


def disarm() -> None:
    """Revert everything that is applied."""
    ARMED.disarm()


def _apply(package: str) -> list[Patch] | None:
    if package in TOLD_BY and not TOLD_BY[package]():
        return None
    try:
        return apply_all(patches_of(package))
    except SeamError as error:
        if package not in OPTIONAL:
            raise
        UNFIT[package] = str(error)
        return None


#: armed by ``install``
ARMED = ArmedPatches(_apply, IN_PLACE)
