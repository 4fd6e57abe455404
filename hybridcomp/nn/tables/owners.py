"""Fetch rows from their owners and send gradients to them; rank i % ranks owns row i.

1. All ranks exchange headers: the call, its error if any, and the number of rows requested from
   each rank. So an error on one rank raises on all before any row is sent.
2. Each rank sends every owner the ascending positions of the requested rows (``codecs.row_ids``).
3. Owners send the rows, and in backward receive their gradients, through the channel ``embed``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hybridcomp.channels import AllToAll
from hybridcomp.channels.channel import Channel
from hybridcomp.channels.messages.row_sums import ANY_SIZE
from hybridcomp.codecs.row_ids import decode_ids, encode_ids
from hybridcomp.collectives import Group, Meter, Splits
from hybridcomp.collectives.all_gather_all_to_all import gather_words
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.steps import transfer
from hybridcomp.config.error_messages import Shown
from hybridcomp.dimensions import Direction
from hybridcomp.errors import AgreementError, ConfigError, HybridcompError
from hybridcomp.job import small_messages
from hybridcomp.session import process

#: number of words before the one word per rank in a header: call, problem, the problem's value
WORDS = 3
#: calls, by their number in a header
FORWARD, AHEAD, AS_READ = range(3)
CALLS = ("forward", "prefetch", "forward of a batch that was prefetched")
#: problems, by their number in a header
FINE, OUT_OF_RANGE, WRONG_DTYPE, OTHER_IDS, HALF, UNTRAINED = range(6)
DTYPES = (
    torch.int32, torch.int64, torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


class CallProblem(NamedTuple):
    """Encode a refusal of this rank's call as two integers: its kind and the offending value."""

    kind: int
    value: int = 0


@dataclass(frozen=True, eq=False)
class Asked:
    """Hold the rows that a batch requests, and the rows requested from this rank; on the host.

    Attributes:
        unique: the batch's rows, unique and ascending: torch adds the gradients of a bag in an
            order that depends on the order of rows.
        places: (ids,), index into ``unique`` of each id of the batch.
        order: indices into ``unique``, sorted by owner, the order of messages; None: unchanged.
        gives: number of rows that this rank receives from each rank.
        takes: number of rows that this rank sends to each rank.
        wanted: positions at this owner that any rank requests, ascending and unique.
        answer: (sum of ``takes``,), index into ``wanted`` of each requested row, by rank.
    """

    unique: Tensor
    places: Tensor
    order: Tensor | None
    gives: Sequence[int]
    takes: Sequence[int]
    wanted: Tensor
    answer: Tensor


