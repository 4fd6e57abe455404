"""Log figures in torchtitan's TensorBoard and W&B, and save residuals in its checkpoints.

Name the two torchtitan overrides on its command line; no configuration has to be changed:

``-m torchtitan.train ... --override.imports hybridcomp.patches.trainers.torchtitan.ledger_metrics``
``hybridcomp.patches.trainers.torchtitan.checkpoints``
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import derive, override

import hybridcomp
from hybridcomp.patches.trainers.figures import take
from hybridcomp.session.wandb_run import added


class LedgerMetrics(MetricsProcessor):  # type: ignore[misc]
    """torchtitan's metrics, with the ledger's figures added."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):  # type: ignore[misc]
        """Settings of torchtitan's own class."""

    def __init__(self, config: Any, **given: Any) -> None:
        super().__init__(config, **given)
        self._figures: dict[str, float] = {}

    def should_log(self, step: int) -> bool:
        """Return torchtitan's decision to log; it is called in every step, so no report is lost."""
        self._collect()
        return bool(super().should_log(step))

    def log(self, *args: Any, extra_metrics: dict[str, Any] | None = None, **given: Any) -> None:
        """Log torchtitan's metrics, and the figures of reports since the last time."""
        self._collect()
        extra = {**self._figures, **(extra_metrics or {})}
        self._figures = {}
        super().log(*args, extra_metrics=extra, **given)

    def _collect(self) -> None:
        for part in self.model_parts or ():
            if figures := take(part):
                self._figures = {**self._figures, **added(self._figures, figures)}


@override(target=MetricsProcessor.Config, exact=True)  # type: ignore[untyped-decorator]
def ledger_metrics(config: Any) -> Any:
    """Replace torchtitan's metrics class by ``LedgerMetrics``, with the same settings."""
    return derive(config, LedgerMetrics.Config)


class Checkpoints(CheckpointManager):  # type: ignore[misc]
    """torchtitan's checkpoints, with hybridcomp's state (residuals) among its states."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """Settings of torchtitan's own class."""

    def __init__(
        self, config: Any, *, model_parts: list[Any], states: dict[str, Any], **given: Any
    ) -> None:
        for number, part in enumerate(model_parts):
            if hybridcomp.attach(part) is not None:
                name = "hybridcomp" if number == 0 else f"hybridcomp_{number}"
                states[name] = hybridcomp.stateful(part)
        super().__init__(config, model_parts=model_parts, states=states, **given)


@override(target=CheckpointManager.Config, exact=True)  # type: ignore[untyped-decorator]
def checkpoints(config: Any) -> Any:
    """Replace torchtitan's checkpoint manager by ``Checkpoints``, with the same settings.

    To load a checkpoint that was written without this override, pass
    ``--checkpoint.exclude_from_loading hybridcomp``.
    """
    return derive(config, Checkpoints.Config)
