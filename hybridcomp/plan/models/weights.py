"""The tensors that a decoder's weights are: how many values each has on one rank, in their order.

Matrices as most models have them, queries, keys and values apart; norms and biases are one tensor,
as they are small. Of a model that fuses some, a tensor is larger.
"""

from __future__ import annotations

from hybridcomp.plan.models.model import Shape
from hybridcomp.plan.models.sizes import Sizes


def block(model: Sizes, shape: Shape, feed_forward: int, parameters: float) -> tuple[float, ...]:
    """Of a block, whose feed-forward layer (0: none that every replica has) is so wide."""
    cut = shape.cut * shape.mesh
    keys = max(model.keys, shape.cut * model.head_width if shape.cut > model.kv_heads else 0)
    widths = [model.query, keys, keys, model.query]
    return _with_rest((*(model.hidden * width / cut for width in widths),
                       *feed_forwards(model, shape, feed_forward, 1)), parameters)  # fmt: skip


def feed_forwards(model: Sizes, shape: Shape, width: int, count: float) -> tuple[float, ...]:
    """The matrices of ``count`` feed-forward layers, or experts."""
    if not width:
        return ()
    one = model.hidden * width / (shape.cut * shape.mesh)
    return (one,) * round(count * (3 if model.gated else 2))


def experts(
    model: Sizes, shape: Shape, width: int, count: float, parameters: float
) -> tuple[float, ...]:
    """Of the experts of a block that a rank holds."""
    return _with_rest(feed_forwards(model, shape, width, count), parameters)


def _with_rest(matrices: tuple[float, ...], parameters: float) -> tuple[float, ...]:
    """With what is left of all ``parameters``, if anything is."""
    rest = parameters - sum(matrices)
    return (*matrices, rest) if rest > 0.5 else matrices
