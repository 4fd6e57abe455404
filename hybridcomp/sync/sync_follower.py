"""Hold what all meetings have in common: the weights, the clock, state and figures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridcomp.channels import Channel
from hybridcomp.config import IslandConfig
from hybridcomp.sync.masters import Masters
from hybridcomp.sync.progress import Progress
from hybridcomp.sync.recurrence import OuterRule
from hybridcomp.sync.stored import checked, read, write


@dataclass
class Figures:
    """Measurements since the last report."""

    meetings: int = 0
    skipped: int = 0
    wait_s: float = 0.0
    drift: float = 0.0
    ahead: int = 0


def rule_of(config: IslandConfig) -> OuterRule:
    """Return the arithmetic that a block asks for."""
    outer = config.outer
    return OuterRule(
        outer.lr,
        outer.momentum,
        outer.nesterov,
        config.error_feedback,
        config.decay,
        config.mix,
        bool(config.staleness),
    )


def drift_of(rows: Tensor, weights: Tensor) -> float:
    """Return how far islands lie apart: the norm of what is not common, over that of the weights.

    ``rows``: what each has moved.
    """
    apart = (rows - rows.mean(dim=0)).square().sum() / len(rows)
    return float((apart / weights.square().sum().clamp(min=1e-30)).sqrt())


class SyncFollower(ABC):
    """A ``StepFollower`` that holds meetings of islands; all ranks call it at the same steps.

    Attributes:
        config: the block's ``sync``.
        progress: clock, parts and what is under way.
    """

    name = "sync"

    def __init__(
        self, channel: Channel, make: Callable[[], Masters], say: Callable[..., object]
    ) -> None:
        """Hold what meetings need.

        Args:
            channel: of dimension ``sync``.
            make: returns what this rank's optimizer changes; called before the first step.
            say: tells the user a sentence, on rank 0.
        """
        self.config: IslandConfig = channel.state.config.sync
        self.progress = Progress()
        self._channel, self._make, self._say = channel, make, say
        self._masters: Masters | None = None
        self._loaded: Sequence[Mapping[str, Any]] | None = None
        self._figures = Figures()

    @property
    def masters(self) -> Masters:
        """Return the weights of this rank, once meetings have begun."""
        assert self._masters is not None, "begun"
        return self._masters

    @property
    def clock(self) -> int:
        """Return the steps that the optimizer was asked for, skipped ones as well."""
        return self.progress.clock

    @abstractmethod
    def after_step(self, step: int) -> None:
        """Hold the meetings that are due after a step; ``step`` is not used, see the clock."""

    def after_skip(self) -> None:
        """Count a step that was skipped for an overflow."""
        self.after_step(-1)

    def close(self) -> None:
        """Free start copies, momentum, residuals and what is under way. No collective."""
        self.progress = Progress()
        self._masters = self._loaded = None

    @abstractmethod
    def state(self) -> dict[str, Any] | None:
        """Return this rank's state, of plain types and CPU tensors; None before the first step."""

    def save(self, folder: Path) -> None:
        """Write this rank's state into ``folder``."""
        write(folder, self.state())

    def read(self, folder: Path) -> None:
        """Read the state in ``folder``, to continue from it with the next step."""
        self.resume(read(folder))

    def resume(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Continue with the next step from ``entries`` that this rank has read.

        Raises CheckpointError where one is damaged; nothing has changed then.
        """
        found = [checked("the state of sync", entry) for entry in entries]
        self.close()
        self._loaded = found
