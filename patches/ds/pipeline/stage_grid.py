"""Confine an optimizer's collectives to its own stage, in a pipeline without flushes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class StageGrid:
    """A pipeline grid whose model-parallel group contains only this stage."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def get_model_parallel_group(self) -> Any:
        return self._grid.get_slice_parallel_group()

    def get_model_parallel_world_size(self) -> int:
        return int(self._grid.get_slice_parallel_world_size())

    def get_model_parallel_rank(self) -> int:
        return int(self._grid.get_slice_parallel_rank())


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)
