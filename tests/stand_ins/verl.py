"""Stand-in for verl 0.9.1: the registry and the base of its checkpoint engines.

``tests/inference/test_upstream.py`` compares its signatures with an installed verl.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from tests.stand_ins.vllm import modules

VERSION = "0.9.1"


class CheckpointEngineRegistry:
    """Engines by backend."""

    _registry: ClassVar[dict[str, Any]] = {}

    def register(backend: str) -> Callable[[Any], Any]:  # type: ignore[misc]
        def wrapper(cls: Any) -> Any:
            CheckpointEngineRegistry._registry[backend] = cls
            return cls

        return wrapper

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> Any:
        return cls._registry[backend](*args, **kwargs)


class CheckpointEngine(ABC):
    """Base of an engine."""

    wire_format = "named_tensors"

    @abstractmethod
    def prepare(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> Any: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def finalize(self) -> None: ...

    @abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Any: ...

    @abstractmethod
    async def receive_weights(self, global_steps: int | None = None) -> Any: ...


MODULES: dict[str, tuple[Any, ...]] = {
    "verl.checkpoint_engine.base": (CheckpointEngineRegistry, CheckpointEngine)
}


def install(put: Callable[[dict[str, types.ModuleType], str, str], None]) -> None:
    """Register modules, package name and version through ``put``; empties the registry."""
    CheckpointEngineRegistry._registry.clear()
    put(modules(MODULES), "verl", VERSION)
