"""Ring attention as an attention implementation of Hugging Face's transformers.

``register`` puts it into ``ALL_ATTENTION_FUNCTIONS``, the dictionary in which every model of
transformers looks its attention up, and a mask into the one beside it: a model whose attention has
no mask there drops the padding mask without a word. ``shard_batch`` cuts a batch.

    name = register(group)
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=name)
    loss = model(**shard_batch(batch, group)).loss

Every rank has the loss of its own tokens: the mean over ranks is that of the batch where all have
as many labels, and elsewhere with the ``num_items_in_batch`` that ``shard_batch`` gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from hybridcomp.nn.context.attention import ring_attention
from hybridcomp.nn.context.layout import documents_of_mask, gather, shard

COVERS = ("cp",)
REQUIREMENT = "transformers >= 4.53"
#: label of a token that has no loss
IGNORED = -100


def register(group: dist.ProcessGroup | None = None, name: str = "hybridcomp_ring") -> str:
    """Make attention over ``group`` known to transformers; returns the name to ask for it by.

    ``group``: the ranks that share a sequence; None: all of them. Models of other groups need other
    names. Raises ImportError without transformers 4.53 or newer.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        documents: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        """(B, H, S, D) to (B, S, H, D), as every attention function of transformers."""
        _check(module, dropout, more)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        out = ring_attention(
            query, key, value, group, causal=causal, scale=scaling,
            documents=_numbers(attention_mask, documents),
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    def mask(*_: Any, attention_mask: Tensor | None = None, **more: Any) -> Tensor | None:
        """Numbers of documents of whole sequences: a padding mask is gathered once a pass."""
        if more.get("local_size") is not None:
            raise ValueError(
                f"{name}: expected full attention, found a sliding window of "
                f"{more['local_size']} tokens; ring attention has none"
            )
        return None if attention_mask is None else documents_of_mask(gather(attention_mask, group))

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


def shard_batch(
    batch: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """The part of a batch that this rank computes; every rank of ``group`` has the whole of it.

    Adds ``position_ids``, and to ``labels`` the ``shift_labels`` that transformers would otherwise
    make of neighbours that are on another rank by now. A mask of nothing but ones is left out.

    Args:
        batch: tensors (B, S) such as ``input_ids``, ``attention_mask``, ``labels``; ``documents``
            (numbers of packed documents, -1 for padding) stays whole. S is a multiple of two
            tokens a rank.
        group: the ranks that share it; None: all.

    Raises ValueError on a length that cannot be cut.
    """
    whole = dict(batch)
    first = next(iter(whole.values()))
    out: dict[str, Any] = {}
    if "documents" in whole:
        out["documents"] = whole.pop("documents")
    if "position_ids" not in whole:
        whole["position_ids"] = torch.arange(first.shape[1], device=first.device).expand_as(first)
    if "attention_mask" in whole and bool(whole["attention_mask"].all()):
        del whole["attention_mask"]
    if "labels" in whole:
        whole["shift_labels"] = F.pad(whole["labels"][:, 1:], (0, 1), value=IGNORED)
        counted = (whole["shift_labels"] != IGNORED).sum()
        out["num_items_in_batch"] = counted / dist.get_world_size(group)
    return out | {key: shard(values, group) for key, values in whole.items()}


def _check(module: Any, dropout: float, more: Mapping[str, Any]) -> None:
    """Raise ValueError where a model asks for more than a ring computes."""
    asked = {
        "dropout": dropout if module.training else 0.0,
        "sliding_window": more.get("sliding_window"),
        "softcap": more.get("softcap"),
        "position_bias": more.get("position_bias"),
        "s_aux": more.get("s_aux"),
    }
    for name, value in asked.items():
        if isinstance(value, Tensor) or value:
            raise ValueError(
                f"{type(module).__name__}: ring attention has no {name}; found "
                f"{'a tensor' if isinstance(value, Tensor) else value}, use a model without"
            )


def _numbers(mask: Tensor | None, documents: Tensor | None) -> Tensor | None:
    """Numbers of documents, of which tokens under ``mask`` (-1) are none."""
    if mask is not None and mask.dim() != 2:
        raise ValueError(
            f"attention_mask: expected (batch, tokens), found {tuple(mask.shape)}; give numbers of "
            "documents instead"
        )
    if mask is None or documents is None:
        return mask if documents is None else documents
    return documents.masked_fill(mask < 0, -1)
