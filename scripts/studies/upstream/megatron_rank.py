"""Run a rank of Megatron's unit tests on a CPU: fake torch.cuda, gloo for NCCL, pytest.

torchrun --nproc-per-node 2 megatron_rank.py REPORTS TEST_FILE[::TEST]...
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[3]


def stand_ins() -> Any:
    """Load the stand-ins by path: upstream's tests are also a package named ``tests``."""
    path = ROOT / "tests/stand_ins/megatron_on_cpu.py"
    spec = importlib.util.spec_from_file_location("megatron_on_cpu", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(reports: str, *places: str) -> int:
    """Run a file's tests; write their outcomes to ``reports``, one file per rank."""
    on_cpu = stand_ins()
    on_cpu.install()
    original = dist.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **{**kwargs, "backend": "gloo"})

    dist.init_process_group = init_process_group
    import megatron.core  # noqa: F401

    on_cpu.patch()
    report = Path(reports, f"{Path(places[0].partition('::')[0]).stem}.{os.environ['RANK']}.xml")
    # without upstream's conftest, which downloads a data set
    options = ["-q", "--noconftest", f"--junitxml={report}", "-p", "no:cacheprovider"]
    return int(pytest.main([*options, *places]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
