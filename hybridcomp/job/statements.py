"""Exchange statements of ranks through the rendezvous store with few requests per rank.

If 4,096 ranks each asked for each other's statement, the process that holds the store would get 17
million requests. Here the rank that sets its statement last reads all statements and stores them
as one value, in which each distinct text occurs once. So each other rank makes seven requests,
whatever the number of ranks.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from hybridcomp.job.waits import LOOK_S, awaited

#: the store accepts no values of 8 MiB and more (torch's TCPStoreLibUvBackend)
PIECE_NBYTES = 4 << 20
#: statements that the last rank reads per request
AT_ONCE = 512
#: maximum polls per second of all waiting ranks together, at the beginning of a wait
LOOKS = 6400


class StatementRound:
    """One exchange of statements among ``speakers``, in their order, as ``rank`` sees it.

    1 ``state``: set this rank's statement, and count it
    2 the rank that is counted last stores all statements as one value
    3 every rank waits for that value (``is_told``) and reads it (``read``)
    4 once the next round is complete, ``forget`` deletes the keys of this one

    Args:
        store: a store of torch.distributed.
        prefix: prefix of the keys, the same on all ranks and different in each round.
    """

    def __init__(self, store: Any, prefix: str, rank: int, speakers: Sequence[int]) -> None:
        self.store, self.rank, self.speakers = store, rank, speakers
        self._prefix = prefix

    def state(self, text: str) -> None:
        """Set the statement of this rank; the last rank also calls ``collect``."""
        self.store.set(self._key(self.rank), text)
        if self.store.add(self._key("stated"), 1) == len(self.speakers):
            self.collect()

    def collect(self) -> None:
        """Read all ranks' statements and store them as one value; may safely run twice."""
        texts: dict[str, int] = {}
        order: list[int] = []
        for start in range(0, len(self.speakers), AT_ONCE):
            keys = [self._key(rank) for rank in self.speakers[start : start + AT_ONCE]]
            for stated in self.store.multi_get(keys):
                text = stated.decode() if isinstance(stated, bytes) else stated
                order.append(texts.setdefault(text, len(texts)))
        whole = f"[[{','.join(texts)}],{json.dumps(order)}]"  # one JSON document, parsed at once
        packed = zlib.compress(whole.encode(), 1)
        cuts = range(0, len(packed), PIECE_NBYTES)
        for index, cut in enumerate(cuts):
            self.store.set(self._key(f"all/{index}"), packed[cut : cut + PIECE_NBYTES])
        self.store.set(self._key("told"), str(len(cuts)))

    def is_told(self, seconds: float = 0.0) -> bool:
        """Return whether all statements are available, after waiting up to ``seconds``.

        With 0 seconds it raises the store's error if the store is gone.
        """
        if not seconds:
            return bool(self.store.check([self._key("told")]))
        with contextlib.suppress(RuntimeError, dist.DistStoreError):
            pause = max(LOOK_S, len(self.speakers) / LOOKS)
            return bool(awaited(lambda: self.is_told() or None, seconds, first_s=pause))
        return False

    def read(self) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the distinct statements, and the index of each rank's, once complete."""
        count = int(self.store.get(self._key("told")))
        packed = b"".join(self.store.get(self._key(f"all/{index}")) for index in range(count))
        statements, order = json.loads(zlib.decompress(packed))
        return statements, order

    def has_stated(self, rank: int) -> bool:
        return bool(self.store.check([self._key(rank)]))

    def missing_ranks(self) -> list[int]:
        """Return the ranks without a statement; queries halves of the ranks, as ``absent``."""
        return absent(self.store, self.speakers, self._key)

    def first_heard(self) -> bool:
        """Return whether this rank is the first among those that have stated."""
        for rank in self.speakers:
            if rank == self.rank or self.has_stated(rank):
                return rank == self.rank
        return False

    def forget(self) -> None:
        """Delete this rank's key; the first speaker also deletes the value with all statements."""
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
    """Return the ``ranks`` whose key is not in ``store``; ``key`` maps a rank to its key.

    It checks all keys in one request; if one is missing, it checks each half in the same way.
    """
    if not ranks or store.check([key(rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    return absent(store, ranks[:half], key) + absent(store, ranks[half:], key)
