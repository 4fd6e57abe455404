"""Compare what ranks hold before they send what depends on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hybridcomp.channels.channel import Channel
from hybridcomp.collectives import gather_words
from hybridcomp.errors import PeerError
from hybridcomp.job import small_messages
from hybridcomp.job.together import ending, named

#: replaces the first word: this rank could not make its words
FAILED = -1


def words_of_all(
    channel: Channel,
    own: Callable[[], Sequence[int] | torch.Tensor],
    count: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> list[list[int]]:
    """Gather the ``count`` int64 words that ``own`` makes on each rank of ``group``; a collective.

    The first word is not negative. What a rank has to prepare for the messages behind this one
    belongs into ``own``: where it fails on one rank, this raises on all of them, and nobody waits
    in a message that a rank does not reach. It costs no message of its own. Where a rank cannot
    send even that, the job ends (``ending``).

    Returns the words by group rank. Raises PeerError, which names the rank that failed; there its
    own error, where that is one of hybridcomp.
    """
    what = f"{channel.dimension}, step {channel.step}"
    problem: Exception | None = None
    with ending(what):
        words = torch.full((count,), FAILED, dtype=torch.int64, device=device)
        try:
            with torch.no_grad():
                words.copy_(torch.as_tensor(own(), dtype=torch.int64, device=device))
        except Exception as error:
            problem = error
            words.fill_(FAILED)
        meter = channel.meter(device)
        rows = gather_words(words, channel.group(group), meter)
    if not any(row[0] == FAILED for row in rows):
        channel.state.ledger.record_extra((channel.dimension, "forward"), meter)
        return rows
    told = None if problem is None else named(problem, what, PeerError)
    said = [text for text in small_messages.gather_objects(told and str(told), group) if text]
    if told is not None:
        raise told from problem
    raise PeerError.naming_rank(said[0])
