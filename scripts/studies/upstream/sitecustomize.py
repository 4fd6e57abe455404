"""Arm hybridcomp in every Python with this folder in PYTHONPATH: upstream's tests and ranks.

Needs HYBRIDCOMP_CONFIG to name a block, which also serves engines whose configuration has none.
"""

from __future__ import annotations

import os
from types import ModuleType

from wrapt import register_post_import_hook


def _without_shm(module: ModuleType) -> None:
    """Skip an unneeded extension that upstream would build for several minutes."""
    module.__compatible_ops__["deepspeed_shm_comm"] = False


register_post_import_hook(_without_shm, "deepspeed.ops")
if os.environ.get("HYBRIDCOMP_CONFIG"):
    import hybridcomp

    hybridcomp.install()
