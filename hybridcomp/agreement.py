"""Ranks compare what they run before they talk compressed bytes to each other.

A rank with another block would wait for messages that never come. The comparison goes through the
rendezvous store, not through a collective, so that a missing rank can be named.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import Store

from hybridcomp.errors import AgreementError
from hybridcomp.log import complain

#: seconds of silence after which the ranks that are waited for are named on stderr
NOTICE_S = 30.0
#: seconds after which a silent rank is an error: what torch grants a collective by default, since
#: a rank may load its data or model first
PATIENCE_S = default_pg_timeout.total_seconds()
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
    the keys, as soon as all have spoken and two differ, or when a rank stays silent for PATIENCE_S.
    """
    said = tell(statement, what=what)
    differing = [r for r in range(len(said)) if said[r] != said[0]]
    if differing:
        raise AgreementError(_difference(said, differing, what))


def tell(statement: Mapping[str, Any], *, what: str) -> list[dict[str, Any]]:
    """What every rank of the default group stated, by rank; every rank calls it.

    Raises AgreementError when a rank stays silent for PATIENCE_S.
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
    started = time.monotonic()
    noticed = False
    while missing:
        try:
            store.wait([str(missing[0])], timedelta(seconds=min(5.0, NOTICE_S)))
            missing = [r for r in missing if not store.check([str(r)])]
            continue
        except (RuntimeError, dist.DistStoreError):
            missing = [r for r in missing if not store.check([str(r)])]
        if missing and not noticed and time.monotonic() - started > NOTICE_S:
            noticed = True
            complain(
                f"waiting for rank(s) {_ranks(missing)} to state their {what}; a rank that was not "
                "started with hybridcomp never will"
            )
        if missing and time.monotonic() - started > PATIENCE_S:
            raise AgreementError(
                f"{what}: rank(s) {_ranks(missing)} never stated theirs; start every rank with "
                "`--module hybridcomp.run`, or call hybridcomp.install() in every one"
            )


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
