"""Compare values between ranks before messages that depend on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hybridcomp.channels.channel import Channel
from hybridcomp.collectives import gather_words
from hybridcomp.errors import PeerError
from hybridcomp.job import small_messages
from hybridcomp.job.together import ending, named

#: first word of a rank that could not compute its words
FAILED = -1


def words_of_all(
    channel: Channel,
    own: Callable[[], Sequence[int] | torch.Tensor],
    count: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> list[list[int]]:
    """Gather ``count`` int64 words, which ``own()`` returns, from each rank; a collective.

    The first word is not negative. ``own`` also does whatever this rank must prepare for the
    messages that follow: if it fails on one rank, all ranks raise and none waits in a message that
    another never reaches. This costs no extra message. If a rank cannot send even these words, the
    job ends (``ending``).

    Returns the words by group rank. Raises PeerError, which names the rank that failed; on that
    rank its own error, if it is one of hybridcomp's.
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
