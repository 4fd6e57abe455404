"""Optional use of NVIDIA's apex, never a dependency.

The package apex on PyPI is an unrelated project. NVIDIA's is built from its repository and has the
extension ``amp_C``; apex is imported only if that exists.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

NORMS = {"rmsnorm": "FusedRMSNorm", "layernorm": "FusedLayerNorm"}


@functools.lru_cache(maxsize=1)
def what_is_apex() -> str:
    """Return ``"nvidia"``, ``"none"``, or why an installed apex is unusable."""
    spec = importlib.util.find_spec("apex")  # finds a top-level package without importing it
    if spec is None:
        return "none"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / "optimizers" / "fused_adam.py").is_file() for folder in folders):
        return "not NVIDIA's: the package of that name on PyPI is another project; uninstall it"
    if importlib.util.find_spec("amp_C") is None:
        return "NVIDIA's, but built without its CUDA extensions"
    return "nvidia"


def usable() -> bool:
    """Return whether fused kernels are usable: NVIDIA's apex and a GPU."""
    return what_is_apex() == "nvidia" and torch.cuda.is_available()


def fused_adam() -> Callable[..., torch.optim.Optimizer] | None:
    """Return ``apex.optimizers.FusedAdam``, or None if unusable."""
    if not usable():
        return None
    found: Callable[..., torch.optim.Optimizer]
    found = importlib.import_module("apex.optimizers").FusedAdam
    return found


def fused_norm(kind: str) -> Callable[[int], nn.Module] | None:
    """Return ``apex.normalization``'s norm of this kind, or None if unusable."""
    if not usable() or importlib.util.find_spec("fused_layer_norm_cuda") is None:
        return None
    module: Any = importlib.import_module("apex.normalization")
    found: Callable[[int], nn.Module] | None = getattr(module, NORMS[kind], None)
    return found
