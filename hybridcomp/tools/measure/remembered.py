"""Keep a measurement's table where runs with ``"when": "auto"`` look for it."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from hybridcomp.autotune import measured
from hybridcomp.autotune.measured import MeasuredRow
from hybridcomp.channels.accounting.rank_messages import Way
from hybridcomp.codecs.words import DTYPES
from hybridcomp.dimensions import Dimension
from hybridcomp.errors import HybridcompError
from hybridcomp.job.agreement import tell
from hybridcomp.tools.plan.choices import Choice
from hybridcomp.tools.plan.cost.calls import EngineCall
from hybridcomp.tools.plan.cost.prices import Prices
from hybridcomp.tools.plan.crossing import OPERATIONS
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.search.budget import BITS_4, BITS_8, LOSSLESS

#: values of the messages of a table
NUMELS = tuple(1 << power for power in range(15, 28))
CHOICES = (*BITS_4, *BITS_8, *LOSSLESS)


def keep(cluster: Cluster, device: torch.device) -> str:
    """Write the table of ``cluster`` on rank 0, and return a sentence; a collective over the job.

    "" where there is no folder for it, or nothing to tell.
    """
    hosts = [row["host"] for row in tell({"host": platform.node()}, what="hosts")]
    path = measured.path_of(device) if dist.get_rank() == 0 else None
    rows = list(table(cluster))
    if path is None or not rows:
        return ""
    problem = measured.write(path, hosts, rows, time.time())
    if problem:
        return f'not kept for runs with "when": "auto": {problem}'
    return f'kept for runs with "when": "auto" on these machines ({path})'


def table(cluster: Cluster) -> Iterator[MeasuredRow]:
    """Yield the rows of ``cluster``: messages among all ranks, in one level and in two."""
    if cluster.world_size < 2:
        return
    prices = Prices(cluster)
    several = 1 < cluster.nodes < cluster.world_size
    for dtype in sorted(cluster.dtypes):
        for choice in CHOICES:
            if not prices.knows(choice, DTYPES[dtype]):
                continue
            for how in OPERATIONS:
                for levels in (1, 2) if several else (1,):
                    row = _row(cluster, prices, choice, how, DTYPES[dtype], dtype, levels)
                    if row is not None:
                        yield row


def _row(
    cluster: Cluster, prices: Prices, choice: Choice, how: Way, dtype: torch.dtype, name: str,
    levels: int,
) -> MeasuredRow | None:  # fmt: skip
    """Return one row; None where a figure that it needs was not measured."""
    native, encoded = OPERATIONS[how]
    dimension: Dimension = "zero" if how == "gather" else "dp"
    ranks, nodes, codec = cluster.world_size, cluster.nodes, choice.codec
    assert codec is not None
    seconds: tuple[list[float], list[float]] = [], []
    try:
        for numel in NUMELS:
            call = EngineCall(native, numel, ranks, nodes, encoded, levels)
            for column, one in zip(seconds, (Choice(), choice), strict=True):
                column.append(prices.of(call, one, dtype, dimension).seconds.value)
    except HybridcompError:
        return None
    columns = [tuple(column) for column in seconds]
    return MeasuredRow(how, codec.spec, name, levels, NUMELS, *columns)
