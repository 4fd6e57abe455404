"""State which releases of megatron-core and Transformer Engine the seams of this folder fit."""

from __future__ import annotations

REQUIREMENT = "megatron-core >= 0.13, < 0.20"
#: of the layers that megatron-core builds of it
TRANSFORMER_ENGINE = "transformer-engine >= 2.0, < 2.21"
