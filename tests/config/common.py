"""Shared by the tests of the block."""

from __future__ import annotations

from typing import Any

from hybridcomp.config import CompressionConfig


def parse(block: Any) -> CompressionConfig:
    """Parse the ``compression`` block of a ds_config."""
    return CompressionConfig.parse(block)
