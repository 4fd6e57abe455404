"""A model of which a part is frozen, as the planner sees it.

Either its first blocks are frozen (``hybridcomp.freeze``), or a share of every layer (adapters).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridcomp.errors import ConfigError
from hybridcomp.tools.plan.models.model import BatchShape, Messages, Model, ModelLayer


@dataclass(frozen=True)
class _Wrapped:
    """The properties that a partly frozen model takes from ``model``."""

    model: Model

    @property
    def depth(self) -> int:
        return self.model.depth

    @property
    def parameters(self) -> float:
        return self.model.parameters

    @property
    def is_chain(self) -> bool:
        return self.model.is_chain

    @property
    def repeated(self) -> range:
        return self.model.repeated

    def shared(self, shape: BatchShape) -> float:
        return self.model.shared(shape)

    def refuses(self, shape: BatchShape) -> str | None:
        return self.model.refuses(shape)


@dataclass(frozen=True)
class AdaptedModel(_Wrapped):
    """``model`` with the share ``frozen`` of every layer not trained, as under adapters (LoRA).

    Backward passes go through all layers, without the gradients of frozen weights. Layers keep
    their activations, since adapters need them.
    """

    frozen: float

    def __post_init__(self) -> None:
        """Refuse a share out of range. Raises ConfigError."""
        if not 0 < self.frozen < 1:
            todo = "expected a number of blocks, or a share above 0 and below 1, such as 0.99"
            raise ConfigError("--frozen", self.frozen, todo)

    @property
    def name(self) -> str:
        """Name of the model, with its frozen share."""
        return f"{self.model.name}, {self.frozen:.4g} of it frozen"

    def layers(self, shape: BatchShape) -> tuple[ModelLayer, ...]:
        """Return the layers, with less to compute backward."""
        return tuple(self._adapted(layer, shape) for layer in self.model.layers(shape))

    def _adapted(self, layer: ModelLayer, shape: BatchShape) -> ModelLayer:
        """Return ``layer`` without the FLOPs for the gradients of frozen weights."""
        values = layer.parameters + layer.expert_parameters
        products = min(2 * shape.tokens * values, layer.backward_flops - layer.flops)
        spared = self.frozen * max(0.0, products)
        backward = layer.backward_flops - spared
        return replace(layer, frozen=self.frozen, backward_flops=backward, spared_flops=spared)


@dataclass(frozen=True)
class FrozenModel(_Wrapped):
    """``model`` with its first ``frozen`` blocks, and the layers before them, not trained."""

    frozen: int

    def __post_init__(self) -> None:
        """Refuse what ``hybridcomp.freeze`` refuses. Raises ConfigError."""
        blocks = len(self.model.repeated)
        if not 1 <= self.frozen < max(blocks, 1):
            todo = f"expected 1 to {blocks - 1}, fewer than the model's {blocks} blocks"
            raise ConfigError("--frozen", self.frozen, todo)
        if not self.model.is_chain or self.model.shared(BatchShape(1, 1)):
            what = "tied embeddings"
            todo = "the embedding would train as the head's weight; untie them to freeze the front"
            if not self.model.is_chain:
                what = "a model that is no chain"
                todo = "the front of a graph is not known; freeze it in the script"
            raise ConfigError("--frozen", what, todo)

    @property
    def name(self) -> str:
        """Name of the model, with its frozen blocks."""
        return f"{self.model.name}, {self.frozen} frozen"

    def layers(self, shape: BatchShape) -> tuple[ModelLayer, ...]:
        """Return the layers; frozen ones keep nothing for a backward pass."""
        front = self.model.repeated.start + self.frozen
        return tuple(
            replace(
                layer, frozen=1.0, backward_flops=0.0, backward=Messages(), kept_nbytes=0.0,
                input_nbytes=0.0,
            )
            if number < front else layer
            for number, layer in enumerate(self.model.layers(shape))
        )  # fmt: skip


def partly_frozen(model: Model, frozen: float | None) -> Model:
    """Return ``model`` with its first ``frozen`` blocks, or that fraction of each layer, frozen.

    Raises ConfigError for what cannot be frozen.
    """
    if frozen is None:
        return model
    return FrozenModel(model, frozen) if isinstance(frozen, int) else AdaptedModel(model, frozen)
