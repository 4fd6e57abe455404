"""Errors that a person can mend on the command line of the example."""

from __future__ import annotations


class ParallelismError(ValueError):
    """Ranks or packages that --tp, --pp and --cp need are not there."""
