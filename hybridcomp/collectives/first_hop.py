"""First hop of every reduction: ranks send encoded values to owners, which add them in fp32.

An owner is a rank that needs the sum of a range. An all-reduce between two ranks has one range that
both own. With more ranks each chunk of an all-reduce has one owner, as each shard of a
reduce-scatter. A bucket states the owners of its ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, Protocol

from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.quantized_residual import Residual
from hybridcomp.collectives.fused import fused_reduce_scatter
from hybridcomp.collectives.owner_exchange import direct_exchange, sum_at_owners
from hybridcomp.collectives.owner_layout import SendingRank
from hybridcomp.collectives.owner_plan import OwnerPlan, range_rounds
from hybridcomp.collectives.wire.chunking import OwnedRange
from hybridcomp.collectives.wire.exchange_plan import SummedPart, plan_sum, sent_dtype
from hybridcomp.collectives.wire.exchanges import sum_parts
from hybridcomp.collectives.wire.group import Transfer
from hybridcomp.collectives.wire.handle import Steps, overlapped
from hybridcomp.collectives.wire.message_rounds import round_count


class Summing(Protocol):
    """Makes the steps that sum the ranges of this rank in one round, as ``sum_parts`` does."""

    def __call__(
        self,
        values: Sequence[Tensor],
        residuals: Sequence[Residual] | None,
        total: Tensor,
        via: Transfer,
        begin: Tensor | None = None,
        in_place: bool = False,
    ) -> Steps[Tensor]:
        """Return steps that sum into ``total`` (fp32) and then return ``total``.

        Args:
            values, residuals: one tensor each; with ``by`` "rounds" also one for each rank.
            begin: fp32 start values of the sums; with ``by`` "rounds" only ``total`` itself.
            in_place: whether ``total`` is this rank's range of ``values``: only with ``by``
                "table", or on ranks 0 and 1.
        """


@dataclass(frozen=True, eq=False)
class FirstHop:
    """First hop of equal messages.

    Attributes:
        codec: codec of the values.
        by: how the hop runs; the first of these for which the codec has kernels on the device.
            "chunks": kernels for equal chunks, two launches; "table": kernels for any slices, two
            launches; "rounds": exchanges of payloads in rounds, without such kernels.
        rounds: sum of each round; "chunks" and "table" have one.
        held: codec of the message, kept alive since the cache key has its ``id``.
    """

    codec: Codec
    by: Literal["chunks", "table", "rounds"]
    rounds: tuple[Summing, ...]
    held: Codec | None = None

    @cached_property
    def sum(self) -> Summing:
        """Return one sum that runs all rounds overlapped."""
        rounds = self.rounds
        if len(rounds) == 1:
            return rounds[0]
        return lambda *more: overlapped([each(*more) for each in rounds])


def plan_first_hop(
    owners: OwnerPlan,
    codecs: Sequence[Codec],
    like: Tensor,
    how: Transfer,
    feedback: bool,
    *,
    chunk: int = 0,
    starts: Sequence[int] | None = None,
    kernels: bool = True,
) -> FirstHop:
    """Plan the first hop of messages like ``like`` with the cuts and the group of ``how``.

    Args:
        owners: a direct plan.
        codecs: codec of the values; then, if a second hop follows in the same rounds, its codec.
        feedback: whether values have residuals.
        chunk: elements of each range but the last ones, if each range has one owner and kernels
            for whole chunks may sum them; else 0.
        starts: if each rank's values are a separate tensor: its start in the whole message.
        kernels: whether ``by`` may be "chunks" or "table", which take values as one tensor.
    """
    codec, group, device, cuts = codecs[0], how.group, like.device, tuple(how.cuts)
    fused = codec.fused(device) if kernels and chunk and not cuts else None
    if fused is not None:
        return FirstHop(codec, "chunks", (partial(fused_reduce_scatter, fused, codec, chunk),))
    kernel = codec.planned(device) if kernels else None
    if kernel is not None:
        sending = SendingRank(group.rank, group.size, codec, like.dtype, device, cuts)
        exchange = direct_exchange(owners, kernel, sending)
        return FirstHop(codec, "table", (partial(sum_at_owners, exchange),))
    mine, dtype = owners.sums_of(group.rank), sent_dtype(codec, like.dtype, feedback, how.flush)

    def part(owned: OwnedRange) -> SummedPart:
        start, stop, ranks = owned.start, owned.stop, owned.ranks
        place = mine.place_of(start) if group.rank in ranks else 0
        if starts is None:
            return SummedPart(start, stop, ranks, place)
        (rank,) = ranks
        return SummedPart(start - starts[rank], stop - starts[rank], ranks, place, rank)

    count = round_count(owners.longest, codecs, device, group)
    shares = range_rounds(owners.runs, cuts, count)
    plans = [plan_sum(list(map(part, each)), codec, dtype, device, group) for each in shares]
    return FirstHop(codec, "rounds", tuple(partial(sum_parts, plan) for plan in plans))
