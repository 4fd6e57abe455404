"""A published version chain, and stand-ins for engines in ``sys.modules``."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridcomp.inference import upstream
from hybridcomp.seams import patching
from tests.ranks import RunRanks

#: hybridcomp's modules that import an engine
IMPORTS = (
    "hybridcomp.inference.vllm_worker", "hybridcomp.inference.vllm_trainer",
    "hybridcomp.inference.vllm_plugin", "hybridcomp.inference.verl_engine",
    "hybridcomp.inference.sglang_loader",
)  # fmt: skip


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, on_ranks: RunRanks) -> Path:
    """Return the folder of ``VERSIONS`` versions that two ranks published."""
    from tests.inference.made import VERSIONS, publish  # which look for --nightly

    folder = tmp_path_factory.mktemp("published")
    on_ranks(2, publish, folder, VERSIONS)
    return folder


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Install a stand-in for a test, with our modules not yet imported."""

    def put(modules: dict[str, types.ModuleType], package: str, version: str) -> None:
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        known = patching.version
        monkeypatch.setattr(
            patching, "version", lambda name: version if name == package else known(name)
        )

    for name in IMPORTS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    upstream.check.cache_clear()
    yield lambda module: module.install(put)
    upstream.check.cache_clear()
    for name in IMPORTS:
        sys.modules.pop(name, None)
