"""Ring attention as an attention implementation of Hugging Face's transformers.

``register`` adds it to ``ALL_ATTENTION_FUNCTIONS``, the dictionary in which every model of
transformers looks up its attention, and adds a mask function to the dictionary of masks: without
one, transformers silently drops the padding mask. ``shard_batch`` shards a batch.

    name = register(group)
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=name)
    loss = model(**shard_batch(batch, group)).loss

Every rank computes the loss of its own tokens. The mean of these losses is the loss of the batch if
all ranks have equally many labels, or if ``num_items_in_batch`` from ``shard_batch`` is used.
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
#: label of tokens without a loss
IGNORED = -100


def register(group: dist.ProcessGroup | None = None, name: str = "hybridcomp_ring") -> str:
    """Register attention over ``group`` with transformers; return ``name``.

    ``group``: the ranks over which a sequence is sharded; None: all ranks. Each group needs a
    unique name. Raises ImportError without transformers 4.53 or newer.
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
        """Compute attention of (B, H, S, D) as (B, S, H, D), the layout of transformers."""
        _check(module, dropout, more)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        out = ring_attention(
            query, key, value, group, causal=causal, scale=scaling,
            documents=_numbers(attention_mask, documents),
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    def mask(*_: Any, attention_mask: Tensor | None = None, **more: Any) -> Tensor | None:
        """Gather a padding mask, once per pass, as document numbers of the whole sequences."""
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
    """Return the part of a batch that this rank computes; every rank has the whole batch.

    Adds ``position_ids``, and next to ``labels`` the ``shift_labels``, which transformers cannot
    compute from a part whose next token lies on another rank. Drops a mask that is all ones.

    Args:
        batch: tensors (B, S) such as ``input_ids``, ``attention_mask``, ``labels``; S must be a
            multiple of twice the number of ranks. ``documents`` (document numbers of packed
            sequences, -1 for padding) stays whole; if missing, it is derived from ``position_ids``
            that restart, as transformers does without a mask.
        group: the ranks over which the batch is sharded; None: all ranks.

    Raises ValueError on a length that cannot be sharded, and on tensors of other shapes.
    """
    whole = dict(batch)
    shape = next((v.shape[:2] for v in whole.values() if v.dim() > 1), torch.Size((0, 0)))
    for key, values in whole.items():
        if values.dim() < 2 or values.shape[1] != shape[1]:
            shapes = f"expected (batch, {shape[1]}, ...), found {tuple(values.shape)}"
            raise ValueError(f"{key}: {shapes}; cut it by hand, with hybridcomp.nn.shard")
    out: dict[str, Any] = {}
    if "documents" in whole:
        out["documents"] = whole.pop("documents")
    elif "attention_mask" not in whole and "position_ids" in whole:
        out |= _packed(whole["position_ids"])
    if "position_ids" not in whole:
        device = next(iter(whole.values())).device
        whole["position_ids"] = torch.arange(shape[1], device=device).expand(shape)
    if "attention_mask" in whole and bool(whole["attention_mask"].all()):
        del whole["attention_mask"]
    if "labels" in whole:
        whole["shift_labels"] = F.pad(whole["labels"][:, 1:], (0, 1), value=IGNORED)
        counted = (whole["shift_labels"] != IGNORED).sum()
        out["num_items_in_batch"] = counted / dist.get_world_size(group)
    return out | {key: shard(values, group) for key, values in whole.items()}


def _packed(positions: Tensor) -> dict[str, Tensor]:
    """Return the ``documents`` implied by positions (B, S) of packed sequences; {} if unpacked.

    The positions must be those of whole sequences: in one rank's part they jump at every chunk.
    """
    begins = F.pad(positions.diff(dim=1) != 1, (1, 0))
    return {"documents": begins.cumsum(1).to(torch.int32)} if bool(begins.any()) else {}


def _check(module: Any, dropout: float, more: Mapping[str, Any]) -> None:
    """Raise ValueError if a model uses an attention option that the ring does not support."""
    asked = {
        "dropout": dropout if module.training else 0.0,
        "sliding_window": more.get("sliding_window"),
        "softcap": more.get("softcap"),
        "position_bias": more.get("position_bias"),
        "s_aux": more.get("s_aux"),
        # packed sequences: use ``documents``, since a rank's arguments describe only its part
        "cu_seq_lens_q": more.get("cu_seq_lens_q"),
    }
    for name, value in asked.items():
        if isinstance(value, Tensor) or value:
            raise ValueError(
                f"{type(module).__name__}: ring attention has no {name}; found "
                f"{'a tensor' if isinstance(value, Tensor) else value}, use a model without"
            )


def _numbers(mask: Tensor | None, documents: Tensor | None) -> Tensor | None:
    """Return the document numbers, set to -1 for the tokens that ``mask`` marks with -1."""
    if mask is not None and mask.dim() != 2:
        raise ValueError(
            f"attention_mask: expected (batch, tokens), found {tuple(mask.shape)}; give numbers of "
            "documents instead"
        )
    if mask is None or documents is None:
        return mask if documents is None else documents
    return documents.masked_fill(mask < 0, -1)
