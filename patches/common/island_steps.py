"""Start the meetings of islands (key ``sync``) after the optimizer steps of a session."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from hybridcomp.collectives.topology import Ranks
from hybridcomp.config import CompressionConfig
from hybridcomp.config.error_messages import Shown
from hybridcomp.config.rendezvous import RendezvousConfig
from hybridcomp.errors import ConfigError
from hybridcomp.session.engine_session import EngineSession
from hybridcomp.sync import IslandMeetings, Islands, JobMeetings, Masters, islands_of
from hybridcomp.sync.islands import check_outlier

KEY = "compression.sync"


def islands_in(block: CompressionConfig) -> Islands | None:
    """Return the islands into which a block splits the job, or None. A collective of the job."""
    if not block.sync.acts or isinstance(block.sync.islands, RendezvousConfig):
        return None
    return islands_of(block.sync.islands)


def ranks_in(block: CompressionConfig) -> Ranks:
    """Return the ranks of this rank's island; all ranks if the block does not split the job."""
    islands = islands_in(block)
    return tuple(range(dist.get_world_size())) if islands is None else islands.ranks


def start(session: EngineSession, make: Callable[[], Masters], ranks: Ranks, todo: str) -> None:
    """Start meetings after the steps of ``session``, if its block asks for them.

    Args:
        session: the engine's session.
        make: returns the weights that this rank's optimizer changes; called before the first step.
        ranks: ranks over which the engine averages gradients.
        todo: advice for the user if ``ranks`` are not those of the island.
    """
    config = session.channels.config
    if config.sync.jobs is not None:
        if len(ranks) != dist.get_world_size():
            text = f"the island is the whole job, of {dist.get_world_size()} ranks"
            raise ConfigError(f"{KEY}.islands", Shown(f"ranks {list(ranks)}"), f"{text}; {todo}")
        session.follow(JobMeetings(session.channels["sync"], make, session.say))
        return
    islands = islands_in(config)
    if islands is None:
        return
    check_outlier(config.sync.outlier, len(islands.rows))
    if tuple(sorted(ranks)) != tuple(sorted(islands.ranks)):
        own = f"the island of this rank is {list(islands.ranks)}"
        raise ConfigError(f"{KEY}.islands", Shown(f"ranks {list(ranks)}"), f"{own}; {todo}")
    session.follow(IslandMeetings(session.channels["sync"], islands, make, session.say))
