"""Compare blocks and versions over all ranks before they exchange encoded messages.

A rank with another block would wait for messages that never come. The comparison uses the
rendezvous store, not a collective, so that a missing rank can be named.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import Store

from hybridcomp.errors import AgreementError, PeerError
from hybridcomp.job import processes
from hybridcomp.log import complain

#: seconds of silence after which the missing ranks are named on stderr; then again whenever
#: the silence has become REPEAT times as long
NOTICE_S, REPEAT = 10.0, 3
#: seconds between two checks of the processes of ranks that have not answered
LOOK_S = 1.0
#: share of the process group's time-out after which a silent rank is an error: soon after it torch
#: ends ranks that wait for it in a message of upstream, without naming it
PATIENCE = 0.9
#: advice about ranks that are silent
ALIKE = "start every rank with `--module hybridcomp.run`, or call hybridcomp.install() in every one"
Ranks = tuple[int, ...]
#: rounds so far among the ranks of a part of the job; None: all ranks
_rounds_of: Counter[Ranks | None] = Counter()


def versions(*packages: str) -> dict[str, str | None]:
    """Return the versions of hybridcomp, Python (major.minor), torch and the given packages."""
    found: dict[str, str | None] = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("hybridcomp", "torch", *packages):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def agree(
    statement: Mapping[str, Any],
    *,
    what: str = "compression block",
    ranks: Sequence[int] | None = None,
) -> None:
    """Compare ``statement`` (JSON-like, flat keys) over all ranks of the default group.

    ``ranks``: global ranks of the part of the job that compares, this one among them; None: all.

    Returns when all ranks stated the same. Raises AgreementError on every rank, naming the ranks
    and the keys, as soon as all have stated and two differ; and as ``tell`` does.
    """
    said = tell(statement, what=what, ranks=ranks)
    differing = [place for place in range(len(said)) if said[place] != said[0]]
    if differing:
        raise AgreementError(_difference(said, differing, what, ranks))


def tell(
    statement: Mapping[str, Any], *, what: str, ranks: Sequence[int] | None = None
) -> list[dict[str, Any]]:
    """Exchange statements over the default group; returns them by rank. Every rank calls it.

    ``ranks``: as for ``agree``; the statements come back in their order. Raises PeerError once a
    rank that has not stated is seen to have ended, AgreementError when one stays silent for
    PATIENCE of the group's time-out.

    Once all ranks have stated, all have read the round before, and each rank deletes its statement
    of that round: the store holds one statement of each rank, for each part of the job.
    """
    speakers = range(dist.get_world_size()) if ranks is None else tuple(ranks)
    if len(speakers) == 1:
        return [dict(statement)]
    part = None if ranks is None else tuple(ranks)
    number = _rounds_of[part]
    _rounds_of[part] += 1
    whole, me = dist.distributed_c10d._get_default_store(), str(dist.get_rank())
    store = dist.PrefixStore(_prefix(part, number), whole)  # type: ignore[attr-defined]
    store.set(me, json.dumps(statement, sort_keys=True))
    _await_all(store, speakers, what)
    if number:  # all have stated again, so all have read the round before
        dist.PrefixStore(_prefix(part, number - 1), whole).delete_key(me)  # type: ignore[attr-defined]
    return [json.loads(text) for text in store.multi_get([str(rank) for rank in speakers])]


def has_compared() -> bool:
    """Return whether this rank has compared anything with others, as every engine does first."""
    return bool(_rounds_of)


def _prefix(part: Ranks | None, number: int) -> str:
    """Return the prefix of the store's keys for a round of statements."""
    among = "" if part is None else f"{','.join(map(str, part))}/"
    return f"hybridcomp/agree/{start()}/{among}{number}"


def start() -> str:
    """Return the number of the job's start, for keys in its store.

    torchrun restarts ranks with the same store: statements of earlier starts must not count.
    """
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _await_all(store: Store, speakers: Sequence[int], what: str) -> None:
    missing = list(speakers)
    started, notice, patience = time.monotonic(), NOTICE_S, PATIENCE * _timeout_s()
    while missing:
        with contextlib.suppress(RuntimeError, dist.DistStoreError):
            store.wait([str(missing[0])], timedelta(seconds=min(LOOK_S, NOTICE_S)))
        missing = _unheard(store, missing, what)
        silent = time.monotonic() - started
        if missing and silent > patience:
            raise AgreementError(
                f"{what}: rank(s) {_ranks(missing)} never stated theirs, in {silent:.0f} s; {ALIKE}"
            )
        if missing and silent > notice:
            notice *= REPEAT
            if dist.get_rank() == min(set(speakers) - set(missing)):
                complain(
                    f"waiting for rank(s) {_ranks(missing)} to state their {what}, "
                    f"for {silent:.0f} s now. A rank that was started without hybridcomp never "
                    f"will: {ALIKE}. This job ends in {patience - silent:.0f} s"
                )


def _unheard(store: Store, missing: list[int], what: str) -> list[int]:
    """Find those of ``missing`` that have not stated yet. Raises PeerError where one has ended.

    Checks their processes before the store: a rank that stated and then ended counts as stated.
    """
    ended = processes.gone(missing, dist.group.WORLD)
    try:
        unheard = [rank for rank in missing if not store.check([str(rank)])]
    except (RuntimeError, dist.DistError):  # the store went with the rank that held it
        if not ended:
            raise
        unheard = missing
    if lost := [str(peer) for peer in ended if peer.rank in unheard]:
        raise PeerError(f"{what}: {', '.join(lost)} {processes.ENDED} and never stated theirs")
    return unheard


@contextlib.contextmanager
def waiting(store: Any, seconds: float) -> Iterator[Any]:
    """Limit the waits of ``store`` to ``seconds``; restores its time-out afterwards.

    ``store``: the default one, with which torch.distributed and upstream wait as well.
    """
    before = store.timeout
    store.set_timeout(timedelta(seconds=seconds))
    try:
        yield store
    finally:
        store.set_timeout(before)


def _timeout_s() -> float:
    """Return the seconds of the process group's time-out, torch's default where unknown."""
    try:
        group = dist.distributed_c10d._get_default_group()
        device = torch.device("cuda" if "nccl" in str(dist.get_backend()) else "cpu")
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return float(default_pg_timeout.total_seconds())


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return shown if len(ranks) <= 16 else f"{shown} and {len(ranks) - 16} more"


def _difference(
    said: list[dict[str, Any]], differing: list[int], what: str, ranks: Sequence[int] | None
) -> str:
    first = said[differing[0]]
    speakers = range(len(said)) if ranks is None else ranks
    keys = sorted(k for k in {*said[0], *first} if said[0].get(k) != first.get(k))
    shown = "; ".join(f"{k}: {said[0].get(k)!r} against {first.get(k)!r}" for k in keys[:4])
    more = f"; {len(keys) - 4} more keys" if len(keys) > 4 else ""
    return (
        f"{what}: rank(s) {_ranks([speakers[place] for place in differing])} differ from rank "
        f"{speakers[0]} ({shown}{more}); give every rank the same block and the same package "
        "versions"
    )
