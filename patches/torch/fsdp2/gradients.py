"""Read how an FSDP2 group reduces gradients: dtype, divisors, and the ranges each rank encodes."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from hybridcomp.channels.checkpoint.resharing import Sends
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.collectives.topology import ranks_of
from hybridcomp.patches.torch.fsdp2.members import Members
from hybridcomp.patches.torch.state.stateful import BETWEEN


def divisors(every: Iterable[Members], native_inside: bool) -> dict[str, float]:
    """Return, by name of a residual, the ratio of its message's sum to the final gradient.

    The ratio is the total divisor of gradients, without the part applied before the sum: fp16 is
    divided by a power of two first, and replicas sum what shard groups have averaged already.
    """
    found: dict[str, float] = {}
    for members in every:
        group, (size, _) = members.group, members.place
        whole = size * (1 if members.replicas is None else members.replicas.size())
        factor = float(group.gradient_divide_factor or whole)
        between = factor
        if reduce_dtype(group) == torch.float16:
            before = 1.0
            while factor % before == 0 and factor / before > before:
                before *= 2
            factor = between = factor / before
        elif not group.force_sum_reduction_for_comms:
            between = 1.0 if group.gradient_divide_factor else factor / size
        for member in members.members:
            for row in member.pieces(size):
                for piece in row:
                    if piece.name and not (native_inside and whole > size):
                        found[piece.name] = factor
                    if piece.name and whole > size:
                        found[BETWEEN + piece.name] = between
    return found


def sends(every: Iterable[Members], native_inside: bool) -> dict[str, Sends]:
    """Return, by name of a residual, the ranges of the parameter that this rank encodes.

    In a reduce-scatter to shards a rank encodes the whole parameter, between replicas only its own
    shard. To be called before ``fill`` replaces the group of the replicas.
    """
    found: dict[str, Sends] = {}
    for members in every:
        size, rank = members.place
        outer = None if members.replicas is None else ranks_of(members.replicas)
        inner = None if members.shards is None else ranks_of(members.shards)
        for member in members.members:
            rows = member.pieces(size)
            pieces = [piece for row in rows for piece in row if piece.name]
            if pieces and not (native_inside and outer):
                found[pieces[0].name] = Sends(tuple(_edges(pieces)), inner)
            own = [piece for piece in rows[rank] if piece.name]
            if own and outer:
                found[BETWEEN + own[0].name] = Sends(tuple(_edges(own)), outer)
    return found


def _edges(pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    return [(piece.offset, piece.offset + piece.numel) for piece in pieces]


def reduce_dtype(group: Any) -> torch.dtype:
    """Return the dtype in which FSDP will reduce; FSDP sets it at the first forward pass only."""
    every = group.fsdp_params
    trained = [p for p in every if p.sharded_param.requires_grad] or every
    return functools.reduce(torch.promote_types, map(_grad_dtype, trained))


def _grad_dtype(parameter: Any) -> torch.dtype:
    """Return the dtype in which the gradients of one parameter are reduced.

    From torch 2.15 on a policy without ``reduce_dtype`` takes the sharded parameter's
    ``grad_dtype`` or dtype; before 2.15 it took the unsharded parameter's dtype.
    """
    policy, sharded = parameter.mp_policy, parameter.sharded_param
    if hasattr(parameter, "sharded_grad_dtype"):
        own = parameter.sharded_grad_dtype if parameter._has_sharded_grad_dtype_override else None
        found = policy.reduce_dtype or own or sharded.dtype
    else:
        found = policy.reduce_dtype or policy.param_dtype or sharded.dtype
    assert isinstance(found, torch.dtype)
    return found
