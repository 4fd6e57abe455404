"""Core attention of megatron-core's local layers with context parallelism, as a ring.

The seam is ``DotProductAttention``, because upstream refuses ``context_parallel_size`` above 1 only
there. Upstream cuts position embeddings and batches in the layout that a ring of causal blocks
needs (``get_pos_emb_on_this_cp_rank``, ``get_batch_on_this_cp_rank``), and reduces gradients over
data and context ranks together. So the constructor gets a configuration without context
parallelism, and ``forward`` computes with ``hybridcomp.nn.ring_attention``. Without a block
upstream's refusal stays.

Only softmax attention over all earlier tokens, or over all tokens, is accepted; sliding windows,
padding masks, dropout and sinks are refused. Transformer Engine's attention has another ring, which
no seam covers (``rules.mcore``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.nn import ring_attention
from hybridcomp.patches.mcore.requirement import REQUIREMENT
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam
from hybridcomp.session.process import current

MODULE = "megatron.core.transformer.dot_product_attention"
#: parameters of ``forward``; the same in all versions
FORWARD = (
    "self", "query", "key", "value", "attention_mask", "attn_mask_type", "attention_bias",
    "packed_seq_params",
)  # fmt: skip
_HEAD = (
    "self", "config", "layer_number", "attn_mask_type", "attention_type", "attention_dropout",
    "softmax_scale", "cp_comm_type",
)  # fmt: skip
INIT = ((*_HEAD, "pg_collection"), (*_HEAD, "model_comm_pgs"))


def _refuse(key: str, found: object, todo: str) -> None:
    raise ConfigError(f"context_parallel_size > 1 with {key}", Shown(str(found)), todo)


def _check(layer: Any) -> None:
    """Raise ConfigError where the ring cannot compute this attention."""
    config, kind = layer.config, layer.attn_mask_type.name
    if kind not in ("causal", "no_mask"):
        _refuse("attn_mask_type", kind, "use AttnMaskType.causal or no_mask")
    if layer.attention_dropout.p:
        _refuse("attention_dropout", layer.attention_dropout.p, "set attention_dropout to 0")
    if getattr(config, "window_size", None) is not None:
        _refuse("window_size", config.window_size, "remove it")
    if getattr(config, "softmax_type", "vanilla") != "vanilla":
        _refuse("softmax_type", config.softmax_type, 'set it to "vanilla"')
    wished = getattr(config, "cp_comm_type", None)
    if wished not in (None, "p2p", ["p2p"]):
        _refuse("cp_comm_type", wished, 'set it to "p2p": local layers have a ring only')


@around
def make_init(original: Any, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Permit context parallelism in the constructor if there is a block."""
    if config.context_parallel_size == 1 or current() is None:
        original(self, config, *args, **kwargs)
        return
    alone = copy.copy(config)
    alone.context_parallel_size = 1
    original(self, alone, *args, **kwargs)
    self.config = config
    _check(self)


@around
def make_forward(
    original: Callable[..., Tensor],
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Compute attention over the context-parallel ranks: (S, B, H, D) to (S, B, H * D)."""
    if self.config.context_parallel_size == 1:
        return original(self, query, key, value, *args, **kwargs)
    given = dict(zip(FORWARD[4:], args, strict=False)) | kwargs
    for name in ("attention_bias", "packed_seq_params"):
        if given.get(name) is not None:
            _refuse(name, type(given[name]).__name__, "leave it out")
    query, key, value = (values.permute(1, 2, 0, 3) for values in (query, key, value))
    # apply_query_key_layer_scaling divides one factor by the layer's number, multiplies the other
    scale = self.softmax_scale * (self.scale_mask_softmax.scale or 1.0)
    causal = self.attn_mask_type.name == "causal"
    # zigzag layout, the default: Megatron cuts every batch so, whatever the mask
    out = ring_attention(query, key, value, _group(self), causal=causal, scale=scale)
    return out.permute(2, 0, 1, 3).flatten(2)


def _group(layer: Any) -> dist.ProcessGroup:
    """Return the context-parallel group of a layer."""
    groups = getattr(layer, "pg_collection", None) or getattr(layer, "model_comm_pgs", None)
    found: dist.ProcessGroup | None = getattr(groups, "cp", None)
    if found is None:
        from megatron.core import parallel_state

        found = parallel_state.get_context_parallel_group()
    return found


COVERS = ("cp",)
PATCHES = (
    (Seam(REQUIREMENT, MODULE, "DotProductAttention.__init__", INIT), make_init),
    (Seam(REQUIREMENT, MODULE, "DotProductAttention.forward", FORWARD), make_forward),
)
