"""Ranks compare what they run before they talk compressed bytes to each other.

A rank with another block would wait for messages that never come. The comparison goes through the
rendezvous store, not through a collective, so that a missing rank can be named.
"""

from __future__ import annotations

import contextlib
import json
import platform
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import Store

from hybridcomp.errors import AgreementError

#: seconds of silence after which the ranks that are waited for are named on stderr; then whenever
#: the silence has become REPEAT times as long
NOTICE_S, REPEAT = 10.0, 3
#: share of the process group's own time-out after which a silent rank is an error: whoever waits
#: for it in a message of upstream is ended by torch a little later, and without its name
PATIENCE = 0.9
#: what a user is to do about ranks that are silent
ALIKE = "start every rank with `--module hybridcomp.run`, or call hybridcomp.install() in every one"
_round = count()


def versions(*packages: str) -> dict[str, str | None]:
    """Versions of hybridcomp, Python (major.minor), torch and the given packages."""
    found: dict[str, str | None] = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("hybridcomp", "torch", *packages):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def agree(statement: Mapping[str, Any], *, what: str = "compression block") -> None:
    """Compare ``statement`` (JSON-like, flat keys) over all ranks of the default group.

    Returns when all ranks said the same. Raises AgreementError on every rank, naming the ranks and
    the keys, as soon as all have spoken and two differ, or when a rank stays silent for PATIENCE of
    the group's time-out.
    """
    said = tell(statement, what=what)
    differing = [r for r in range(len(said)) if said[r] != said[0]]
    if differing:
        raise AgreementError(_difference(said, differing, what))


def tell(statement: Mapping[str, Any], *, what: str) -> list[dict[str, Any]]:
    """What every rank of the default group stated, by rank; every rank calls it.

    Raises AgreementError when a rank stays silent for PATIENCE of the group's time-out.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if world_size == 1:
        return [dict(statement)]
    prefix = f"hybridcomp/agree/{next(_round)}"
    store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    store.set(str(rank), json.dumps(statement, sort_keys=True))
    _await_all(store, world_size, what)
    return [json.loads(text) for text in store.multi_get([str(r) for r in range(world_size)])]


def _await_all(store: Store, world_size: int, what: str) -> None:
    missing = list(range(world_size))
    started, notice, patience = time.monotonic(), NOTICE_S, PATIENCE * _timeout_s()
    while missing:
        with contextlib.suppress(RuntimeError, dist.DistStoreError):
            store.wait([str(missing[0])], timedelta(seconds=min(5.0, NOTICE_S)))
        missing = [r for r in missing if not store.check([str(r)])]
        silent = time.monotonic() - started
        if missing and silent > patience:
            raise AgreementError(
                f"{what}: rank(s) {_ranks(missing)} never stated theirs, in {silent:.0f} s; {ALIKE}"
            )
        if missing and silent > notice:
            notice *= REPEAT
            if dist.get_rank() == min(set(range(world_size)) - set(missing)):
                print(
                    f"[hybridcomp] waiting for rank(s) {_ranks(missing)} to state their {what}, "
                    f"for {silent:.0f} s now. A rank that was started without hybridcomp never "
                    f"will: {ALIKE}. This job ends in {patience - silent:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )


def _timeout_s() -> float:
    """Seconds that the process group grants a message, torch's default where it does not say."""
    try:
        group = dist.distributed_c10d._get_default_group()  # type: ignore[attr-defined]
        device = torch.device("cuda" if "nccl" in str(dist.get_backend()) else "cpu")
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return float(default_pg_timeout.total_seconds())


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return shown if len(ranks) <= 16 else f"{shown} and {len(ranks) - 16} more"


def _difference(said: list[dict[str, Any]], differing: list[int], what: str) -> str:
    first = said[differing[0]]
    keys = sorted(k for k in {*said[0], *first} if said[0].get(k) != first.get(k))
    shown = "; ".join(f"{k}: {said[0].get(k)!r} against {first.get(k)!r}" for k in keys[:4])
    more = f"; {len(keys) - 4} more keys" if len(keys) > 4 else ""
    return (
        f"{what}: rank(s) {_ranks(differing)} differ from rank 0 ({shown}{more}); give every rank "
        "the same block and the same package versions"
    )