class Owners:
    """The ranks that share a table of ``rows`` rows.

    Attributes:
        rank, ranks: this rank's number in ``group``, and how many there are.
        number, members: the table's number among those of these global ranks; equal on all ranks.
        slots: for each rank, the most rows that a batch may request from it.
    """

    def __init__(
        self,
        name: str,
        rows: int,
        group: ProcessGroup | None,
        number: int,
        members: tuple[int, ...],
    ) -> None:
        self.name, self.rows, self.number, self.members = name, rows, number, members
        self._given, up = group, dist.is_initialized()
        self.group: ProcessGroup | None = group or (dist.group.WORLD if up else None)
        self._known = None if self.group is None else Group.of(self.group)
        self.rank = 0 if self._known is None else self._known.rank
        self.ranks = 1 if self._known is None else self._known.size
        self.slots: Sequence[int] = ()
        own = {} if self._known is None else self._known.backends
        self._wire = torch.device("cuda" if own and "cpu" not in own else "cpu")

    def count(self, rank: int) -> int:
        """Return the number of rows that ``rank`` owns."""
        return (self.rows - rank + self.ranks - 1) // self.ranks

    def agree(
        self, statement: dict[str, Any], problem: HybridcompError | None
    ) -> list[dict[str, Any]]:
        """Return all ranks' statements; raise on all if any has a problem. A collective."""
        every = [(problem, statement)]
        if self.ranks > 1:
            every = small_messages.gather_objects((problem, statement), self.group)
        for error, _ in every:
            if error is not None:
                raise error
        return [stated for _, stated in every]

    def total(self, values: Tensor) -> Tensor:
        """Sum ``values`` over the ranks; a collective that no ledger counts."""
        if self.ranks == 1:
            return values
        return small_messages.total(values.to(self._wire), self.group).to(values.device)

    def ask(self, ids: Tensor | None, call: int, problem: CallProblem | None) -> Asked | None:
        """Exchange the row requests of all ranks; a collective.

        Args:
            ids: 1-D, int64 on the host; None if the call needs no rows or has a problem.
            call: FORWARD, AHEAD or AS_READ; AS_READ only exchanges problems.

        Raises IndexError, ConfigError or AgreementError on all ranks.
        """
        self._check_group()
        if problem is None and ids is not None and len(ids):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.rows:
                problem = CallProblem(OUT_OF_RANGE, low if low < 0 else high)
        asks = problem is None and call != AS_READ
        assert ids is not None or not asks, "ids to ask for"
        if self.ranks == 1:
            if problem is not None:
                raise self._error(0, problem)
            return self._alone(ids) if asks and ids is not None else None
        unique, places = torch.unique(
            torch.empty(0, dtype=torch.int64, device="cpu") if not asks or ids is None else ids,
            return_inverse=True,
        )
        order, gives, payloads = self._by_owner(unique)
        sizes = [len(payload) for payload in payloads]
        header = [self.number << 8 | call, *(problem or CallProblem(FINE))]
        header += [count << 32 | size for count, size in zip(gives, sizes, strict=True)]
        meter = self._meter()
        every = self._gathered(header, meter)
        self._raise_problems(every)
        if call == AS_READ:
            self._record(meter, 0)
            return None
        asked = every[:, WORDS + self.rank]
        takes, come = (asked >> 32).tolist(), (asked & 0xFFFFFFFF).tolist()
        data = self._exchanged(torch.cat(payloads), come, sizes, meter)
        mine = self.count(self.rank)
        parts = torch.split(data, come)
        wants = [decode_ids(part, n, mine) for part, n in zip(parts, takes, strict=True)]
        wanted, answer = torch.unique(torch.cat(wants), return_inverse=True)
        self._check_slots(every, len(wanted), meter)
        self._record(meter, 8 * (sum(gives) - gives[self.rank]))
        return Asked(unique, places, order, gives, takes, wanted, answer)

    def _alone(self, ids: Tensor) -> Asked:
        unique, places = torch.unique(ids, return_inverse=True)
        count = [len(unique)]
        every = torch.arange(len(unique), device="cpu")
        asked = Asked(unique, places, None, count, count, unique, every)
        self._refuse_slots([len(unique)])
        return asked

    def _by_owner(self, unique: Tensor) -> tuple[Tensor, list[int], list[Tensor]]:
        """Return the order of rows by owner, and each owner's row count and encoded positions."""
        owner = unique % self.ranks
        order = torch.argsort(owner, stable=True)
        gives = torch.bincount(owner, minlength=self.ranks).tolist()
        places = torch.div(unique[order], self.ranks, rounding_mode="floor")
        return order, gives, [encode_ids(part) for part in torch.split(places, gives)]

    def exchange_exactly(self, rows: Tensor, to: Sequence[int], back: Sequence[int]) -> Tensor:
        """Exchange rows of the host without a codec; see ``exchange``."""
        channel = self._channel()
        with contextlib.nullcontext() if channel is None else channel.suspended():
            return self.exchange(rows.to(self._wire), to, back, "forward").cpu()

    def exchange(
        self, rows: Tensor, to: Sequence[int], back: Sequence[int], direction: Direction
    ) -> Tensor:
        """Send ``to[r]`` of the ``rows`` (n, width) to each rank r; return the rows received,
        ``back[r]`` from each rank r: (sum of ``back``, width)."""
        if self._known is None or self.ranks == 1:
            return rows
        width = rows.shape[1]
        message = AllToAll(
            numel=ANY_SIZE, dtype=rows.dtype, group=self.group, direction=direction, values=rows,
            in_splits=list(to), out_splits=list(back), row=width,
        )  # fmt: skip

        def native() -> Tensor:
            nbytes = width * rows.itemsize
            takes, gives = Splits.of(list(back), nbytes), Splits.of(list(to), nbytes)
            flat = rows.detach().contiguous().view(-1).view(torch.uint8)
            out = flat.new_empty(takes.total)
            meter = Meter()
            sent = out, flat, takes, gives, self._group(), meter
            transfer(lambda: transport.all_to_all(*sent), meter)
            return out.view(rows.dtype).view(-1, width)

        channel = self._channel()
        if channel is None:
            return native()
        return channel.run(
            message, native=native, encoded=lambda sent: message.complete(sent).view(-1, width)
        )

    def _check_group(self) -> None:
        now = self._given or (dist.group.WORLD if dist.is_initialized() else None)
        if now is not self.group:
            todo = "make the table after init_process_group, and anew after another one"
            raise ConfigError(self.name, Shown("another process group than when it was made"), todo)

    def _check_slots(self, every: Tensor, wanted: int, meter: Meter) -> None:
        """Refuse, on all ranks, a batch that asks an owner for more rows than it has slots.

        All ranks know how many rows each rank requests from an owner. Only if the sum exceeds the
        owner's slots do ranks exchange how many of these rows are unique.
        """
        most = (every[:, WORDS:] >> 32).sum(0).tolist()
        if all(asked <= slots for asked, slots in zip(most, self.slots, strict=True)):
            return
        self._refuse_slots(self._gathered([wanted], meter).flatten().tolist())

    def _refuse_slots(self, wanted: Sequence[int]) -> None:
        for rank, (asked, slots) in enumerate(zip(wanted, self.slots, strict=True)):
            if asked > slots:
                raise ConfigError(
                    f"{self.name}.resident", slots,
                    f"a batch asks rank {rank} for {asked} different rows; expected at least as "
                    "many resident ones, or use smaller batches",
                )  # fmt: skip

    def _raise_problems(self, every: Tensor) -> None:
        calls = every[:, 0].tolist()
        if len(set(calls)) > 1:
            other = next(rank for rank, call in enumerate(calls) if call != calls[0])
            said = [f"rank {rank}: {_call(calls[rank])}" for rank in (0, other)]
            todo = "call all tables in one order on all ranks, an empty batch included"
            raise AgreementError(f"{self.name}: {', '.join(said)}; {todo}")
        for rank, (kind, value) in enumerate(every[:, 1:WORDS].tolist()):
            if kind != FINE:
                raise self._error(rank, CallProblem(kind, value))

    def _error(self, rank: int, problem: CallProblem) -> Exception:
        if problem.kind == OUT_OF_RANGE:
            return IndexError(
                f"{self.name}: rank {rank} asks for row {problem.value}; expected 0 to "
                f"{self.rows - 1}; look at the ids of its batch"
            )
        value = problem.value
        given, todo = {
            WRONG_DTYPE: (
                str(DTYPES[value]) if value >= 0 else "another dtype",
                "expected ids of int32 or int64",
            ),
            OTHER_IDS: (
                "other ids than were prefetched",
                "forward takes the batches in the order of prefetch; expected these ids",
            ),
            HALF: ("a module in fp16", "rows have no loss scale; expected fp32 or bf16"),
            UNTRAINED: (
                "gradients that nobody takes",
                "no RowOptimizer has this table; give it one before a batch that trains, or call "
                "requires_grad_(False)",
            ),
        }[problem.kind]
        return ConfigError(self.name, Shown(f"{given} on rank {rank}"), todo)

    def _gathered(self, own: Sequence[int], meter: Meter) -> Tensor:
        """Return the words of all ranks, (ranks, words)."""
        words = torch.tensor(own, device=self._wire)
        return torch.tensor(gather_words(words, self._group(), meter), device="cpu")

    def _exchanged(
        self, data: Tensor, come: Sequence[int], sizes: Sequence[int], meter: Meter
    ) -> Tensor:
        sent = data.to(self._wire)
        out = sent.new_empty(sum(come))
        call = out, sent, list(come), list(sizes), self._group(), meter
        transfer(lambda: transport.all_to_all(*call), meter)
        return out.cpu()

    def _group(self) -> Group:
        channel = self._channel()
        if channel is not None:
            return channel.group(self.group)
        assert self._known is not None, "several ranks"
        return self._known

    def _channel(self) -> Channel | None:
        channels = process.known()
        return None if channels is None else channels["embed"]

    def _meter(self) -> Meter:
        channel = self._channel()
        return Meter() if channel is None else channel.meter(self._wire)

    def _record(self, meter: Meter, raw_nbytes: int) -> None:
        """Record the traffic of a batch's ids; ``raw_nbytes``: bytes of the same ids as int64."""
        channel = self._channel()
        if channel is not None:
            known = channel.group(self.group)
            share = len(known.remote) / max(1, known.size - 1)
            if raw_nbytes:
                channel.record(meter, raw_nbytes, "forward", share)
            else:
                channel.state.ledger.record_extra(("embed", "forward"), meter)


def _call(word: int) -> str:
    return f"{CALLS[word & 0xFF]} of table {word >> 8}"
