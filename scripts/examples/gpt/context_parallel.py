"""Shard the example's sequences over ranks by hybridcomp's ring attention. Used from --cp 2 on.

Ranks that share a sequence are consecutive data-parallel ranks of the engine, which averages their
gradients as usual: every rank's loss is the mean over equally many tokens. Engines need no change,
so --cp combines with --tp, --pp and both of torch's engines. This part of the example needs
hybridcomp, as no upstream has attention over ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.data import Share
from hybridcomp.nn import RingAttention, positions, shard


class _Made:
    """This rank's group, set by ``start``."""

    group: dist.ProcessGroup | None = None
    size = 1


def start(cp: int, tp: int, pp: int) -> None:
    """Create the groups of ranks that share a sequence; called by every rank.

    Rank order is that of DeepSpeed and Megatron: tensor ranks fastest, then data, then stages.
    """
    replicas = dist.get_world_size() // (tp * pp)
    for stage in range(pp):
        for first in range(0, replicas, cp):
            for tensor in range(tp):
                ranks = [
                    (stage * replicas + data) * tp + tensor for data in range(first, first + cp)
                ]
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    _Made.group, _Made.size = group, cp


def attention() -> RingAttention:
    """Return causal attention (B, H, T, D) over sequences sharded over this rank's group."""
    return RingAttention(_Made.group)


def places(length: int, device: torch.device) -> Tensor:
    """Return the positions of this rank's ``length`` tokens in the whole sequences."""
    return positions(length * _Made.size, _Made.group, device=device)


def share(whole: Share) -> Share:
    """Return this rank's shard of sequences that all ranks of a group load."""

    def cut(tokens: Tensor) -> Tensor:
        return shard(tokens, _Made.group)

    return replace(
        whole, rank=whole.rank // _Made.size, world_size=whole.world_size // _Made.size, cut=cut
    )
