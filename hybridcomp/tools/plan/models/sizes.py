"""Sizes of a decoder, as config.json and similar files state them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hybridcomp.tools.plan.models.model import BatchShape


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a decoder.

    hidden, blocks, heads, kv_heads, head_width, intermediate, vocabulary: as in config.json.
    gated: SwiGLU or alike. norm: a LayerNorm has a bias. qkv_bias, out_bias, mlp_bias: which linear
    layers have one. tied: one weight for embedding and output. positions: number of learned ones;
    0: rotary. parallel: attention and MLP read the same residual stream (GPT-J, GPT-NeoX).
    experts, per_token: experts per layer and per token; dense_blocks: first blocks without experts;
    expert_intermediate, shared_intermediate: width of an expert, of the shared expert.
    rotary_copies: autograd keeps both the fused qkv and the rotated q and k. composed_norm: torch's
    RMSNorm without a fused kernel (CPUs), which computes in fp32 and keeps two more copies.
    attention_copies: copies of the output of attention that are kept.
    held_logits: the training loop holds the logits while backward runs.
    head_norms: queries and keys are normed head by head (Qwen 3).
    remark: message to the user about sizes that were assumed.
    """

    name: str
    hidden: int
    blocks: int
    heads: int
    kv_heads: int
    head_width: int
    intermediate: int
    vocabulary: int
    gated: bool = False
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    positions: int = 0
    parallel: bool = False
    experts: int = 0
    per_token: int = 0
    dense_blocks: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    rotary_copies: bool = False
    composed_norm: bool = False
    attention_copies: int = 1
    held_logits: bool = False
    head_norms: bool = False
    remark: str = ""

    @property
    def query(self) -> int:
        """Width of a token's queries, all heads together."""
        return self.heads * self.head_width

    @property
    def keys(self) -> int:
        """Width of a token's keys, all heads together; its values are as wide."""
        return self.kv_heads * self.head_width

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return self.hidden * (2 if self.norm == "layernorm" else 1)

    def shared(self, shape: BatchShape) -> float:
        """Return the values on a rank that embedding and output share."""
        return self.vocabulary * self.hidden / (shape.cut * shape.mesh) if self.tied else 0.0

    def is_sparse(self, block: int) -> bool:
        """Return whether block ``block`` has experts."""
        return self.experts > 0 and block >= self.dense_blocks


def padded(vocabulary: int, multiple: int) -> int:
    """Round the vocabulary up to a multiple, as Megatron does."""
    return multiple * math.ceil(vocabulary / multiple)
