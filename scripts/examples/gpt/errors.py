"""Errors that a user can fix on the example's command line."""

from __future__ import annotations


class ParallelismError(ValueError):
    """--tp, --pp or --cp lack ranks or packages."""
