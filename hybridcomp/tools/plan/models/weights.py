"""List the weight tensors of a decoder: values of each on one rank, in their order.

Queries, keys and values are separate matrices, as in most models; norms and biases are one tensor,
as they are small. A model that fuses some has larger tensors.
"""

from __future__ import annotations

from hybridcomp.tools.plan.models.model import BatchShape
from hybridcomp.tools.plan.models.sizes import DecoderSizes


def block(
    model: DecoderSizes, shape: BatchShape, feed_forward: int, parameters: float
) -> tuple[float, ...]:
    """Return a block's tensors; ``feed_forward``: width of its dense feed-forward layer, or 0."""
    cut = shape.cut * shape.mesh
    keys = max(model.keys, shape.cut * model.head_width if shape.cut > model.kv_heads else 0)
    widths = [model.query, keys, keys, model.query]
    return _with_rest((*(model.hidden * width / cut for width in widths),
                       *feed_forwards(model, shape, feed_forward, 1)), parameters)  # fmt: skip


def feed_forwards(
    model: DecoderSizes, shape: BatchShape, width: int, count: float
) -> tuple[float, ...]:
    """Return the matrices of ``count`` feed-forward layers, or experts."""
    if not width:
        return ()
    one = model.hidden * width / (shape.cut * shape.mesh)
    return (one,) * round(count * (3 if model.gated else 2))


def experts(
    model: DecoderSizes, shape: BatchShape, width: int, count: float, parameters: float
) -> tuple[float, ...]:
    """Return the tensors of a block's experts on one rank."""
    return _with_rest(feed_forwards(model, shape, width, count), parameters)


def _with_rest(matrices: tuple[float, ...], parameters: float) -> tuple[float, ...]:
    """Append one tensor for the ``parameters`` values that are in no matrix, if any."""
    rest = parameters - sum(matrices)
    return (*matrices, rest) if rest > 0.5 else matrices
