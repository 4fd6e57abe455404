"""Compare blocks and versions over all ranks before they exchange encoded messages.

A rank with another block would wait for messages that never come. The comparison uses the
rendezvous store, not a collective, so that a missing rank can be named.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from hybridcomp.errors import AgreementError, PeerError, installed
from hybridcomp.job import gates, processes
from hybridcomp.job.gates import PerJob, Ranks
from hybridcomp.job.launcher import start_command
from hybridcomp.job.statements import StatementRound
from hybridcomp.job.waits import NOTICE_S, Notices
from hybridcomp.log import complain

#: seconds between two checks whether silent ranks' processes still run
LOOK_S = 1.0
#: fraction of the process group's time-out after which a silent rank is an error. At the full
#: time-out, torch ends ranks that wait for it in upstream's messages, without naming the rank
PATIENCE = 0.9
#: name of the operation ``together.ending`` in the key of a failure
ENDING = "ending"
#: advice about ranks that are silent
ALIKE = "start every rank with {start}, or call hybridcomp.install() in every one"

#: by kind of numbers, and by ranks of a part of the job (None: all), the next number
_next: PerJob[dict[tuple[str, Ranks | None], int]] = PerJob(dict)
#: by ranks of a part of the job, the prefix of its last round, whose keys the next round deletes;
#: the store itself would keep its port for as long as anybody holds the default group
_last: PerJob[dict[Ranks | None, str]] = PerJob(dict)
_has_compared = False


def versions(*packages: str) -> dict[str, str | None]:
    """Return the versions of hybridcomp, Python (major.minor), torch and the given packages."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, **{n: installed(n) for n in ("hybridcomp", "torch", *packages)}}


def agree(
    statement: Mapping[str, Any],
    *,
    what: str = "compression block",
    ranks: Sequence[int] | None = None,
) -> None:
    """Compare ``statement`` (JSON-like, flat keys) over all ranks of the default group.

    ``ranks``: global ranks of the part of the job that compares, this one among them; None: all.

    Returns when all ranks have sent equal statements. If two statements differ, raises
    AgreementError on every rank, naming ranks and keys. Raises other errors as ``tell`` does.
    """
    speakers = _speakers(ranks)
    if len(speakers) == 1:
        return
    texts, order = _exchanged(statement, what, ranks, speakers)
    if len(texts) == 1:
        return
    said = [texts[place] for place in order]
    differing = [place for place in range(len(said)) if said[place] != said[0]]
    raise AgreementError(_difference(said, differing, what, ranks))


def tell(
    statement: Mapping[str, Any],
    *,
    what: str,
    ranks: Sequence[int] | None = None,
    seconds: float | None = None,
) -> list[dict[str, Any]]:
    """Exchange statements over the default group; return them by rank. Every rank calls it.

    ``ranks``: as for ``agree``; statements are returned in the order of ``ranks``. Raises PeerError
    once a rank has ended without a statement, and AgreementError if a rank sends no statement for
    ``seconds`` (None: PATIENCE of the group's time-out). A later rank still gets the statements.
    With ``seconds``, ranks may also leave the round out: only rounds of the same ``what`` count it.

    Once all ranks have sent statements, all of them have read the previous round, so its keys are
    deleted: the store holds only one round for each part of the job. The number of store requests
    per rank does not depend on the number of ranks (``StatementRound``).
    """
    speakers = _speakers(ranks)
    if len(speakers) == 1:
        return [dict(statement)]
    texts, order = _exchanged(statement, what, ranks, speakers, seconds)
    return [dict(texts[place]) for place in order]


def _speakers(ranks: Sequence[int] | None) -> Sequence[int]:
    return range(dist.get_world_size()) if ranks is None else tuple(ranks)


def _exchanged(
    statement: Mapping[str, Any],
    what: str,
    ranks: Sequence[int] | None,
    speakers: Sequence[int],
    seconds: float | None = None,
) -> tuple[list[dict[str, Any]], list[int]]:
    """Exchange statements; return the distinct ones, and each speaker's index into them."""
    global _has_compared
    part = None if ranks is None else tuple(ranks)
    operation = next((o for o in gates.here.operations if o.takes_in(speakers)), None)
    if operation is None:
        name = "" if seconds is None else f"{what}/"
        number = next_number(f"rounds/{name}", part)
    else:
        name, number = operation.name, operation.rounds[part]
        operation.rounds[part] += 1
    _has_compared = True
    store, me = dist.distributed_c10d._get_default_store(), dist.get_rank()
    prefix = _prefix(name, part, number)
    this = StatementRound(store, prefix, me, speakers)
    try:
        this.state(json.dumps(statement, sort_keys=True))
    # the store may be gone together with the rank that held it
    except (RuntimeError, dist.DistError):
        _check_peers(this, what)
        raise
    _await_all(this, what, patience_s() if seconds is None else seconds)
    statements = this.read()
    last = _last.here
    before, last[part] = last.get(part), prefix
    # all ranks have sent this statement, so all have read the previous round
    if before is not None:
        StatementRound(store, before, me, speakers).forget()
    return statements


