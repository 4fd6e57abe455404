"""Sum the touched rows of a table that every rank holds: by a gather, or at owner ranks.

1. Each rank sends a header: an error in its row numbers if any, the number of its touched rows, and
   the bytes of their encoded row numbers.
2. Each rank sends its row numbers (``codecs.row_ids``). Now all ranks know which rows all others
   touched.
3. All ranks compute which form sends the fewest encoded bytes over all ranks, and use this form.
   "gather": each rank sends its rows to all others, with one quantization. "owner": each rank sends
   row i to rank i % ranks, which sends the sum to all others, with two quantizations.
   An all-reduce of the dense table is no third form: even if all rows are touched, "owner" sends at
   most as many bytes, with as many quantizations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.row_ids import decode_ids, encode_ids
from hybridcomp.collectives.all_gather_all_to_all import all_to_all, gather_words
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.group import Group, Transfer
from hybridcomp.collectives.wire.handle import Meter
from hybridcomp.collectives.wire.steps import transfer

Form = Literal["gather", "owner"]
FORMS: tuple[Form, ...] = ("gather", "owner")


class TouchedRows(NamedTuple):
    """Rows of a table.

    ids: (k,), int64 on the host; ascending and distinct, except where ``gather_rows`` concatenates
    the rows of all ranks. values: (k, width), fp32, bf16 or fp16.
    """

    ids: Tensor
    values: Tensor


class RowError(NamedTuple):
    """A rank with an out-of-range row number, and that number."""

    rank: int
    row: int


def gather_ids(
    mine: Tensor, rows: int, wrong: int | None, device: torch.device, group: Group, meter: Meter
) -> list[Tensor] | RowError:
    """Return the row numbers of all ranks, or the first error of any rank; equal on all ranks.

    Args:
        mine: this rank's row numbers, ascending, below ``rows``; on the host.
        wrong: an out-of-range number of this rank; None: there is none.
        device: device of the messages.
    """
    ids = mine if wrong is None else mine[:0]
    payload = encode_ids(ids).to(device)
    header = [0 if wrong is None else 1, wrong or 0, len(ids), len(payload)]
    words = gather_words(torch.tensor(header, device=device), group, meter)
    for rank, (is_wrong, row, _, _) in enumerate(words):
        if is_wrong:
            return RowError(rank, row)
    parts = _gather_bytes(payload, [nbytes for *_, nbytes in words], group, meter)
    counts = [count for _, _, count, _ in words]
    return [decode_ids(part.cpu(), n, rows) for part, n in zip(parts, counts, strict=True)]


def cheapest(
    ids: Sequence[Tensor], width: int, codec: Codec, dtype: torch.dtype
) -> tuple[Form, dict[Form, int]]:
    """Return the form with the fewest bytes over all ranks, and the bytes of each form.

    ``ids``: row numbers of all ranks. For codecs of variable size, the largest payloads count.
    """
    ranks = len(ids)

    def nbytes(counts: Sequence[int]) -> int:
        return sum(codec.wire_nbytes(count * width, dtype) for count in counts)

    def of_owners(numbers: Tensor) -> list[int]:
        counts: list[int] = torch.bincount(numbers % ranks, minlength=ranks).tolist()
        return counts

    given = [of_owners(one) for one in ids]
    away = [n for rank, row in enumerate(given) for to, n in enumerate(row) if to != rank]
    sums = of_owners(torch.unique(torch.cat(list(ids))))
    found: dict[Form, int] = {
        "gather": (ranks - 1) * nbytes(list(map(len, ids))),
        "owner": nbytes(away) + (ranks - 1) * nbytes(sums),
    }
    return min(FORMS, key=lambda form: found[form]), found


def gather_rows(mine: TouchedRows, ids: Sequence[Tensor], via: Transfer) -> TouchedRows:
    """Return the rows of all ranks concatenated in rank order; bit-identical on all ranks."""
    parts = _gather_values(mine.values, list(map(len, ids)), via)
    return TouchedRows(torch.cat(list(ids)), torch.cat(parts))


def sum_rows(mine: TouchedRows, ids: Sequence[Tensor], form: Form, via: Transfer) -> TouchedRows:
    """Return the rows that any rank touched, with their sums in fp32 and in rank order.

    All ranks get the same bits, in the dtype of ``mine``.
    """
    values, dtype, size = mine.values, mine.values.dtype, via.group.size
    union = torch.unique(torch.cat(list(ids)))
    if form == "gather":
        (only,) = via.codec.split_error_budget(1, size, result=dtype)
        parts = _gather_values(values, list(map(len, ids)), replace(via, codec=only))
        return TouchedRows(union, _added(union, ids, parts, values).to(dtype))
    to_owner, from_owner = via.codec.split_error_budget(2, size, result=dtype)
    owned = [union[union % size == rank] for rank in range(size)]
    got = _to_owners(mine, ids, replace(via, codec=to_owner))
    own = [one[one % size == via.group.rank] for one in ids]
    total = _added(owned[via.group.rank], own, got, values)
    total = total.to(dtype) if from_owner.lossless else total
    sums = _gather_values(total, list(map(len, owned)), replace(via, codec=from_owner))
    order = torch.argsort(torch.cat(owned)).to(values.device)
    return TouchedRows(union, torch.cat(sums)[order].to(dtype))


def _to_owners(mine: TouchedRows, ids: Sequence[Tensor], via: Transfer) -> list[Tensor]:
    """Send each row to its owner; return the received rows by rank."""
    size, me, width = via.group.size, via.group.rank, mine.values.shape[1]
    owners = mine.ids % size
    order = torch.argsort(owners, stable=True).to(mine.values.device)
    gives = [width * n for n in torch.bincount(owners, minlength=size).tolist()]
    takes = [width * int((one % size == me).sum()) for one in ids]
    out = mine.values.new_empty(sum(takes))
    all_to_all(out, mine.values[order].view(-1), via, takes, gives).wait()
    return [part.view(-1, width) for part in torch.split(out, takes)]


def _added(union: Tensor, ids: Sequence[Tensor], parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the fp32 sums of the rows ``union``; ``parts[r]``: rank r's values of its ``ids``."""
    total = torch.zeros((len(union), like.shape[1]), device=like.device, dtype=torch.float32)
    for numbers, part in zip(ids, parts, strict=True):
        total.index_add_(0, torch.searchsorted(union, numbers).to(like.device), part.float())
    return total


