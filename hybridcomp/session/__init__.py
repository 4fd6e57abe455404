"""Attach hybridcomp to a training loop: channels, steps, checkpoints, reports.

``EngineSession`` does this for one engine. ``process`` holds the process's session for code that
knows no engine. ``reporter`` prints and writes the ledger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridcomp.session.engine_session import EngineSession

__all__ = ["EngineSession"]


def __getattr__(name: str) -> Any:
    """Import lazily: commands that need no torch read the names of metrics."""
    if name == "EngineSession":
        from hybridcomp.session.engine_session import EngineSession

        return EngineSession
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
