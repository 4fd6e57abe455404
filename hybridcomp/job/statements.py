"""Exchange statements of ranks through the rendezvous store, a few requests for each rank.

4,096 ranks that each ask for each other's statement would send the one process that holds the store
17 million requests. Here the rank that comes last reads all and sets them together, each different
text once: seven requests of each rank, whatever their number, and one value that all read.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from hybridcomp.job.waits import LOOK_S, awaited

#: the store takes no value of 8 MiB and more (torch's TCPStoreLibUvBackend)
PIECE_NBYTES = 4 << 20
#: statements that the last rank reads with one request
AT_ONCE = 512
#: looks in a second that all waiting ranks together begin with, at most
LOOKS = 6400


class StatementRound:
    """One exchange of statements among ``speakers``, in their order, as ``rank`` sees it.

    1 ``state``: set this rank's statement, and count it
    2 the rank that counts as the last sets all statements together
    3 every rank waits for these (``is_told``) and reads them (``read``)
    4 once the next round is told, ``forget`` deletes the keys of this one

    Args:
        store: of torch.distributed.
        prefix: of the keys, the same on all ranks and another one in each round.
    """

    def __init__(self, store: Any, prefix: str, rank: int, speakers: Sequence[int]) -> None:
        self.store, self.rank, self.speakers = store, rank, speakers
        self._prefix = prefix

    def state(self, text: str) -> None:
        """Set the statement of this rank; the last rank also sets all of them together."""
        self.store.set(self._key(self.rank), text)
        if self.store.add(self._key("stated"), 1) == len(self.speakers):
            self.collect()

    def collect(self) -> None:
        """Read the statements of all, and set them together; harmless when done twice."""
        texts: dict[str, int] = {}
        order: list[int] = []
        for start in range(0, len(self.speakers), AT_ONCE):
            keys = [self._key(rank) for rank in self.speakers[start : start + AT_ONCE]]
            for found in self.store.multi_get(keys):
                text = found.decode() if isinstance(found, bytes) else found
                order.append(texts.setdefault(text, len(texts)))
        whole = f"[[{','.join(texts)}],{json.dumps(order)}]"  # one document, read at once
        packed = zlib.compress(whole.encode(), 1)
        cuts = range(0, len(packed), PIECE_NBYTES)
        for index, cut in enumerate(cuts):
            self.store.set(self._key(f"all/{index}"), packed[cut : cut + PIECE_NBYTES])
        self.store.set(self._key("told"), str(len(cuts)))

    def is_told(self, seconds: float = 0.0) -> bool:
        """Return whether all have stated; waits up to ``seconds`` for it.

        With 0 seconds it raises the store's error where the store has gone.
        """
        if not seconds:
            return bool(self.store.check([self._key("told")]))
        with contextlib.suppress(RuntimeError, dist.DistStoreError):
            pause = max(LOOK_S, len(self.speakers) / LOOKS)
            return bool(awaited(lambda: self.is_told() or None, seconds, first_s=pause))
        return False

    def read(self) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the different statements, and which of them each rank made, once told."""
        count = int(self.store.get(self._key("told")))
        packed = b"".join(self.store.get(self._key(f"all/{index}")) for index in range(count))
        statements, order = json.loads(zlib.decompress(packed))
        return statements, order

    def has_stated(self, rank: int) -> bool:
        """Return whether ``rank`` has stated."""
        return bool(self.store.check([self._key(rank)]))

    def missing_ranks(self) -> list[int]:
        """Return the ranks that have not stated; asks once for each half with such ranks."""
        return absent(self.store, self.speakers, self._key)

    def first_heard(self) -> bool:
        """Return whether this rank is the first of those that have stated."""
        for rank in self.speakers:
            if rank == self.rank or self.has_stated(rank):
                return rank == self.rank
        return False

    def forget(self) -> None:
        """Delete this rank's key; the first of the speakers also deletes what was set together."""
        self.store.delete_key(self._key(self.rank))
        if self.rank != self.speakers[0]:
            return
        for index in range(int(self.store.get(self._key("told")))):
            self.store.delete_key(self._key(f"all/{index}"))
        self.store.delete_key(self._key("told"))
        self.store.delete_key(self._key("stated"))

    def _key(self, name: int | str) -> str:
        return f"{self._prefix}/{name}"


def absent(store: Any, ranks: Sequence[int], key: Any = str) -> list[int]:
    """Return those of ``ranks`` whose key is not in ``store``; ``key``: makes it of a rank.

    Asks for all at once, then for each half in which one is missing.
    """
    if not ranks or store.check([key(rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    return absent(store, ranks[:half], key) + absent(store, ranks[half:], key)
