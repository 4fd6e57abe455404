"""Find engines that were built before ``hybridcomp.install()`` and would send uncompressed.

A patched constructor calls ``register``. Objects of these classes that exist when ``install`` is
called, and were not registered, were built too early. Only the garbage collector lists them.
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any, NamedTuple

from hybridcomp.config import CompressionConfig, load_config
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.job.launcher import start_command


class TrackedClass(NamedTuple):
    """Class whose objects have to be built after ``install``."""

    package: str  # whose patches see the objects
    module: str
    name: str
    line: str  # of a training script, that builds an object


ENGINE = TrackedClass(
    "deepspeed",
    "deepspeed.runtime.engine",
    "DeepSpeedEngine",
    "deepspeed.initialize(...)",
)
WRAPPER = TrackedClass(
    "megatron.core",
    "megatron.core.distributed.data_parallel_base",
    "_BaseDataParallel",
    "Megatron's DistributedDataParallel (`get_model(...)` in Megatron-LM)",
)
CLASSES = (ENGINE, WRAPPER)

#: engines and wrappers built under the patches -> whether a block applied to them
_seen: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def register(built: Any, *, attached: bool) -> None:
    """Record an engine that is being built; ``attached``: whether a block applies to it."""
    _seen[built] = attached


def check(armed: frozenset[str], block: CompressionConfig | None, *, new: bool) -> None:
    """Raise ConfigError if an existing engine that has a block was built before the patches.

    Args:
        armed: packages whose patches are in place already, so that their objects were seen.
        block: the process's block, if any; a DeepSpeed engine may have its own.
        new: whether ``block`` is new: objects that were seen without one are late as well.
    """
    for kind in CLASSES:
        if kind.package in armed and not new:
            continue
        for built in _alive(kind):
            known = _seen.get(built, False) if new else built in _seen
            if not known and (block is not None or _own_block(built) is not None):
                raise too_late(kind, type(built).__name__)


def too_late(kind: TrackedClass, name: str) -> ConfigError:
    """Return the error for an object of class ``name`` that was built before ``install``."""
    return ConfigError(
        "hybridcomp.install",
        Shown(f"a {name} that was built before it"),
        "what was built before would send everything uncompressed; put `hybridcomp.install()` "
        f"above the line with {kind.line}, or start with {start_command()}",
    )


def _alive(kind: TrackedClass) -> list[Any]:
    """Return the existing objects of an imported class, after a garbage collection."""
    cls: Any = getattr(sys.modules.get(kind.module), kind.name, None)

    def objects() -> list[Any]:  # by type: reading a proxy's __class__ would run foreign code
        return [thing for thing in gc.get_objects() if issubclass(type(thing), cls)]

    if cls is None or not objects():
        return []
    gc.collect()  # engines are in reference cycles
    return objects()


def _own_block(built: Any) -> CompressionConfig | None:
    """Return the block in the configuration of a DeepSpeed engine."""
    settings = getattr(getattr(built, "_config", None), "_param_dict", None)
    return None if settings is None else load_config(settings)
