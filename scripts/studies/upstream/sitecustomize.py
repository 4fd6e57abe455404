"""Imported by every Python that has this folder in PYTHONPATH: upstream's tests and their ranks.

Arms hybridcomp where HYBRIDCOMP_CONFIG names a block; the block of the process stands in for
engines whose configuration has none.
"""

from __future__ import annotations

import os
from types import ModuleType

from wrapt import register_post_import_hook


def _without_shm(module: ModuleType) -> None:
    """An extension that upstream would build for several minutes, and can do without."""
    module.__compatible_ops__["deepspeed_shm_comm"] = False


register_post_import_hook(_without_shm, "deepspeed.ops")
if os.environ.get("HYBRIDCOMP_CONFIG"):
    import hybridcomp

    hybridcomp.install()
