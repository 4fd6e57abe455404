"""Hand a forked rank its task: ``forked`` writes it, ``gpu_rank`` reads it."""

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
    empty: bool = False  # whether messages may be cut, see ``empty``
    transport: str = ""  # the backend of its process group, "" for what the program takes
