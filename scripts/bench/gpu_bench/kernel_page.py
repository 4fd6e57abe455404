"""What was read of the kernels, as a page."""

from __future__ import annotations
from collections.abc import Sequence
from typing import Any
from bench.gpu_bench.machine_code import Kernel
Row = tuple[int, str, str, Kernel]
def document(rows: Sequence[Row], facts: dict[str, Any]) -> str: return "\n"
def spilled(rows: Sequence[Row]) -> list[str]: return [f"{a} {s} {t} {k.name}: {k}" for a,s,t,k in rows if k.stack or k.spill_loads or k.spill_stores]
