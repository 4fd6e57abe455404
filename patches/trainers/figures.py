"""Return the figures of the last report of a model's ledger, under any engine.

Names are those of ``metric_names``, ``train/compression/...``, so every log uses the same names. An
open W&B run of the process gets the figures automatically, under these names, with optimizer steps
as the axis (``wandb_run``); a trainer that logs into the same run writes each value a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from hybridcomp.job.launcher import start_command
from hybridcomp.log import say
from hybridcomp.patches.torch.attach import ATTRIBUTE
from hybridcomp.patches.torch.auto_attach import ARMED
from hybridcomp.session.engine_session import session_of


def take(model: nn.Module | None) -> dict[str, float]:
    """Return names and figures of the report made since the last call; empty without one.

    ``model``: a DeepSpeed engine, a model under ``fully_shard`` or DistributedDataParallel, or a
    module that contains one. Every rank gets the figures of the whole job.
    """
    if model is None:
        return {}
    return {name: value for reporter in reporters(model) for name, value in reporter.take_events()}


def say_if_idle(model: nn.Module) -> None:
    """Warn that there will be no figures: ``install`` was not called, and no part is attached."""
    if not ARMED.armed and not any(reporters(model)):
        say(
            f"WARNING: nothing is compressed, despite the callback: start with {start_command()}, "
            "or call hybridcomp.install() before the model is wrapped"
        )


def reporters(model: nn.Module) -> Iterator[Any]:
    """Return the sessions and attached models that report about ``model`` or a part of it."""
    for module in model.modules():
        found = session_of(module) or vars(module).get(ATTRIBUTE)
        if found is not None:
            yield found
