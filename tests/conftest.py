"""Settings shared by all tests."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

# before the rank server imports DeepSpeed, which looks for an accelerator only once
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# wall-clock limits say nothing on a shared machine
settings.register_profile("hybridcomp", deadline=None, print_blob=True)
settings.load_profile("hybridcomp")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU."""
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
