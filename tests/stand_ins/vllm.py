"""Stand-in for vLLM 0.33: factories, bases of weight-transfer engines, reload.

``tests/inference/test_upstream.py`` compares its signatures with an installed vLLM. ``install``
puts the modules into ``sys.modules`` for one test.
"""

from __future__ import annotations

import contextlib
import importlib
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch.nn import Module

VERSION = "0.33.0"


@dataclass
class WeightTransferInitInfo:
    """Base of a worker's one-time settings."""


@dataclass
class WeightTransferUpdateInfo:
    """Base of a worker's settings for an update."""


@dataclass
class TrainerInitInfo:
    """Base of a trainer engine's settings."""

    backend: ClassVar[str]

    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class WeightTransferEngine(ABC):
    """Base of a worker's engine."""

    init_info_cls: Any
    update_info_cls: Any
    supports_draft_weight_update = True

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.config, self.vllm_config = config, vllm_config
        self.model_config = vllm_config.model_config
        self.device, self.model = device, model

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        try:
            return self.init_info_cls(**init_dict)
        except TypeError as error:
            raise ValueError(f"Invalid init_info: {error}") from error

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        try:
            return self.update_info_cls(**update_dict)
        except TypeError as error:
            raise ValueError(f"Invalid update_info: {error}") from error

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        torch.accelerator.synchronize()

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class VLLMWeightSyncClient(Protocol):
    """Drives the workers of an inference engine."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class HTTPVLLMWeightSyncClient:
    """A client of a server."""

    def __init__(self, base_url: str, timeout: float = 300) -> None:
        self.base_url, self.timeout = base_url, timeout


class TrainerWeightTransferEngine(ABC):
    """Base of a trainer's engine."""

    init_info_cls: Any

    def __init__(
        self, *, client: Any, source: Any = None, is_sender: bool = True, rank: int = 0
    ) -> None:
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank

    @classmethod
    @abstractmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any: ...

    @abstractmethod
    def send_weights(self) -> None: ...

    def shutdown(self) -> None:  # noqa: B027, as vLLM has it
        ...


def _register(registry: dict[str, Any], name: str, module: Any, class_name: str | None) -> None:
    if name in registry:
        raise ValueError(f"{name} is already registered")
    if isinstance(module, str):
        registry[name] = lambda: getattr(importlib.import_module(module), str(class_name))
    else:
        registry[name] = lambda: module


class WeightTransferEngineFactory:
    """Engines of workers."""

    _registry: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register_engine(
        cls, name: str, module_path_or_cls: Any, class_name: str | None = None
    ) -> None:
        _register(cls._registry, name, module_path_or_cls, class_name)

    @classmethod
    def create_engine(cls, config: Any, vllm_config: Any, device: Any, model: Any) -> Any:
        return cls._registry[config.backend]()(config, vllm_config, device, model)


class WeightTransferTrainerFactory:
    """Engines of trainers."""

    _registry: ClassVar[dict[str, Any]] = {}

    @classmethod
    def register_engine(
        cls, name: str, module_path_or_cls: Any, class_name: str | None = None
    ) -> None:
        _register(cls._registry, name, module_path_or_cls, class_name)

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        return cls._registry[init_info.backend]().trainer_init(
            init_info=init_info, client=client, source=source
        )


#: models inside a layerwise reload
RELOADING: list[Module] = []
#: every full reload
RELOADED: list[Module] = []


def initialize_layerwise_reload(model: Module) -> None:
    """Begin to reload."""
    RELOADING.append(model)


def finalize_layerwise_processing(model: Module, model_config: Any) -> None:
    """End a reload."""
    RELOADING.remove(model)
    RELOADED.append(model)


def finalize_layerwise_reload(*args: Any, **kwargs: Any) -> None:
    """End a reload; older name."""
    finalize_layerwise_processing(*args, **kwargs)


@contextlib.contextmanager
def disable_mtp_completeness_check() -> Iterator[None]:
    """Allow a subset of the weights."""
    yield


_BASE = (
    WeightTransferInitInfo, WeightTransferUpdateInfo, TrainerInitInfo, WeightTransferEngine,
    VLLMWeightSyncClient, TrainerWeightTransferEngine,
)  # fmt: skip
_RELOAD = (initialize_layerwise_reload, finalize_layerwise_processing, finalize_layerwise_reload)
_LOADER = "vllm.model_executor.model_loader"
MODULES: dict[str, tuple[Any, ...]] = {
    "vllm.distributed.weight_transfer.base": _BASE,
    "vllm.distributed.weight_transfer.clients": (HTTPVLLMWeightSyncClient,),
    "vllm.distributed.weight_transfer.factory":
        (WeightTransferEngineFactory, WeightTransferTrainerFactory),
    f"{_LOADER}.reload": _RELOAD,
    f"{_LOADER}.reload.layerwise": _RELOAD,
    f"{_LOADER}.mtp_validation": (disable_mtp_completeness_check,),
}  # fmt: skip


def install(put: Callable[[dict[str, types.ModuleType], str, str], None]) -> None:
    """Register modules, package name and version through ``put``; empties the registries."""
    for registry in (WeightTransferEngineFactory, WeightTransferTrainerFactory):
        registry._registry.clear()
    RELOADING.clear()
    RELOADED.clear()
    put(modules(MODULES), "vllm", VERSION)


def modules(contents: dict[str, tuple[Any, ...]]) -> dict[str, types.ModuleType]:
    """Create modules with these functions and classes, and their parent packages."""
    made: dict[str, types.ModuleType] = {}
    for name, values in contents.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:count]), types.ModuleType(".".join(parts[:count])))
        for value in values:
            setattr(made[name], value.__name__, value)
    return made
