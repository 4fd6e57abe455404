"""Have the islands of the block's key ``sync`` meet after the optimizer steps of a session."""

from __future__ import annotations

from collections.abc import Callable

from hybridcomp.collectives.topology import Ranks
from hybridcomp.config import CompressionConfig
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.session.engine_session import EngineSession
from hybridcomp.sync import IslandMeetings, Islands, Masters, islands_of

KEY = "compression.sync"


def islands_in(block: CompressionConfig) -> Islands | None:
    """Return the islands that a block asks for; None: none. A collective of the job."""
    return islands_of(block.sync.islands) if block.sync.acts else None


def start(session: EngineSession, make: Callable[[], Masters], ranks: Ranks, todo: str) -> None:
    """Hold meetings after the steps of ``session``, where its block says so.

    Args:
        session: of the engine.
        make: returns what this rank's optimizer changes, before the first step.
        ranks: those over which the engine averages gradients.
        todo: what the user can do where these are not the island.
    """
    islands = islands_in(session.channels.config)
    if islands is None:
        return
    if tuple(sorted(ranks)) != tuple(sorted(islands.ranks)):
        own = f"the island of this rank is {list(islands.ranks)}"
        raise ConfigError(f"{KEY}.islands", Shown(f"ranks {list(ranks)}"), f"{own}; {todo}")
    session.follow(IslandMeetings(session.channels["sync"], islands, make, session.say))
