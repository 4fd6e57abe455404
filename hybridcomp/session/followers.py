"""Followers: what else is done around the optimizer steps of a session, such as publishing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class StepFollower(Protocol):
    """Called around every optimizer step, on all ranks together; may be a collective."""

    @property
    def name(self) -> str:
        """The key of its row in a report."""

    def before_step(self) -> None:
        """Prepare: the weights are those before the step."""

    def after_step(self, step: int) -> None:
        """Do what is due after optimizer step ``step``."""

    def after_skip(self) -> None:
        """Do what is due although the optimizer step was skipped for an overflow."""

    def row(self) -> Mapping[str, float] | None:
        """Return its figures since the last call, equal on all ranks; None: nothing was done."""

    def close(self) -> None:
        """Free what is held. No collective."""