def _gather_values(values: Tensor, counts: Sequence[int], via: Transfer) -> list[Tensor]:
    """Return the rows (``counts[r]``, width) of every rank, each decoded from its payload."""
    (width, dtype), size = (values.shape[1], values.dtype), via.group.size
    codecs = [via.codec.for_message(count * width, dtype, size) for count in counts]
    most = [
        codec.wire_nbytes(count * width, dtype) for codec, count in zip(codecs, counts, strict=True)
    ]
    own, device = codecs[via.group.rank], values.device
    with via.meter.coding():
        payload = torch.empty(most[via.group.rank], dtype=torch.uint8, device=device)
        flat = values.contiguous().view(-1)
        payload = payload[: own.encode(flat, payload)] if len(flat) else payload[:0]
    via.meter.used[own.spec] = None
    if not all(codec.fixed_size for codec in codecs):
        used = torch.tensor([len(payload)], device=device)
        most = [nbytes for (nbytes,) in gather_words(used, via.group, via.meter)]
    found = []
    gathered = _gather_bytes(payload, most, via.group, via.meter)
    with via.meter.coding():
        for codec, count, part in zip(codecs, counts, gathered, strict=True):
            out = values.new_empty(count * width)
            if count:
                codec.decode(part, out)
            found.append(out.view(count, width))
    return found


def _gather_bytes(
    payload: Tensor, sizes: Sequence[int], group: Group, meter: Meter
) -> list[Tensor]:
    """Return the payloads (uint8) of all ranks; ``sizes``: their bytes, known to all."""
    most, device = max(sizes), payload.device
    if not most or group.size == 1:
        return [payload[:size] for size in sizes]
    if device.type == "cpu" and group.backends.get("cpu") == "gloo":
        out, rooms = payload.new_empty(sum(sizes)), list(sizes)
        transfer(lambda: transport.all_gather_uneven(out, payload, rooms, group, meter), meter)
        return list(torch.split(out, rooms))
    padded = payload.new_zeros(most)  # other transports need equally long parts
    padded[: len(payload)] = payload
    whole = payload.new_empty(most * group.size)
    transfer(lambda: transport.all_gather(whole, padded, group, meter), meter)
    return [part[:size] for part, size in zip(torch.split(whole, most), sizes, strict=True)]
