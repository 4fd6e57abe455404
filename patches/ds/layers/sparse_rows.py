"""Gradients of ``nn.Embedding(sparse=True)`` at ZeRO stage 0, dimension ``embed``.

Seam: ``DeepSpeedEngine.sparse_allreduce``, called once for each table, in the order of parameters.
It gets the table's rows, ascending and distinct, and sets the rows of all ranks. Upstream
concatenates them without summing, and so do lossless codecs here: torch's SGD adds rows one after
the other, which rounds differently than adding their sums. A lossy codec sets sums.
``sparse_allreduce_bucket`` above it has several tables; ``sparse_all_gather`` below it pads row
numbers and values in separate messages.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from hybridcomp.channels import Channels, channels_of
from hybridcomp.channels.messages.row_sums import RowSum
from hybridcomp.collectives.row_sums import TouchedRows
from hybridcomp.patches.common.sparse_tables import SparseTables
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam

SPARSE_ALLREDUCE = Seam(
    requirement=REQUIREMENT,
    module="deepspeed.runtime.engine",
    qualname="DeepSpeedEngine.sparse_allreduce",
    parameters=("self", "sparse", "dp_group", "dp_world_size"),
)
#: attribute of an engine: the tables whose ids are checked
TABLES = "_hybridcomp_sparse_tables"


def follow(engine: Any, channels: Channels, undo: ExitStack) -> None:
    """Check the ids of the engine's tables, if ``embed`` has a codec."""
    if channels["embed"].active:
        tables = SparseTables(engine.module)
        setattr(engine, TABLES, tables)
        undo.callback(tables.leave)


def leave(engine: Any) -> None:
    """Stop checking ids of the engine's tables."""
    if (tables := getattr(engine, TABLES, None)) is not None:
        tables.leave()


@around
def make_sparse_allreduce(
    original: Any, self: Any, sparse: Any, dp_group: Any, dp_world_size: float | None = None
) -> Any:
    """Exchange a table's rows encoded; call upstream if there is no codec."""
    channels = channels_of(self)
    tables: SparseTables | None = getattr(self, TABLES, None)
    if channels is None or tables is None:
        return original(self, sparse, dp_group, dp_world_size)
    dtype = sparse.values.dtype
    values = sparse.values.to(self.communication_data_type)
    mine = TouchedRows(sparse.indices.cpu(), values)
    size = dist.get_world_size(dp_group) if dp_world_size is None else dp_world_size
    weight = next(p for p in self.module.parameters() if p.grad is sparse.orig_dense_tensor)
    message = RowSum(
        dtype=values.dtype, group=dp_group, direction="backward", mine=mine,
        scaled=lambda: TouchedRows(mine.ids, values.mul(_factor(self, size))),
        table=tables.names.get(id(weight), "a table"), rows=int(sparse.dense_size[0]),
        wrong=tables.wrong(weight), behind=True,
    )  # fmt: skip

    def finish(found: TouchedRows) -> Any:
        sparse.indices = found.ids.to(sparse.indices.device)
        sparse.values = found.values.to(dtype)
        return sparse

    return channels["embed"].run(
        message,
        native=lambda: original(self, sparse, dp_group, dp_world_size),
        encoded=finish,
    )


def _factor(engine: Any, size: float) -> float:
    """Return upstream's factor on the rows, which is applied fully before the gather."""
    if not engine.gradient_average:
        return 1.0
    scale = engine.gradient_predivide_factor() if engine.postscale_gradients() else 1.0
    return float(scale / size)


COVERS = ("embed",)
PATCHES = ((SPARSE_ALLREDUCE, make_sparse_allreduce),)
