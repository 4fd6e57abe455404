"""Layers of two-dimensional tensor parallelism: products, embeddings, norms, loss.

q * q ranks share every matrix and every activation: rank (i, j) of a ``Mesh`` holds rows i of the
batch and columns j of the features, and one block of each weight (Optimus, arXiv 2104.05343). What
a product needs of other ranks is broadcast along rows (activations) and columns (weights) of the
mesh, what it adds up is reduced to the rank that keeps it (gradients): three kinds of traffic, each
with settings of its own in the block.

mesh      the ranks and their groups, what travels between them
lines     blocks and sums along a row or a column, the next one under way behind the product
products  C = AB, C = AB^T, C = A^T B, and what autograd needs of them
norms     LayerNorm and RMSNorm over features that are cut
loss      cross entropy over a vocabulary that is cut
layers    modules that take the place of ``torch.nn``'s
layouts   which part of a whole weight a rank holds; cutting and joining
weights   whole models: to and from the state of the plain one
"""

from __future__ import annotations

from hybridcomp.nn.tp2d.layers import Embedding, LayerNorm, Linear, RMSNorm, project
from hybridcomp.nn.tp2d.loss import cross_entropy
from hybridcomp.nn.tp2d.mesh import Mesh
from hybridcomp.nn.tp2d.weights import gather_state, join_states, layouts_of, load_state

#: for the support matrix
COVERS = ("tp2d",)
REQUIREMENT = "torch >= 2.4"

__all__ = [
    "COVERS", "REQUIREMENT", "Embedding", "LayerNorm", "Linear", "Mesh", "RMSNorm",
    "cross_entropy", "gather_state", "join_states", "layouts_of", "load_state", "project",
]  # fmt: skip
