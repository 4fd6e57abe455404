"""Sequences of the example cut over ranks, by hybridcomp's ring attention. Used from --cp 2 on.

Ranks that share a sequence are neighbours among the data-parallel ranks of an engine, so gradients
are averaged over all of these as ever: every rank has the mean loss of as many tokens. No engine
has to know of it, and it goes with --tp, --pp and both of torch's engines. The example's only part
that needs hybridcomp: attention over ranks is no upstream's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from gpt.data import Share
from hybridcomp.nn import RingAttention, positions, shard


class _Made:
    """The group of this rank, once ``start`` has made it."""

    group: dist.ProcessGroup | None = None
    size = 1


def start(cp: int, tp: int, pp: int) -> None:
    """Make the groups of ranks that share a sequence; every rank calls it.

    Ranks are counted as DeepSpeed and Megatron do: tensor ranks fastest, then data, then stages.
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
    """Return causal attention (B, H, T, D) with the keys of all ranks of this rank's group."""
    return RingAttention(_Made.group)


def places(length: int, device: torch.device) -> Tensor:
    """Return positions of this rank's ``length`` tokens in whole sequences."""
    return positions(length * _Made.size, _Made.group, device=device)


def share(whole: Share) -> Share:
    """Return this rank's share where the ranks of a group take the same samples."""

    def cut(tokens: Tensor) -> Tensor:
        return shard(tokens, _Made.group)

    return replace(
        whole, rank=whole.rank // _Made.size, world_size=whole.world_size // _Made.size, cut=cut
    )
