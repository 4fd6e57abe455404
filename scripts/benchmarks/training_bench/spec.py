"""Task of a forked rank: ``forked`` writes it, ``gpu_rank`` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Spec:
    """Task of one rank."""

    rank: int
    program: str  # train_gpt or bench.train_peer
    arguments: tuple[str, ...]
    patched: bool
    env: Mapping[str, str]
    log: str
    empty: bool = False  # whether messages may be truncated, see ``empty``
    transport: str = ""  # backend of its process group, "" for the program's default
