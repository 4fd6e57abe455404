"""What was built before ``hybridcomp.install()``, and would go on sending uncompressed.

A patched constructor calls ``saw``. Whatever of these classes is alive when ``install`` is called,
and was not seen, was built too early. Nothing keeps a list of it but the garbage collector.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hybridcomp.config import CompressionConfig, load_config
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError


@dataclass(frozen=True)
class Built:
    """A class whose objects have to be built after ``install``.

    Attributes:
        package: whose patches see them.
        module: where the class is defined.
        name: of the class.
        line: what a training script calls to build one.
        instead: another way to be in time.
    """

    package: str
    module: str
    name: str
    line: str
    instead: str


ENGINE = Built(
    "deepspeed", "deepspeed.runtime.engine", "DeepSpeedEngine", "deepspeed.initialize(...)",
    "start the script by `deepspeed --module hybridcomp.run`",
)  # fmt: skip
WRAPPER = Built(
    "megatron.core", "megatron.core.distributed.data_parallel_base", "_BaseDataParallel",
    "Megatron's DistributedDataParallel (`get_model(...)` in Megatron-LM)",
    "start the script by `torchrun -m hybridcomp.run`",
)  # fmt: skip
CLASSES = (ENGINE, WRAPPER)

#: what patched constructors built -> whether there was a block for it
_seen: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def saw(built: Any, *, attached: bool) -> None:
    """Note that a patched constructor builds ``built``; ``attached``: there is a block for it."""
    _seen[built] = attached


def check(armed: frozenset[str], block: CompressionConfig | None, *, new: bool) -> None:
    """Raise ConfigError where something alive has to send encoded and was built too early.

    Args:
        armed: packages whose patches are in place already, whose objects were therefore seen.
        block: of this process, if it has one; a DeepSpeed engine may have its own.
        new: whether ``block`` was given just now: what was seen without one is late as well.
    """
    for kind in CLASSES:
        if kind.package in armed and not new:
            continue
        for built in _alive(kind):
            known = _seen.get(built, False) if new else built in _seen
            if not known and (block is not None or _own_block(built) is not None):
                raise too_late(kind, type(built).__name__)


def too_late(kind: Built, name: str) -> ConfigError:
    """What to tell the user about an object of ``kind``, of class ``name``, that came too early."""
    return ConfigError(
        "hybridcomp.install",
        Shown(f"a {name} that was built before it"),
        "what was built before would send everything uncompressed; put `hybridcomp.install()` "
        f"above the line with {kind.line}, or {kind.instead}",
    )


def _alive(kind: Built) -> Iterator[Any]:
    """The objects of a class that was imported; garbage does not count."""
    cls = getattr(sys.modules.get(kind.module), kind.name, None)
    if cls is None:
        return
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), cls)]
    if found:
        del found
        gc.collect()  # engines hang in reference cycles
        # by type: asking a proxy for its class would run somebody else's code
        yield from [thing for thing in gc.get_objects() if issubclass(type(thing), cls)]


def _own_block(built: Any) -> CompressionConfig | None:
    """The block in the configuration of a DeepSpeed engine."""
    settings = getattr(getattr(built, "_config", None), "_param_dict", None)
    return None if settings is None else load_config(settings)
