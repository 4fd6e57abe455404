"""State which rows of ``CachedEmbedding`` this rank owns, for publishing."""

from __future__ import annotations

import functools
import weakref
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hybridcomp.job.parameter_names import plain_name
from hybridcomp.nn import has_tables
from hybridcomp.publishing import EngineWeights, Held, WeightRange


def with_tables(found: EngineWeights, *models: nn.Module) -> EngineWeights:
    """Return the weights ``found``, with the tables of ``models`` in place of their anchors.

    Rank r of n has the rows r, r + n, ... of the weight.
    """
    if not has_tables() or found.refused is not None:
        return found
    shapes, dtypes, held = dict(found.shapes), dict(found.dtypes), list(found.held)
    for path, module in (pair for model in models for pair in model.named_modules()):
        if "hybridcomp.nn.tables.embedding" not in {c.__module__ for c in type(module).__mro__}:
            continue
        table: Any = module
        prefix = plain_name(f"{path}." if path else "")
        anchor, weight = f"{prefix}anchor", f"{prefix}weight"
        shapes.pop(anchor, None)
        dtypes[weight] = dtypes.pop(anchor, table.anchor.dtype)
        held = [one for one in held if one.stretch.name != anchor]
        rows, width = table.num_embeddings, table.embedding_dim
        shapes[weight] = (rows, width)
        count, ranks = table.host.rows, table.owners.ranks
        if count:
            stride = ranks * width if count > 1 and ranks > 1 else 0
            runs, length = (count, width) if stride else (1, count * width)
            place = WeightRange(weight, table.owners.rank * width, length, runs, stride)
            held.append(Held(place, functools.partial(_rows, weakref.ref(module))))
    return replace(found, shapes=shapes, dtypes=dtypes, held=held)


def _rows(known: weakref.ref[Any]) -> Tensor:
    table = known()
    assert table is not None, "the engine of a publisher is alive"
    table.slots.flush()
    rows: Tensor = table.host.states["weight"]
    return rows
