"""Make keys of n-grams for hashed tables."""

from __future__ import annotations

import torch
from torch import Tensor


def mixed(keys: Tensor) -> Tensor:
    """Hash int64 ``keys`` by splitmix64: each bit of a result depends on all bits of its key."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        keys = (keys ^ (keys >> shift & (1 << 64 - shift) - 1)) * factor
    return keys ^ (keys >> 31 & (1 << 33) - 1)


def ngram_keys(tokens: Tensor, length: int) -> Tensor:
    """Return an int64 key for each token of (..., T) together with the ``length`` - 1 before it.

    Positions before a row's start count as token -1. The keys are for
    ``CachedEmbedding(hashed=True)``; cheapest on the host, where the lookup reads them.
    """
    keys = torch.zeros(tokens.shape, dtype=torch.int64, device=tokens.device)
    for back in range(length):
        before = torch.full_like(tokens, -1, dtype=torch.int64)
        before[..., back:] = tokens[..., : tokens.shape[-1] - back]
        keys = mixed(keys + before)
    return keys
