"""The kernel loader: choice of the back end, and the error if there is none."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hybridcomp import kernels
from hybridcomp.errors import CodecError


def test_another_device_is_refused_by_name() -> None:
    with pytest.raises(CodecError, match="'meta'.*expected cpu or cuda"):
        kernels.kernels_of(torch.device("meta"))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (ImportError("No module named '_cpu'"), "are not built .*pip install"),
        (ModuleType("_cpu"), "other sources.*found 1.*build them again"),
    ],
    ids=["missing", "old"],
)
def test_an_unusable_extension_says_how_to_build_it(
    found: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels._cpu_kernels.cache_clear()
    monkeypatch.setattr(importlib, "import_module", Mock(side_effect=[found]))
    try:
        with pytest.raises(CodecError, match=said):
            kernels.kernels_of(torch.device("cpu"))
    finally:
        kernels._cpu_kernels.cache_clear()


def test_the_extension_checks_sizes_itself() -> None:
    values, room = torch.randn(64), torch.empty(16, dtype=torch.uint8)
    cpu: Any = kernels.kernels_of(torch.device("cpu"))
    blockint, mpc, zfp = (cpu.functions(codec) for codec in ("blockint", "mpc", "zfp"))
    address, target = values.data_ptr(), room.data_ptr()
    with pytest.raises(ValueError, match="too short"):
        blockint.encode(8, 0, address, 64, target, 16, 1)
    with pytest.raises(ValueError, match="too short"):
        zfp.decode(32, 0, target, 16, address, 64, False, 1)
    with pytest.raises(ValueError, match="out of range"):
        blockint.encode(9, 0, address, 0, target, 16, 1)
    with pytest.raises(ValueError, match="dtype"):
        mpc.encode(1, 3, address, 0, target, 16, 1)
    with pytest.raises(ValueError, match="fp32"):
        blockint.decode(8, 1, target, 16, address, 0, True, 1)
