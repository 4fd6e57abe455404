"""Note what is frozen of an engine, and define the adapter that each engine needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from hybridcomp.channels import Channels

#: attribute of an engine: its ``Frozen``
ATTRIBUTE = "_hybridcomp_frozen_layers"


class Frozen:
    """The parameters of an engine that are frozen.

    Attributes:
        everywhere: their names, of all parts of the model, and the steps that the engine had taken
            when each was frozen; equal on all ranks.
        missed: by name, the steps that a parameter has missed before it was thawed.
        wholly: by part of the model, whether all of it is frozen.
    """

    def __init__(self) -> None:
        self.everywhere: dict[str, int] = {}
        self.missed: dict[str, int] = {}
        self.wholly: list[bool] = []

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds, equal on all ranks; {} where nothing is frozen."""
        found = {"since": dict(self.everywhere), "missed": dict(self.missed)}
        return found if any(found.values()) else {}

    def change(self, names: Iterable[str], trains: bool, now: int) -> None:
        """Note, after ``now`` steps, that parameters train from now on, or are frozen."""
        for name in names:
            if trains:
                self.missed[name] = self.missed.get(name, 0) + now - self.everywhere.pop(name)
            else:
                self.everywhere[name] = now


class Adapter(Protocol):
    """What freezing needs to know of an engine, and has it do.

    Attributes:
        named: the parameters of this rank, by name.
        part: of the model that this rank holds; ranks of one part name the same parameters.
        ranks: global ranks that call together; None: all.
        channels: of the engine; None: it sends natively.
    """

    named: Mapping[str, Tensor]
    part: int
    ranks: Sequence[int] | None
    channels: Channels | None

    def steps(self) -> int:
        """Return the optimizer steps that were taken and not skipped."""

    def refused(self) -> tuple[str, str] | None:
        """Return why this engine cannot freeze: what was found, and what to do; None: it can."""

    def is_open(self) -> bool:
        """Return whether a step has begun and not ended."""

    def apply(self, frozen: Frozen) -> None:
        """Have the engine leave alone what is frozen; ``requires_grad`` says so already.

        No collective. Called once more, after all is as it was, where another rank has failed.
        """


def frozen_of(engine: Any) -> Frozen | None:
    """Return what is frozen of an engine, None where ``freeze`` was never called."""
    found: Frozen | None = vars(engine).get(ATTRIBUTE)
    return found


def give(engine: Any, frozen: Frozen) -> None:
    """Keep ``frozen`` with its engine."""
    vars(engine)[ATTRIBUTE] = frozen
