"""State which releases of DeepSpeed the seams of this folder fit; a seam says only what differs.

``docs/contributing/release.md`` has the steps of moving it.
"""

from __future__ import annotations

REQUIREMENT = "deepspeed >= 0.19, < 0.20"
