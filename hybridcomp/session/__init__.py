"""Attach hybridcomp to a training loop: channels, steps, checkpoints, reports.

``EngineSession`` does it for one engine; ``process`` holds the session of a process whose engine is
not at hand, ``reporter`` prints and writes the ledger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridcomp.session.engine_session import EngineSession

__all__ = ["EngineSession"]


def __getattr__(name: str) -> Any:
    """Import on first use: names of metrics are read by commands that need no torch."""
    if name == "EngineSession":
        from hybridcomp.session.engine_session import EngineSession

        return EngineSession
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