def next_number(kind: str, part: Ranks | None) -> int:
    """Return a number for names in the job's store: the ranks of ``part`` get the same ones.

    They count from zero in each default group, as a member may be a new process; where the group's
    store was that of an earlier group, from a number beyond the earlier ones.
    """
    known, key = _next.here, (kind, part)
    if key not in known:
        known[key], among = 0, "all" if part is None else ",".join(map(str, part))
        store = dist.distributed_c10d._get_default_store()
        with contextlib.suppress(RuntimeError, dist.DistError):  # the store may be gone
            groups = store.add(f"hybridcomp/{kind}/{start()}/{among}/of {dist.get_rank()}", 1)
            known[key] = (groups - 1) << 32
    known[key] += 1
    return known[key] - 1


def has_compared() -> bool:
    """Return whether this rank has completed an agreement check; every engine starts with one."""
    return _has_compared


def _prefix(operation: str, part: Ranks | None, number: int) -> str:
    """Return the prefix of the store keys for a round of statements."""
    among = "" if part is None else f"{','.join(map(str, part))}/"
    return f"hybridcomp/agree/{start()}/{operation}{among}{number}"


def start() -> str:
    """Return the number of times that the job was started before, for keys in its store.

    torchrun restarts ranks with the same store, so keys need this number: statements of earlier
    starts must not count. If rank 0 creates the store in every start
    (TORCH_DISABLE_SHARE_RDZV_TCP_STORE), the number is always 0, since nodes that have rejoined
    would have counted fewer starts than the others.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False":
        return "0"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def failure_key(operation: str) -> str:
    """Return the store key under which a rank reports its failure in ``operation``."""
    return f"hybridcomp/failed/{start()}/{operation}"


def start_id() -> str:
    """Return an identifier common to all ranks of this start of the job, and to no other start."""
    store = dist.distributed_c10d._get_default_store()
    mine = secrets.token_hex(8)
    return bytes(store.compare_set(f"hybridcomp/start/{start()}", "", mine)).decode()


def _await_all(this: StatementRound, what: str, patience: float) -> None:
    notices = Notices()
    while not this.is_told(min(LOOK_S, NOTICE_S)):
        gates.check_failed(this.is_told)
        _check_peers(this, what)
        silent = notices.seconds
        if silent > patience:
            if missing := this.missing_ranks():
                raise AgreementError(
                    f"{what}: rank(s) {listed(missing)} never stated theirs, in {silent:.0f} s; "
                    f"{ALIKE.format(start=start_command())}"
                )
            this.collect()  # the last rank stated but ended before it collected the statements
        elif notices.due() and this.first_heard():
            _complain(this, what, silent, patience)


def _complain(this: StatementRound, what: str, silent: float, patience: float) -> None:
    """Print which ranks are missing; called on one rank only."""
    missing = this.missing_ranks()
    if not missing:
        this.collect()
        return
    alike = ALIKE.format(start=start_command())
    complain(
        f"waiting for rank(s) {listed(missing)} to state their {what}, for {silent:.0f} s now. A "
        f"rank that was started without hybridcomp never will: {alike}. This job ends in "
        f"{patience - silent:.0f} s"
    )


def _check_peers(this: StatementRound, what: str) -> None:
    """Raise PeerError if a rank on this host has ended without stating.

    It checks processes before the store, so that a rank that ended after its statement is no error.
    """
    ended = processes.gone(this.speakers, dist.group.WORLD)
    try:
        complete = this.is_told()
        lost = [] if complete else [peer for peer in ended if not this.has_stated(peer.rank)]
    except (RuntimeError, dist.DistError):  # the store is gone together with the rank that held it
        if not ended:
            raise
        lost = ended
    if lost:
        named = ", ".join(map(str, lost))
        raise PeerError(f"{what}: {named} {processes.ENDED} and never stated theirs")


@contextlib.contextmanager
def waiting(store: Any, seconds: float) -> Iterator[Any]:
    """Limit the waits of ``store`` to ``seconds``; restore its time-out afterwards.

    ``store``: the default store, which torch.distributed and upstream also use.
    """
    before = store.timeout
    store.set_timeout(timedelta(seconds=seconds))
    try:
        yield store
    finally:
        store.set_timeout(before)


def patience_s() -> float:
    """Return the seconds after which a silent rank is an error."""
    return PATIENCE * _timeout_s()


def _timeout_s() -> float:
    """Return the process group's time-out in seconds; torch's default if unknown."""
    try:
        group = dist.distributed_c10d._get_default_group()
        device = torch.device("cuda" if "nccl" in str(dist.get_backend()) else "cpu")
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return float(default_pg_timeout.total_seconds())


def listed(ranks: Sequence[int]) -> str:
    """Return the numbers of the first 16 ranks, and how many more there are."""
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
        f"{what}: rank(s) {listed([speakers[place] for place in differing])} differ from rank "
        f"{speakers[0]} ({shown}{more}); give every rank the same block and the same package "
        "versions"
    )
