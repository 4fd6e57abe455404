"""A model as the planner sees it: a chain (or graph) of layers with their work and their bytes.

Nothing is ever allocated: decoders have closed forms (``models.decoder``), every other module is
traced with tensors that have no storage (``models.traced``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from hybridcomp.policy import Direction

Kind = Literal["embedding", "block", "head", "module"]


@dataclass(frozen=True)
class Shape:
    """What one rank of a stage sees of one micro-batch.

    micro_batch: samples. length: tokens of a whole sample. width: bytes of a value. tensor,
    sequence, context, expert, mesh: the degrees of the layout that cut it. slices: of the tokens,
        of which a pass sees one; all are taken as equally long. ring: how context ranks share keys.
    """

    micro_batch: int
    length: int
    width: int = 2
    tensor: int = 1
    sequence: bool = False
    context: int = 1
    expert: int = 1
    mesh: int = 1
    slices: int = 1
    ring: bool = False

    @property
    def tokens(self) -> float:
        """Of this rank in one pass, before tensor parallelism; rows of a mesh cut the samples."""
        return self.micro_batch * self.length / (self.context * self.mesh * self.slices)

    @property
    def cut(self) -> int:
        """Ranks over which features are cut: tensor ranks, or the columns of a mesh."""
        return self.tensor * self.mesh


@dataclass(frozen=True)
class Block:
    """One block that goes along a line of a mesh: to every other rank of it, or from each.

    kind: of ``tp2d``. line: ``"row"`` or ``"column"``. numel: values of this rank's block.
    """

    kind: Direction
    line: Literal["row", "column"]
    numel: float


@dataclass(frozen=True)
class Messages:
    """Values that one rank hands to collectives for one layer and one micro-batch, one direction.

    tensor: of every message that tensor ranks sum (or, with sequence parallelism, gather and
    scatter). context: of all-to-all. ring: of the keys of this rank, and of its values, where they
    go around a ring instead. expert: of all-to-all. mesh: of products on a mesh.
    """

    tensor: tuple[float, ...] = ()
    context: tuple[float, ...] = ()
    expert: tuple[float, ...] = ()
    ring: tuple[float, ...] = ()
    mesh: tuple[Block, ...] = ()


@dataclass(frozen=True)
class Layer:
    """One layer on one rank, for one micro-batch.

    flops: forward, of matrix products and attention. backward_flops: of its backward pass.
    moved_nbytes: what it reads and writes in forward beside matrix products (elementwise).
    parameters: values that every replica holds on this rank; expert_parameters: values of experts,
    which ``expert`` ranks share. kept_nbytes: what backward needs, its input included.
    input_nbytes: its input alone. work_nbytes: what it takes at its worst moment beside that.
    output: values of its output on this rank. tensors, expert_tensors: values of every one of its
    parameters, in their order; empty where nobody knows them.
    """

    name: str
    kind: Kind
    flops: float
    backward_flops: float
    moved_nbytes: float
    parameters: float
    expert_parameters: float
    kept_nbytes: float
    input_nbytes: float
    work_nbytes: float
    output: float
    forward: Messages = Messages()
    backward: Messages = Messages()
    inputs: tuple[int, ...] = ()  # of a model that is no chain: layers whose output it reads
    tensors: tuple[float, ...] = ()
    expert_tensors: tuple[float, ...] = ()


class Model(Protocol):
    """What the search asks of a model."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def depth(self) -> int:
        """Layers of the chain: embedding, blocks and head."""

    @property
    def parameters(self) -> float:
        """Of the whole model."""

    @property
    def is_chain(self) -> bool:
        """Whether every layer reads the one before it alone."""

    @property
    def repeated(self) -> range:
        """Which of its layers are blocks: those that a script counts, without what is around."""

    def layers(self, shape: Shape) -> tuple[Layer, ...]:
        """The layers as one rank sees them."""

    def shared(self, shape: Shape) -> float:
        """Values on a rank that the first and the last layer share (tied embeddings)."""

    def refuses(self, shape: Shape) -> str | None:
        """Why the model cannot be cut so; None where it can."""


def flops_of(layers: Sequence[Layer]) -> float:
    """Forward and backward of one micro-batch on one rank."""
    return sum(layer.flops + layer.backward_flops for layer in layers)
