"""Blocks of attention that last as long on every rank and in every pass, as on an accelerator.

The cores of a shared machine change between speeds that lie more than half apart, each core for
itself and within seconds, and a ring waits for the slowest of its ranks at every hop. What a
schedule makes of its links is not seen below that. So blocks are timed first, and then each is
computed as always and its rank then sleeps, until one and a half times as long is over as the
slowest rank took for such a block. Codecs and messages take what they take.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hybridcomp.nn.context import blocks

if TYPE_CHECKING:
    from typing_extensions import Self

#: of the times of a kind of block the one that it is given from then on, and how much more: what
#: is timed in a fast moment is half as long again in a slow one
QUANTILE, MARGIN = 0.95, 1.5

Kind = tuple[object, ...]


class SteadyBlocks:
    """Replaces the two passes of a block while it is entered.

    Attributes:
        late: of this rank's blocks since ``settle`` how many took longer than they were given, and
            how many there were.
    """

    def __init__(self) -> None:
        self._plain = {name: getattr(blocks, name) for name in ("forward", "backward")}
        self._seen: dict[Kind, list[float]] = defaultdict(list)
        self._seconds: Mapping[Kind, float] = {}
        self.late = [0, 0]

    def __enter__(self) -> Self:
        for name, function in self._plain.items():
            setattr(blocks, name, self._steady(name, function))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._plain.items():
            setattr(blocks, name, function)

    def learn(self) -> None:
        """Let blocks last as long as they do, and time them."""
        self._seen, self._seconds = defaultdict(list), {}

    def settle(self) -> None:
        """From now on a block lasts as long as the slowest rank was seen to take. Collective."""
        found: list[Any] = [None] * dist.get_world_size()
        mine = {kind: quantile(times) for kind, times in self._seen.items()}
        dist.all_gather_object(found, mine)
        self._seconds = longest(found)
        self.late = [0, 0]

    def late_share(self) -> float:
        """Of all ranks' blocks since ``settle`` the share that took longer. Collective."""
        counts = torch.tensor(self.late)
        dist.all_reduce(counts)
        return float(counts[0] / counts[1])

    def _steady(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            """As ``blocks`` has it; the mask is the last argument but one."""
            tensors, mask = args[:-2], args[-2]
            kind = (name, mask.causal, *(tuple(tensor.shape) for tensor in tensors))
            start = time.monotonic()
            result = function(*args)
            took, given = time.monotonic() - start, self._seconds.get(kind)
            if given is None:
                self._seen[kind].append(took)
                return result
            self.late[0] += took > given
            self.late[1] += 1
            time.sleep(max(0.0, start + given - time.monotonic()))
            return result

        return run


def quantile(times: Sequence[float]) -> float:
    """The one that ``QUANTILE`` of ``times`` do not exceed."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(QUANTILE * len(ordered)))]


def longest(found: Sequence[Mapping[Kind, float]]) -> dict[Kind, float]:
    """Of all ranks' times of each kind the longest, and ``MARGIN``."""
    kinds = {kind for times in found for kind in times}
    return {kind: MARGIN * max(times.get(kind, 0.0) for times in found) for kind in kinds}
