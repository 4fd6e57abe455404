"""Layers of two-dimensional tensor parallelism: products, embeddings, norms, loss.

q * q ranks share every matrix and every activation: rank (i, j) of a ``Mesh`` holds rows i of the
batch and columns j of the features, and one block of each weight (Optimus, arXiv 2104.05343). For a
product, ranks broadcast activations along the rows of the mesh and weights along its columns. For
gradients, they reduce partial products to the rank that keeps the sum. So there are three kinds of
messages, each with its own settings in the block.

``layers`` has the modules that replace those of ``torch.nn``, built on ``products`` (C = AB,
C = AB^T, C = A^T B and their gradients), ``norms`` and ``loss``; ``layouts`` and ``weights``
convert weights from and to the plain model; ``mesh`` has the groups and their collectives.
"""

from __future__ import annotations

from hybridcomp.nn.tp2d.layers import Embedding, LayerNorm, Linear, RMSNorm, project
from hybridcomp.nn.tp2d.loss import cross_entropy
from hybridcomp.nn.tp2d.mesh import Mesh
from hybridcomp.nn.tp2d.weights import gather_state, join_states, layouts_of, load_state

#: for the support matrix
COVERS = ("tp2d",)

__all__ = [
    "COVERS", "Embedding", "LayerNorm", "Linear", "Mesh", "RMSNorm",
    "cross_entropy", "gather_state", "join_states", "layouts_of", "load_state", "project",
]  # fmt: skip
