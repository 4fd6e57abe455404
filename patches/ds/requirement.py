"""State the releases of DeepSpeed that these seams fit; a seam states only differences.

``docs/contributing/release.md`` says how to raise this requirement.
"""

from __future__ import annotations

REQUIREMENT = "deepspeed >= 0.19, < 0.20"
