"""Start publishing for the key ``publish``, and resolve the destination ``to``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybridcomp.collectives.topology import Ranks
from hybridcomp.config import BLOCK
from hybridcomp.config.error_messages import Shown, idle
from hybridcomp.errors import ConfigError
from hybridcomp.job.agreement import start_id
from hybridcomp.patches.common import island_steps
from hybridcomp.patches.common.lora import adapted
from hybridcomp.publishing import EngineWeights, Publisher
from hybridcomp.publishing.destinations import Destination, Folder, folder_of
from hybridcomp.publishing.following import PublishedSteps
from hybridcomp.publishing.groups import GroupDestination
from hybridcomp.publishing.quantized import quantized
from hybridcomp.publishing.socket_stream import STILL_S, TwoWay, is_plain_socket
from hybridcomp.publishing.streams import Stream
from hybridcomp.publishing.weights import named, unless_refused
from hybridcomp.session.engine_session import EngineSession
from hybridcomp.sync import JobMeetings
from hybridcomp.sync.claimed_folders import first_in

#: key of errors about an engine whose weights cannot be published
KEY = "publish"
#: pattern of the files by which an island claims a folder; ``*``: the start of the job
FILES = "hybridcomp_publisher_*.json"


def start(session: EngineSession, weights: Callable[[], EngineWeights]) -> None:
    """Publish after steps of ``session`` if its block says so; of several islands only the first.

    ``weights``: returns this rank's weights, before the first step. If the engine's weights cannot
    be published, the first step raises ConfigError, or with ``on_unsupported: native`` prints that
    once.
    """
    block = session.channels.config
    settings = block.publish
    if settings is None:
        return
    islands = island_steps.islands_in(block)
    # the weights of all islands have the same names and places
    if islands is not None and islands.index:
        return

    def make() -> Publisher | None:
        try:
            form = settings.lora, settings.names, settings.as_, settings.dtype
            found = in_form(weights(), *form)
            to = destination_of(settings.to, found, session)
            given = settings.model_dump(exclude={"to", "names", "as_", "lora", "wait"})
            return Publisher(found, to, **given)
        except ConfigError as error:
            key = f"{BLOCK}.{error.key}"
            if error.key != KEY:
                raise ConfigError(key, error.found, error.todo) from None
            session.say(idle(key, error.found, error.todo, block.on_unsupported))
            return None

    session.follow(PublishedSteps(make, settings.wait))


def in_form(
    weights: EngineWeights, lora: str | None, names: str, as_: str | None, dtype: str | None
) -> EngineWeights:
    """Return ``weights`` as they are published; if this rank refuses, ones that all ranks refuse.

    ``lora``, ``names``, ``as_``, ``dtype``: as for ``hybridcomp.publish``.
    """
    return unless_refused(
        lambda: quantized(named(adapted(weights, lora), names), as_, dtype), weights.ranks
    )


def destination_of(
    to: Any,
    weights: EngineWeights,
    session: EngineSession | None = None,
    still_s: float = STILL_S,
) -> Destination:
    """Return the destination that ``to`` names. Raises ConfigError.

    Args:
        to: as in ``hybridcomp.publish``.
        weights: this rank's weights.
        session: the engine's, if it has one.
        still_s: seconds for which the other side of a socket may stop reading.
    """
    if isinstance(to, (str, Path)):
        known = None if session is None else weakref.ref(session)
        return Folder(folder_of(to), functools.partial(_claim, weights.ranks, known))
    first = weights.ranks[0] == dist.get_rank()
    if isinstance(to, dist.ProcessGroup):
        return _of_group(to, weights) if first else Stream(None, weights.ranks)
    if not first and to in (None, dist.GroupMember.NON_GROUP_MEMBER):
        return Stream(None, weights.ranks)
    if is_plain_socket(to):
        return Stream(TwoWay(to, still_s), weights.ranks)
    if callable(getattr(to, "write", None)):
        return Stream(to, weights.ranks)
    todo = "expected a folder (file:///...), a socket, a stream with write(), or a process group"
    raise ConfigError("publish.to", Shown(type(to).__name__), todo)


def _claim(ranks: Ranks, known: weakref.ref[EngineSession] | None, folder: Path) -> str | None:
    """Keep other islands, of this job or of the run, from publishing into ``folder``.

    ``ranks``: the ranks of the island, which is a job or a part of one. Returns the other islands
    of this job that publish there; raises CheckpointError if one of another job does.
    """
    if len(ranks) < dist.get_world_size():
        own = f"that of rank {ranks[0]}"
        holder = first_in(folder, FILES, start_id(), own)
        if holder != own:
            return f"{holder} of this job, and this is {own}"
    session = None if known is None else known()
    for follower in () if session is None else session.followers:
        if isinstance(follower, JobMeetings):
            follower.claim(folder)
    return None


def _of_group(group: dist.ProcessGroup, weights: EngineWeights) -> Destination:
    """Return ``group`` as a destination. Raises ConfigError if it has further ranks of the job.

    Its members other than the job's first rank receive; a rank of the job that sends would wait for
    itself.
    """
    both = sorted(set(dist.get_process_group_ranks(group)) & set(weights.ranks[1:]))
    if both:
        todo = "of the job only its first rank may be in the group, beside the receivers"
        raise ConfigError("publish.to", Shown(f"a group with rank(s) {both[:8]} of the job"), todo)
    return GroupDestination(group, weights.ranks)
