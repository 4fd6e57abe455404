"""A model as the planner sees it: a chain (or graph) of layers with their FLOPs and bytes.

Nothing is ever allocated: decoders have closed forms (``models.decoder``), every other module is
traced with tensors that have no storage (``models.traced``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from hybridcomp.dimensions import Direction

Kind = Literal["embedding", "block", "head", "module"]


@dataclass(frozen=True)
class BatchShape:
    """Sizes of one micro-batch, and the degrees that cut it for one rank of a stage.

    micro_batch: samples. length: tokens of a whole sample. width: bytes of a value. tensor,
    sequence, context, expert, mesh: the layout's degrees that cut the micro-batch. slices: number
    of token slices, one per pass, taken as equally long. ring: context ranks form a ring of sends.
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
        """Tokens of this rank in one pass, before tensor cuts; rows of a mesh cut the samples."""
        return self.micro_batch * self.length / (self.context * self.mesh * self.slices)

    @property
    def cut(self) -> int:
        """Ranks over which features are cut: tensor ranks, or the columns of a mesh."""
        return self.tensor * self.mesh


@dataclass(frozen=True)
class MeshBlock:
    """One block sent along a row or column of a mesh, to all its other ranks or from each of them.

    kind: the direction of ``tp2d``. line: ``"row"`` or ``"column"``. numel: values of this rank's
    block.
    """

    kind: Direction
    line: Literal["row", "column"]
    numel: float


@dataclass(frozen=True)
class Messages:
    """Numbers of values in a rank's messages, for one layer, one micro-batch and one direction.

    tensor: of each all-reduce among tensor ranks (with sequence parallelism: all-gather or
    reduce-scatter). context: of each all-to-all among context ranks. ring: of this rank's keys and
    values, where context ranks send them around a ring. expert: of each all-to-all among expert
    ranks. mesh: blocks of products on a mesh.
    """

    tensor: tuple[float, ...] = ()
    context: tuple[float, ...] = ()
    expert: tuple[float, ...] = ()
    ring: tuple[float, ...] = ()
    mesh: tuple[MeshBlock, ...] = ()


@dataclass(frozen=True)
class ModelLayer:
    """One layer on one rank, for one micro-batch.

    flops: FLOPs of matrix products and attention in forward. backward_flops: the same in backward.
    moved_nbytes: bytes that elementwise operations read and write in forward. parameters: values
    that every replica holds on this rank; expert_parameters: values of experts, which are spread
    over ``expert`` ranks. kept_nbytes: bytes kept for backward, the input included. input_nbytes:
    bytes of the input alone. work_nbytes: workspace at the peak, without the kept bytes. output:
    values of the output on this rank. tensors, expert_tensors: values of each parameter, in order;
    empty where not known. frozen: share of the parameters without gradients and optimizer states;
    1: the layer has no backward pass either. spared_flops: FLOPs of the gradients of frozen
    weights, which ``backward_flops`` leaves out.
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
    inputs: tuple[int, ...] = ()  # layers whose output it reads, in a model that is no chain
    tensors: tuple[float, ...] = ()
    expert_tensors: tuple[float, ...] = ()
    frozen: float = 0.0
    spared_flops: float = 0.0


class Model(Protocol):
    """Interface of a model for the search."""

    @property
    def name(self) -> str:
        """Name of the model, for people."""

    @property
    def depth(self) -> int:
        """Number of layers: of a decoder embedding, blocks and head."""

    @property
    def parameters(self) -> float:
        """Parameters of the whole model."""

    @property
    def is_chain(self) -> bool:
        """True where every layer reads only the output of the layer before it."""

    @property
    def repeated(self) -> range:
        """The layers that are blocks, without embedding and head."""

    def layers(self, shape: BatchShape) -> tuple[ModelLayer, ...]:
        """Return the layers as one rank holds them."""

    def shared(self, shape: BatchShape) -> float:
        """Return values on a rank that the first and the last layer share (tied embeddings)."""

    def refuses(self, shape: BatchShape) -> str | None:
        """Say why the model cannot be cut into ``shape``; None where it can."""


def flops_of(layers: Sequence[ModelLayer]) -> float:
    """Return the FLOPs of forward and backward of one micro-batch on one rank."""
    return sum(layer.flops + layer.backward_flops for layer in layers)
