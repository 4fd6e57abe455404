"""Log figures in Lightning's loggers (CSV, TensorBoard, W&B, ...).

Under DeepSpeed, Lightning's checkpoints hold the residuals of error feedback. Under Lightning's
other strategies they do not: whenever you save or load a checkpoint, also call
``hybridcomp.save_state(folder)`` or ``load_state(folder)``.
"""

from __future__ import annotations

from typing import Any

import lightning

from hybridcomp.patches.trainers.figures import say_if_idle, take


class LedgerCallback(lightning.Callback):  # type: ignore[misc]
    """Log the ledger's figures: ``lightning.Trainer(callbacks=[LedgerCallback()], ...)``."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Warn where there will be no figures."""
        say_if_idle(trainer.strategy.model)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """Log the report of this batch, if any, under Lightning's step number (from 0)."""
        figures = take(trainer.strategy.model)
        if figures:
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step - 1)
