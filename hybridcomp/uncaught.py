"""A user's mistake that nobody catches, where a script calls ``hybridcomp.install`` itself.

``install`` puts ``show`` in front of ``sys.excepthook``: errors of the configuration, of versions
and of ranks that differ say themselves what to do, and end in one line of one rank (``exits``). A
traceback through upstream and hybridcomp would only hide that, on every rank again.
"""

from __future__ import annotations

import sys
from types import TracebackType

from hybridcomp import exits

_before = sys.excepthook


def install() -> None:
    """Show uncaught mistakes as one line from now on; harmless when called twice."""
    global _before
    if sys.excepthook is not show:
        _before, sys.excepthook = sys.excepthook, show


def uninstall() -> None:
    """Give the hook back, unless somebody has put another in front of it."""
    if sys.excepthook is show:
        sys.excepthook = _before


def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Tell a mistake; hand everything else to the hook that was there before."""
    if isinstance(error, exits.MISTAKES) and not exits.wants_traceback():
        exits.tell(f"hybridcomp: {error}")
    else:
        _before(kind, error, traceback)
