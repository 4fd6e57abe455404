"""Tables with sparse gradients that ``fully_shard`` ignores, dimension ``embed``.

``fully_shard(model, ignored_params={table.weight})`` leaves a table whole on every rank, and does
not reduce its gradient. Before the step of the optimizer that holds the table, hybridcomp averages
the touched rows over the ranks of the mesh, as FSDP2 averages other gradients; native steps (before
``start_step``) send the rows exactly.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridcomp.channels.channel import Channel
from hybridcomp.channels.messages.row_sums import ANY_SIZE, RowSum, as_gradient, touched
from hybridcomp.codecs import LOSSLESS
from hybridcomp.collectives.row_sums import TouchedRows
from hybridcomp.patches.common.sparse_tables import SparseTables, tables_of


class IgnoredTables:
    """The ignored tables of one model; ``exchange`` is called before each step."""

    def __init__(self, model: nn.Module, channel: Channel, group: dist.ProcessGroup | None) -> None:
        """``group``: the ranks of the mesh; None: all of the job."""
        self._channel, self._group = channel, group
        self.tables = SparseTables(model)
        found = {id(table.weight): table.weight for _, table in tables_of(model)}
        self._weights: dict[int, Any] = {
            key: weakref.ref(weight)
            for key, weight in found.items()
            if not isinstance(weight, DTensor)
        }
        #: the averages already written, by weight, so that a second step averages none again
        self._done: dict[int, weakref.ref[Tensor]] = {}

    def exchange(self, optimizer: Any) -> None:
        """Average the gradients of the tables that ``optimizer`` holds; a collective."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for key, known in self._weights.items():
            weight = known()
            if key in held and weight is not None and weight.requires_grad:
                self._average(key, weight)

    def _average(self, key: int, weight: Tensor) -> None:
        gradient, size = weight.grad, dist.get_world_size(self._group)
        done = self._done.get(key)
        if gradient is not None and done is not None and done() is gradient:
            return
        if gradient is None:  # no batch of this rank has used the table
            mine = TouchedRows(
                weight.new_empty(0).long().cpu(), weight.new_empty(0, weight.shape[1])
            )
        else:
            mine = touched(gradient)
        message = RowSum(
            dtype=weight.dtype, group=self._group, direction="backward", mine=mine,
            scaled=lambda: TouchedRows(mine.ids, mine.values.div(size)),
            table=self.tables.names[key], rows=weight.shape[0], wrong=self.tables.wrong(weight),
        )  # fmt: skip
        codec = self._channel.codec(ANY_SIZE, weight.dtype, self._group, "backward")
        found = message.send(self._channel, codec or LOSSLESS)
        if len(found.ids) or gradient is not None:
            weight.grad = as_gradient(found, weight)
            self._done[key] = weakref.ref(weight.grad)
