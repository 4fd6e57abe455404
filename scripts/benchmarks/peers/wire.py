"""Collectives that count the bytes a rank sends, and the groups of two-level schemes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.group import Group
from hybridcomp.collectives.wire.handle import Meter

#: torch.distributed functions that FSDP2 calls, in this and earlier versions of torch
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")
GATHERS = ("all_gather_single", "all_gather_into_tensor")


@dataclass
class Wire:
    """Counts bytes passed to torch.distributed for other ranks, scales included.

    Messages use hybridcomp's transport, so that comparing times compares methods.

    Reductions count as a ring's bytes, the minimum, as in nccl-tests (PERFORMANCE.md) and in
    hybridcomp's ledger.
    """

    sent: float = 0.0
    #: False while losses and norms are reduced, which do not belong to the method
    counting: bool = field(default=True)
    #: FSDP2's native messages: values that were summed, and bytes that were gathered
    summed: float = 0.0
    gathered: float = 0.0

    def all_to_all(self, rows: Tensor, group: Any) -> Tensor:
        """Send row d of ``rows`` to member d; row s of the result is from member s."""
        out, rows = torch.empty_like(rows), rows.contiguous()
        members = len(rows)
        splits = [rows[0].numel()] * members
        known = Group.of(group)
        sent = rows.view(-1), splits, splits, known, Meter()
        transport.all_to_all(out.view(-1), *sent).wait()
        self.count(rows.nbytes * (members - 1) / members)
        return out

    def all_gather(self, row: Tensor, group: Any) -> Tensor:
        """Gather (n,) of every member as (members, n)."""
        members = dist.get_world_size(group)
        out, row = (
            torch.empty(members, len(row), dtype=row.dtype, device=row.device),
            row.contiguous(),
        )
        transport.all_gather(out.view(-1), row, Group.of(group), Meter()).wait()
        self.count(row.nbytes * (members - 1))
        return out

    def count(self, nbytes: float) -> None:
        """Add to the total unless counting is off."""
        if self.counting:
            self.sent += nbytes

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count the collectives of torch's DDP hooks and FSDP2."""

        def sum_all(members: int, tensor: Tensor) -> None:
            part = (members - 1) / members
            self.count(2 * tensor.nbytes * part)

        def sum_shards(members: int, _: Tensor, values: Tensor) -> None:
            part = (members - 1) / members
            self.count(values.nbytes * part)
            self.summed += values.numel() * part

        def gather(members: int, _: Tensor, shard: Tensor) -> None:
            self.count(shard.nbytes * (members - 1))
            self.gathered += shard.nbytes * (members - 1)

        with contextlib.ExitStack() as stack:
            counts: list[tuple[str, Callable[..., None]]] = [
                ("all_reduce", sum_all),
                *((name, sum_shards) for name in SCATTERS),
                *((name, gather) for name in GATHERS),
            ]
            for name, count in counts:
                if hasattr(dist, name):
                    counted = _counted(getattr(dist, name), count)
                    stack.enter_context(mock.patch.object(dist, name, counted))
            yield


def _counted(native: Callable[..., Any], count: Callable[..., None]) -> Callable[..., Any]:
    """Wrap ``native``: pass its group size and tensors to ``count``, then call it."""

    def around(*tensors: Any, **named: Any) -> Any:
        shown = [given for given in (*tensors, *named.values()) if isinstance(given, Tensor)]
        count(dist.get_world_size(named.get("group")), *shown)
        return native(*tensors, **named)

    return around


class Nodes:
    """Nodes of ``per_node`` consecutive ranks; all ranks must create it, in the same order.

    Raises ValueError if the ranks do not fill whole nodes.
    """

    def __init__(self, per_node: int) -> None:
        ranks = dist.get_world_size()
        if per_node < 1 or ranks % per_node:
            raise ValueError(
                f"--per-node {per_node}: expected a divisor of the {ranks} ranks; change either"
            )
        self.per_node, self.count, self.ranks = per_node, ranks // per_node, ranks
        node, local = divmod(dist.get_rank(), per_node)
        inside = [
            dist.new_group([n * per_node + i for i in range(per_node)]) for n in range(self.count)
        ]
        across = [
            dist.new_group([n * per_node + i for n in range(self.count)]) for i in range(per_node)
        ]
        self.intra, self.inter = inside[node], across[local]
