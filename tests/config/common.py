"""What the tests of the block share."""

from __future__ import annotations

from typing import Any

from hybridcomp.config import CompressionConfig


def parse(block: Any) -> CompressionConfig:
    """The ``compression`` block, as it stands in a ds_config, as a configuration."""
    return CompressionConfig.parse(block)
