"""Find out which upstream made an engine or a layer, without importing that upstream."""

from __future__ import annotations

from typing import Any

#: engines that ``resume`` and ``freeze`` take, besides megatron-core's
ENGINES = (
    "expected an engine of DeepSpeed, a model under DistributedDataParallel, or the root of "
    "fully_shard"
)


def packages_of(engine: Any) -> set[str]:
    """Return the top-level packages that define the classes of ``engine``, such as "deepspeed"."""
    return {cls.__module__.partition(".")[0] for cls in type(engine).__mro__}


def is_megatron(engine: Any) -> bool:
    """Return whether ``engine`` is megatron-core's: a model, or a list of its chunks."""
    return isinstance(engine, (list, tuple)) or "megatron" in packages_of(engine)


def is_a(module: Any, *names: str) -> bool:
    """Return whether the class of ``module``, or a base of it, has one of ``names``."""
    return any(cls.__name__ in names for cls in type(module).__mro__)


def comes_from(module: Any, home: str) -> bool:
    """Return whether the class of ``module``, or a base of it, is of the package ``home``."""
    return any(cls.__module__.startswith(home) for cls in type(module).__mro__)
