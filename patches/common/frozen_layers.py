"""Record the frozen parameters of an engine, and define the adapter that each engine needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from hybridcomp.channels import Channels

#: attribute of an engine that holds its ``Frozen``
ATTRIBUTE = "_hybridcomp_frozen_layers"


class Frozen:
    """The frozen parameters of an engine.

    Attributes:
        everywhere: names in all parts of the model, and the steps that the engine had taken
            when each was frozen; equal on all ranks.
        missed: by name of a thawed parameter, the steps that it missed.
        wholly: by part of the model, whether all of it is frozen.
    """

    def __init__(self) -> None:
        self.everywhere: dict[str, int] = {}
        self.missed: dict[str, int] = {}
        self.wholly: list[bool] = []

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, equal on all ranks; {} if nothing was ever frozen."""
        found = {"since": dict(self.everywhere), "missed": dict(self.missed)}
        return found if any(found.values()) else {}

    def change(self, names: Iterable[str], trains: bool, now: int) -> None:
        """Record that the parameters ``names`` train, or are frozen, from step ``now`` on."""
        for name in names:
            if trains:
                self.missed[name] = self.missed.get(name, 0) + now - self.everywhere.pop(name)
            else:
                self.everywhere[name] = now


class Adapter(Protocol):
    """Interface through which ``freeze`` reads and changes an engine.

    Attributes:
        named: the parameters of this rank, by name.
        part: index of this rank's part of the model; ranks of one part use the same names.
        ranks: global ranks that call ``freeze`` together; None: all.
        channels: the engine's channels; None: the engine sends natively.
    """

    named: Mapping[str, Tensor]
    part: int
    ranks: Sequence[int] | None
    channels: Channels | None

    def steps(self) -> int:
        """Return the optimizer steps that were taken and not skipped."""

    def refused(self) -> tuple[str, str] | None:
        """Return why this engine cannot freeze, and what to do; None if it can."""

    def is_open(self) -> bool:
        """Return whether a step has begun and not ended."""

    def apply(self, frozen: Frozen) -> None:
        """Make the engine skip the frozen parameters, whose ``requires_grad`` is set already.

        Calls no collective. If another rank fails, the caller restores all and calls this again.
        """


def frozen_of(engine: Any) -> Frozen | None:
    """Return the ``Frozen`` of an engine; None if ``freeze`` was never called."""
    found: Frozen | None = vars(engine).get(ATTRIBUTE)
    return found
