"""List the messages of layers on a mesh (``hybridcomp.nn.tp2d``): blocks of every product.

Every rank sends its block of the left factor along its row and that of the right one along its
column; gradients of a backward pass are summed along the same lines. Numbers of values are those of
this rank's block, which it sends to each of the other ranks of its line once.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridcomp.tools.plan.models.model import BatchShape, MeshBlock, Messages


def product(shape: BatchShape, inputs: float, outputs: float) -> Messages:
    """Return the messages of a linear layer's forward pass."""
    values, weight = _blocks(shape, inputs, outputs)
    return Messages(
        mesh=(MeshBlock("activations", "row", values), MeshBlock("weights", "column", weight))
    )


def gradients(shape: BatchShape, inputs: float, outputs: float) -> Messages:
    """Return a linear layer's messages in backward: both blocks again, sums of both gradients."""
    values, weight = _blocks(shape, inputs, outputs)
    sums = MeshBlock("gradients", "row", values), MeshBlock("gradients", "column", weight)
    return Messages(mesh=(*product(shape, inputs, outputs).mesh, *sums))


def _blocks(shape: BatchShape, inputs: float, outputs: float) -> tuple[float, float]:
    return shape.tokens * inputs / shape.mesh, inputs * outputs / shape.mesh**2


def block(
    shape: BatchShape, hidden: float, query: float, keys: float, between: Sequence[float]
) -> tuple[Messages, Messages]:
    """Return a block's messages, both passes; ``between``: widths of the MLP's first products."""
    sizes = [(hidden, query + 2 * keys), (query, hidden), *((hidden, width) for width in between),
             (between[0], hidden)]  # fmt: skip
    return (
        Messages(mesh=tuple(one for size in sizes for one in product(shape, *size).mesh)),
        Messages(mesh=tuple(one for size in sizes for one in gradients(shape, *size).mesh)),
    )


def look_up(table: float) -> tuple[Messages, Messages]:
    """Return an embedding's messages, both passes: each rank has the tokens of its row already."""
    return (
        Messages(mesh=(MeshBlock("weights", "column", table),)),
        Messages(mesh=(MeshBlock("gradients", "column", table),)),
    )


def output(shape: BatchShape, hidden: float, words: float, tied: bool) -> tuple[Messages, Messages]:
    """Return the output's messages, both passes: a linear layer, or the tied embedding's table."""
    if not tied:
        return product(shape, hidden, words), gradients(shape, hidden, words)
    logits, table = shape.tokens * words / shape.mesh, hidden * words / shape.mesh**2
    weights, rows = MeshBlock("weights", "column", table), MeshBlock("gradients", "row", logits)
    return (
        Messages(mesh=(weights, MeshBlock("activations", "row", logits))),
        Messages(mesh=(rows, weights, rows, MeshBlock("gradients", "column", table))),
    )
