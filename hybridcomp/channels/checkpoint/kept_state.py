"""Restore the state of an engine's channels after a load has failed on another rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from hybridcomp.channels.engine_channels import Channels


def put_back(channels: Channels, *others: object) -> Callable[[], None]:
    """Return a function that restores the present state of ``channels`` and ``others``.

    Tensors are not copied: a load replaces the objects that hold them and never writes into a
    tensor.
    """
    parts = (
        channels, channels.residuals, channels.factors, channels.guard, channels.verdicts,
        channels.seen, channels.ledger, channels.host.pace, *others,
    )  # fmt: skip
    kept = [(vars(part), {name: _copy(var) for name, var in vars(part).items()}) for part in parts]

    def back() -> None:
        for now, before in kept:
            for name in set(now) - set(before):
                del now[name]
            for name, (value, content) in before.items():
                now[name] = value
                if isinstance(value, (dict, set)):
                    value.clear()
                    value.update(content)
                elif isinstance(value, list):
                    value[:] = content

    return back


def _copy(value: Any) -> tuple[Any, Any]:
    return value, copy.copy(value) if isinstance(value, (dict, set, list)) else None
