"""State the releases of DeepSpeed that these seams fit; a seam states only differences.

``docs/contributing/release.md`` has the steps of moving it.
"""

from __future__ import annotations

REQUIREMENT = "deepspeed >= 0.19, < 0.20"
