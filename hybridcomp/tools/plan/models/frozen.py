"""A model whose first blocks are frozen (``hybridcomp.freeze``), as the planner sees it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridcomp.errors import ConfigError
from hybridcomp.tools.plan.models.model import BatchShape, Messages, Model, ModelLayer


@dataclass(frozen=True)
class FrozenModel:
    """``model`` with its first ``frozen`` blocks, and the layers before them, not trained."""

    model: Model
    frozen: int

    def __post_init__(self) -> None:
        """Refuse what ``hybridcomp.freeze`` refuses. Raises ConfigError."""
        blocks = len(self.model.repeated)
        if not 1 <= self.frozen < max(blocks, 1):
            todo = f"expected 1 to {blocks - 1}, fewer than the model's {blocks} blocks"
            raise ConfigError("--frozen", self.frozen, todo)
        if not self.model.is_chain or self.model.shared(BatchShape(1, 1)):
            todo = "the embedding would train as the head's weight; untie them to freeze the front"
            what = "a model that is no chain" if not self.model.is_chain else "tied embeddings"
            if not self.model.is_chain:
                todo = "the front of a graph is not known; freeze it in the script"
            raise ConfigError("--frozen", what, todo)

    @property
    def name(self) -> str:
        """Name of the model, with its frozen blocks."""
        return f"{self.model.name}, {self.frozen} frozen"

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.model.depth

    @property
    def parameters(self) -> float:
        """Parameters of the whole model."""
        return self.model.parameters

    @property
    def is_chain(self) -> bool:
        """True: others are refused."""
        return True

    @property
    def repeated(self) -> range:
        """The layers that are blocks."""
        return self.model.repeated

    def layers(self, shape: BatchShape) -> tuple[ModelLayer, ...]:
        """Return the layers; frozen ones keep nothing for a backward pass."""
        front = self.model.repeated.start + self.frozen
        return tuple(
            replace(
                layer, frozen=True, backward_flops=0.0, backward=Messages(), kept_nbytes=0.0,
                input_nbytes=0.0,
            )
            if number < front else layer
            for number, layer in enumerate(self.model.layers(shape))
        )  # fmt: skip

    def shared(self, shape: BatchShape) -> float:
        """Return 0: models that share are refused."""
        return 0.0

    def refuses(self, shape: BatchShape) -> str | None:
        """Say why the model cannot be cut into ``shape``; None where it can."""
        return self.model.refuses(shape)
