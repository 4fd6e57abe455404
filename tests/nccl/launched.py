"""Start whole jobs under ``scripts/one_gpu.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT
from tests.ranks import python_path


def launch(
    *arguments: str, cwd: Path = ROOT, timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Run the launcher; return it with its output."""
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts/one_gpu.py"), *arguments],
        cwd=cwd, env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
