"""The processor, asked for once: in every rank DeepSpeed's builders would, which takes seconds."""

from __future__ import annotations

import cpuinfo  # type: ignore[import-untyped]

_known = cpuinfo.get_cpu_info()
cpuinfo.get_cpu_info = lambda: _known
