"""State the releases of megatron-core and Transformer Engine that this folder's seams fit."""

from __future__ import annotations

REQUIREMENT = "megatron-core >= 0.13, < 0.20"
#: Transformer Engine releases whose layers in megatron-core are supported
TRANSFORMER_ENGINE = "transformer-engine >= 2.0, < 2.21"
