"""Stand-in for SGLang 0.5.23: the engine's weight updates, and a worker that calls a loader.

``tests/inference/test_upstream.py`` compares its signatures with an installed SGLang.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.stand_ins.vllm import modules

VERSION = "0.5.23"


class WeightUpdater:
    """Worker side of an update."""

    def __init__(self, model: Any, custom_weight_loaders: list[str]) -> None:
        self.model, self.custom_weight_loaders = model, custom_weight_loaders

    def update_weights_from_tensor(
        self, named_tensors: list[tuple[str, Tensor]], load_format: str | None = None
    ) -> tuple[bool, str]:
        assert load_format in self.custom_weight_loaders
        module, _, name = str(load_format).rpartition(".")
        getattr(importlib.import_module(module), name)(self.model, named_tensors)
        return True, "Success"


class Engine:
    """An engine with workers in this process."""

    def __init__(self, models: list[Any], custom_weight_loader: list[str]) -> None:
        self.workers = [WeightUpdater(model, custom_weight_loader) for model in models]
        self.session = False
        self.failure = ""

    def begin_weight_update(self, selector: str = "all") -> tuple[bool, str]:
        assert not self.session
        self.session = True
        return True, ""

    def update_weights_from_tensor(
        self,
        named_tensors: list[tuple[str, Tensor]],
        load_format: str | None = None,
        flush_cache: bool = True,
    ) -> tuple[bool, str]:
        assert self.session
        if self.failure:
            return False, self.failure
        copies = [(name, tensor.clone()) for name, tensor in named_tensors]
        for worker in self.workers:
            worker.update_weights_from_tensor(copies, load_format)
        return True, "Success"

    def end_weight_update(self) -> tuple[bool, str]:
        assert self.session
        self.session = False
        return True, ""


MODULES: dict[str, tuple[Any, ...]] = {
    "sglang.srt.entrypoints.engine": (Engine,),
    "sglang.srt.model_executor.model_runner_components.weight_updater": (WeightUpdater,),
}


def install(put: Callable[[dict[str, types.ModuleType], str, str], None]) -> None:
    """Register the modules, the package's name and its version through ``put``."""
    put(modules(MODULES), "sglang", VERSION)
