"""What a forked rank is told: by ``forked``, which starts it, to ``gpu_rank``, which it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Spec:
    """What one rank is to do."""

    rank: int
    program: str  # train_gpt or bench.train_peer
    arguments: tuple[str, ...]
    patched: bool
    env: Mapping[str, str]
    log: str
    empty: bool = False  # whether messages may be cut, see ``empty``
    transport: str = ""  # the backend of its process group, "" for what the program takes
