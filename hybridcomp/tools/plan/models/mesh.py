"""List the messages of layers on a mesh (``hybridcomp.nn.tp2d``): blocks of every product.

Every rank sends its block of the left factor along its row and its block of the right factor along
its column; backward passes sum gradients along the same rows and columns. ``numel`` counts the
values of this rank's block, which the rank sends once to each other rank of its row or column.
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
    """Return a linear layer's backward messages: both factors' blocks again, both gradients."""
    values, weight = _blocks(shape, inputs, outputs)
    sums = MeshBlock("gradients", "row", values), MeshBlock("gradients", "column", weight)
    return Messages(mesh=(*product(shape, inputs, outputs).mesh, *sums))


def _blocks(shape: BatchShape, inputs: float, outputs: float) -> tuple[float, float]:
    return shape.tokens * inputs / shape.mesh, inputs * outputs / shape.mesh**2


def block(
    shape: BatchShape, hidden: float, query: float, keys: float, between: Sequence[float]
) -> tuple[Messages, Messages]:
    """Return a transformer block's messages of forward and of backward.

    ``between``: output width of each of the MLP's input matrices (two if it is gated).
    """
    sizes = [(hidden, query + 2 * keys), (query, hidden), *((hidden, width) for width in between),
             (between[0], hidden)]  # fmt: skip
    return (
        Messages(mesh=tuple(one for size in sizes for one in product(shape, *size).mesh)),
        Messages(mesh=tuple(one for size in sizes for one in gradients(shape, *size).mesh)),
    )


def look_up(table: float) -> tuple[Messages, Messages]:
    """Return an embedding's forward and backward messages; a rank has its row's tokens already."""
    return (
        Messages(mesh=(MeshBlock("weights", "column", table),)),
        Messages(mesh=(MeshBlock("gradients", "column", table),)),
    )


def output(shape: BatchShape, hidden: float, words: float, tied: bool) -> tuple[Messages, Messages]:
    """Return the output layer's forward and backward messages, by its own or the tied weight."""
    if not tied:
        return product(shape, hidden, words), gradients(shape, hidden, words)
    logits, table = shape.tokens * words / shape.mesh, hidden * words / shape.mesh**2
    weights, rows = MeshBlock("weights", "column", table), MeshBlock("gradients", "row", logits)
    return (
        Messages(mesh=(weights, MeshBlock("activations", "row", logits))),
        Messages(mesh=(rows, weights, rows, MeshBlock("gradients", "column", table))),
    )
