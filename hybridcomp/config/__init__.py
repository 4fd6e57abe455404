"""The ``"compression"`` block: its model, its presets, and errors that name the key.

``block`` has the model of the block, ``dimension`` and ``directional`` have the models of a
dimension, and ``codec_settings`` has the model of a codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridcomp.config.block import BLOCK, CompressionConfig
from hybridcomp.config.error_messages import near_key, show
from hybridcomp.config.islands import IslandConfig
from hybridcomp.config.json_schema import schema
from hybridcomp.config.ledger import LedgerConfig
from hybridcomp.config.presets import PRESETS
from hybridcomp.config.sources import SOURCE, read_source
from hybridcomp.config.summary import describe, idle_notes, notes
from hybridcomp.errors import ConfigError

__all__ = [
    "BLOCK", "PRESETS", "SOURCE", "CompressionConfig", "IslandConfig", "LedgerConfig", "describe",
    "idle_notes", "load_config", "notes", "read_source", "schema",
]  # fmt: skip


def load_config(source: Mapping[str, Any] | str | Path) -> CompressionConfig | None:
    """Read the block of a DeepSpeed configuration; None if it is missing or not enabled.

    ``source`` is anything that DeepSpeed takes: a dict, the path of a JSON or Hjson file, or base64
    of JSON. Raises ConfigError in one line, naming the key.
    """
    ds_json = read_source(source)
    if BLOCK not in ds_json:
        near = near_key(ds_json, BLOCK)
        if near is not None:
            raise ConfigError(near, show(ds_json[near]), f"unknown key; did you mean {BLOCK!r}?")
        return None
    config = CompressionConfig.parse(ds_json[BLOCK])
    return config if config.enabled else None
