"""Sum the rows of a replicated table that a step has touched (``collectives.row_sums``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridcomp.channels.channel import Channel, Message
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Transfer
from hybridcomp.collectives.row_sums import (
    RowError,
    TouchedRows,
    cheapest,
    gather_ids,
    gather_rows,
    sum_rows,
)

#: number of elements passed to the policy, so that ``min_bytes`` never applies: ranks touch
#: different numbers of rows but must choose alike
ANY_SIZE = 1 << 60


@dataclass(eq=False, kw_only=True)
class RowSum(Message[TouchedRows]):
    """Sum, over ``group``, rows of the gradient of one table.

    Every rank takes part, with no rows if it has touched none. Raises IndexError on all ranks if
    any rank has a row number outside the table.

    Attributes:
        table: name of the table, for errors.
        mine: this rank's rows, ascending and without duplicates, as native would send them.
        scaled: returns ``mine`` times the factor that upstream applies before it sends.
        rows: number of rows of the table.
        wrong: an out-of-range row number in a batch of this rank; None: there was none.
        behind: whether, with a lossless ``codec``, the rows of all ranks are concatenated as
            DeepSpeed does, so that optimizers that add rows in order get the same bits.
    """

    numel: int = field(default=ANY_SIZE, init=False)
    table: str
    mine: TouchedRows
    scaled: Callable[[], TouchedRows]
    rows: int
    wrong: int | None = None
    behind: bool = False

    def native_nbytes(self, size: int) -> int:
        """Return the bytes of gathering these rows and their int64 row numbers."""
        return (size - 1) * (8 * len(self.mine.ids) + self.mine.values.nbytes)

    def send(self, channel: Channel, codec: Codec) -> TouchedRows:
        """Exchange row numbers, choose the form with the fewest bytes, and sum the rows."""
        mine, wrong = self.scaled(), self.wrong
        ids, values = mine
        known, meter = channel.group(self.group), channel.meter(values.device)
        if wrong is None and len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < self.rows:
            wrong = int(ids[0]) if ids[0] < 0 else int(ids[-1])
        every = gather_ids(ids, self.rows, wrong, values.device, known, meter)
        if isinstance(every, RowError):
            raise IndexError(
                f"{self.table}: rank {every.rank} has row {every.row}; expected 0 to "
                f"{self.rows - 1}; look at the ids of its batch"
            )
        via = Transfer(codec, known, meter)
        if len(ids):
            channel.sample(
                values.reshape(-1), codec.split_error_budget(1, 1, result=values.dtype)[0],
                self.direction,
            )  # fmt: skip
        if self.behind and codec.lossless:
            found = gather_rows(mine, every, via)
        else:
            form, _ = cheapest(every, values.shape[1], codec, values.dtype)
            found = sum_rows(mine, every, form, via)
        share = len(known.remote) / max(1, known.size - 1)
        channel.record(meter, self.native_nbytes(known.size), self.direction, share)
        return found


def touched(gradient: Tensor) -> TouchedRows:
    """Return the rows of a sparse COO gradient (rows, width), duplicates added up."""
    whole = gradient.coalesce()
    return TouchedRows(whole.indices()[0].cpu(), whole.values())


def as_gradient(found: TouchedRows, like: Tensor) -> Tensor:
    """Return summed rows as a coalesced sparse tensor of the shape of ``like``."""
    numbers = found.ids.to(found.values.device)[None]
    return torch.sparse_coo_tensor(numbers, found.values, like.shape, is_coalesced=True)
