"""Embedding with rows sharded over ranks, kept in host memory and cached on the device."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # as torch.optim: imports the compiler when it is used
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hybridcomp.collectives.topology import ranks_of
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.job.gates import PerJob, Ranks
from hybridcomp.log import say_once
from hybridcomp.nn.tables import figures, owners, saved
from hybridcomp.nn.tables.host_rows import HostRows
from hybridcomp.nn.tables.making import NAME, Init, Mode, TableSettings, normal
from hybridcomp.nn.tables.ngrams import mixed
from hybridcomp.nn.tables.owners import Asked, CallProblem, Owners
from hybridcomp.nn.tables.row_gradients import RowGradients
from hybridcomp.nn.tables.slots import CacheFigures, RowsAhead, RowSlots

#: bytes of the largest table whose rows are in ``state_dict``
MOST_IN_STATE = 4 << 30
#: all tables of this process
TABLES: weakref.WeakSet[CachedEmbedding] = weakref.WeakSet()
#: number of tables so far, by the global ranks that share them: these ranks make them in one order
_made: PerJob[Counter[Ranks]] = PerJob(Counter)


class CachedEmbedding(nn.Module):
    """An ``nn.Embedding``, or with ``mode`` an ``nn.EmbeddingBag``, for tables of any size.

    Row i belongs to rank i % ranks of ``group``, which keeps it, with its optimizer states, in host
    memory or a mapped file, and caches ``resident`` of its rows on the device. Forward fetches a
    batch's rows from their owners. Backward sends the gradients to the owners, which add them in
    rank order, and keep them until ``RowOptimizer.step``. All ranks must call forward, prefetch and
    backward equally often, if need be with an empty batch; an error on one rank raises on all.

    Attributes:
        anchor: a parameter of one element, always zero, whose dtype is that of the outputs.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        resident: int | float,
        padding_idx: int | None = None,
        mode: Mode | None = None,
        include_last_offset: bool = False,
        hashed: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        folder: str | Path | None = None,
        frequency: Tensor | None = None,
        group: ProcessGroup | None = None,
        average: bool = True,
        init: Init | Literal["normal", "zeros"] = "normal",
    ) -> None:
        """Make the table; a collective over ``group``.

        Args:
            num_embeddings: rows of the whole table. embedding_dim: values of a row.
            resident: number of this rank's rows that the device caches; a float up to 1.0: the
                fraction of this rank's rows.
            padding_idx, mode, include_last_offset: as in torch; ``mode`` None: ``nn.Embedding``.
            hashed: whether ids are any int64, each of which selects a row by its hash.
            dtype: dtype of the rows on host and device, fp32 or bf16.
            folder: folder of the mapped files; None: host memory.
            frequency: lookups of each row, (num_embeddings,), in any unit; the most frequent rows
                are cached now, and stay longest. None: lookups are counted during training.
            group: the ranks over which the table is sharded; None: all ranks.
            average: divide gradients by the number of ranks, as data parallelism does.
            init: fills the rows of given ids, at most 64 MiB at a time; "normal" as torch does,
                "zeros" without touching memory.

        Raises ConfigError on all ranks if any rank cannot make the table.
        """
        super().__init__()
        members = ranks_of(group) if dist.is_initialized() else ()
        number = _made.here[members]
        _made.here[members] += 1
        self.name = f"{NAME} {number}"
        self.num_embeddings, self.embedding_dim, self.mode = num_embeddings, embedding_dim, mode
        self.include_last_offset, self.hashed = include_last_offset, hashed
        self.padding_idx = None if padding_idx is None else padding_idx % max(1, num_embeddings)
        self.owners = Owners(self.name, num_embeddings, group, number, members)
        place = torch.empty(0, device=device, dtype=torch.float32).device
        rank, ranks = self.owners.rank, self.owners.ranks
        host = HostRows(self.owners.count(rank), None if not folder else Path(folder))
        settings = TableSettings(
            num_embeddings, embedding_dim, dtype, resident, padding_idx, mode, hashed, average,
            frequency is None,
        )  # fmt: skip
        settings.agree(self.owners, host, frequency)
        counts = [self.owners.count(owner) for owner in range(ranks)]
        self.owners.slots = [settings.slots_of(rows) for rows in counts]
        host.add("weight", (embedding_dim,), dtype)
        if init != "zeros":
            host.fill(normal(rank) if init == "normal" else init, rank, ranks)
        padding = None if self.padding_idx is None else self.padding_idx // ranks
        if self.padding_idx is None or self.padding_idx % ranks != rank:
            padding = None  # another rank's own
        elif init == "normal":
            host.states["weight"][padding] = 0
        own = None if frequency is None else frequency[rank::ranks]
        self.slots = RowSlots(host, self.owners.slots[rank], place, own)
        self.anchor = nn.Parameter(torch.zeros(1, dtype=dtype, device=place))
        self._told = CacheFigures()
        self._ahead: deque[tuple[Tensor, Asked, RowsAhead]] = deque()
        self.row_gradients = RowGradients(self.owners, embedding_dim, average, padding)
        #: the RowOptimizer of this table
        self.optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        TABLES.add(self)

    @classmethod
    def from_embedding(
        cls, table: nn.Embedding | nn.EmbeddingBag, **settings: Any
    ) -> CachedEmbedding:
        """Make a table with the weights of torch's ``table``; ``settings``: constructor arguments.

        Raises ConfigError for ``max_norm`` and ``scale_grad_by_freq``, which a sharded table lacks.
        """
        for key, off in (("max_norm", None), ("scale_grad_by_freq", False)):
            if (value := getattr(table, key)) != off:
                todo = f"expected {off}: it looks at rows that other ranks have; leave it out"
                raise ConfigError(f"{NAME}.{key}", value, todo)
        weight = table.weight.detach()
        taken = {"dtype": weight.dtype, "device": weight.device, "padding_idx": table.padding_idx}
        if isinstance(table, nn.EmbeddingBag):
            taken |= {"mode": table.mode, "include_last_offset": table.include_last_offset}

        def init(rows: Tensor, ids: Tensor) -> None:
            rows.copy_(weight[ids.to(weight.device)])

        sizes = table.num_embeddings, table.embedding_dim
        return cls(*sizes, init=init, **{**taken, **settings})

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Look ``ids`` up, int32 or int64 on any device, as ``nn.Embedding`` or ``EmbeddingBag``.

        Returns outputs on the table's device. Raises IndexError, on all ranks, for an id beyond the
        table.
        """
        return self._looked_up(ids, offsets, per_sample_weights, torch.compiler.is_compiling())

    def prefetch(self, ids: Tensor) -> None:
        """Start reading the rows of a later batch; a collective.

        Forward must take the batches in the order of prefetch. Until a batch's forward, its rows
        are evicted last.
        """
        rows, problem = self._checked(ids)
        asked = self.owners.ask(rows, owners.AHEAD, problem)
        assert asked is not None
        self._ahead.append((rows, asked, self.slots.read_ahead(asked.wanted)))

    def figures(self) -> CacheFigures:
        """Return the counters of this rank's cache since the last call."""
        since = self.slots.figures.since(self._told)
        self._told = replace(self.slots.figures)
        return since

    def save(self, folder: str | Path) -> None:
        """Write this rank's rows and optimizer states; a collective. See ``load``.

        After a failed or killed save the previous save is intact. Raises CheckpointError.
        """
        self.slots.flush()
        saved.save(self, Path(folder))

    def load(self, folder: str | Path, *, states: bool = True) -> None:
        """Load the files of ``save`` from any number of ranks; a collective. Drops gradients.

        ``states``: whether to load optimizer states too; False: they become zeros. Raises
        CheckpointError on all ranks, with nothing changed, if a file is damaged or missing.
        """
        saved.load(self, Path(folder), states)

    def full_weight(self) -> Tensor | None:
        """Return the whole weight on the host of the first rank, None on others; a collective."""
        self.slots.flush()
        return saved.full_weight(self)

    @property
    def host(self) -> HostRows:
        """This rank's rows and states on the host; ``slots.flush()`` brings them up to date."""
        return self.slots.host

    @_disable_dynamo
    def _looked_up(
        self,
        ids: Tensor,
        offsets: Tensor | None,
        per_sample_weights: Tensor | None,
        is_compiled: bool,
    ) -> Tensor:
        if is_compiled:
            say_once(f"{self.name}: torch.compile ends a graph at the lookup, which runs as it is")
        asked, ahead = self._ask(ids)
        figures.follow(self)
        rows: Tensor = _Lookup.apply(self, asked, ahead, self.anchor)  # type: ignore[no-untyped-call]
        places = asked.places.to(rows.device).view(ids.shape)
        padding = None
        if self.padding_idx is not None:
            at = (asked.unique == self.padding_idx).nonzero().flatten()
            padding = int(at[0]) if len(at) else None
        if self.mode is None:
            return F.embedding(places, rows, padding)
        if offsets is not None:
            offsets = offsets.to(rows.device, torch.int64)
        lacks_padding = self.padding_idx is not None and padding is None
        if lacks_padding or not len(rows):  # torch sums in another order without a padding index
            padding = len(rows) if lacks_padding else None
            rows = torch.cat([rows, rows.new_zeros(1, self.embedding_dim)])
        return F.embedding_bag(
            places, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset, padding_idx=padding,
        )  # fmt: skip

    def _ask(self, ids: Tensor) -> tuple[Asked, RowsAhead | None]:
        rows, problem = self._checked(ids)
        if self._ahead and not self._is_recomputing():
            known, asked, ahead = self._ahead[0]
            if problem is None and not torch.equal(rows, known):
                problem = CallProblem(owners.OTHER_IDS)
            self.owners.ask(None, owners.AS_READ, problem)
            self._ahead.popleft()
            return asked, ahead
        fresh = self.owners.ask(rows, owners.FORWARD, problem)
        assert fresh is not None
        return fresh, None

    def _is_recomputing(self) -> bool:
        """Return whether activation checkpointing runs the forward pass again."""
        return torch._C._current_graph_task_id() != -1

    def _checked(self, ids: Tensor) -> tuple[Tensor, CallProblem | None]:
        """Return the row numbers (n,) of ``ids``, on the host, and the call's problem, if any."""
        if ids.dtype not in (torch.int32, torch.int64):
            kinds = owners.DTYPES
            kind = kinds.index(ids.dtype) if ids.dtype in kinds else -1
            return torch.empty(0, dtype=torch.int64, device="cpu"), CallProblem(
                owners.WRONG_DTYPE, kind
            )
        rows = ids.detach().reshape(-1).to("cpu", torch.int64)
        if self.hashed:
            rows = mixed(rows).remainder(self.num_embeddings)
        if self.anchor.dtype == torch.float16:
            return rows, CallProblem(owners.HALF)
        trains = torch.is_grad_enabled() and self.anchor.requires_grad
        if trains and (self.optimizer is None or self.optimizer() is None):
            return rows, CallProblem(owners.UNTRAINED)
        return rows, None

    def answer(self, asked: Asked, ahead: RowsAhead | None, dtype: torch.dtype) -> Tensor:
        """Send the rows that ranks request; return those of ``asked.unique``, (n, width)."""
        slots = self.slots.hold(asked.wanted, ahead)[asked.answer].to(self.anchor.device)
        mine = self.slots.values["weight"].index_select(0, slots).to(dtype)
        got = self.owners.exchange(mine, asked.takes, asked.gives, "forward")
        if asked.order is None:
            return got
        return torch.empty_like(got).index_copy_(0, asked.order.to(got.device), got)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return this owner's rows with accumulated gradients, and the gradients (n, width)."""
        return self.row_gradients.take(self.anchor.device)

    def drop_gradients(self) -> None:
        """Drop the accumulated gradients."""
        self.row_gradients.drop()
        self.slots.release()

    def reload(self) -> None:
        """Drop all rows on the device, since the rows on the host were replaced."""
        self._ahead.clear()
        self.drop_gradients()
        self.slots.reload()

    def _apply(self, fn: Any, recurse: bool = True) -> CachedEmbedding:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not self.anchor.is_meta:
            self.slots.to(self.anchor.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        weight = self.host.states["weight"]
        if self.owners.ranks == 1 and weight.nbytes <= MOST_IN_STATE:
            self.slots.flush()
            destination[prefix + "weight"] = weight
            return
        say_once(f"{self.name}: state_dict() has none of its rows; call save(folder) on every rank")

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: Any, strict: bool, missing: list[str],
        unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        whole = state.get(prefix + "weight")
        known = {name: value for name, value in state.items() if name != prefix + "weight"}
        known.setdefault(prefix + "anchor", self.anchor.detach())
        super()._load_from_state_dict(known, prefix, metadata, strict, missing, unexpected, errors)
        shape = (self.num_embeddings, self.embedding_dim)
        if whole is None:
            say_once(f"{self.name}: state_dict has none of its rows; call load(folder)")
        elif tuple(whole.shape) != shape:
            errors.append(f"{prefix}weight: expected {shape}, found {tuple(whole.shape)}")
        else:
            mine = whole.detach()[self.owners.rank :: self.owners.ranks]
            self.host.states["weight"].copy_(mine)
            self.reload()

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"{self.name} has no weight: its rows are on the hosts of all ranks; do not tie a "
                "head to it, and see full_weight() and save()"
            )
        return super().__getattr__(name)

    def __deepcopy__(self, memo: object) -> NoReturn:
        todo = "its rows are on the host of all ranks; make another table, and save and load"
        raise ConfigError(NAME, Shown("a deepcopy or pickle"), todo)

    def __getstate__(self) -> NoReturn:
        self.__deepcopy__(None)

    def extra_repr(self) -> str:
        """Return sizes, for ``print(model)``."""
        on = f"{self.slots.count} of {self.host.rows} rows of this rank on {self.anchor.device}"
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode}, {on}"


class _Lookup(torch.autograd.Function):
    """Fetch a batch's rows from their owners; the backward pass sends gradients to them."""

    @staticmethod
    def forward(
        ctx: Any, table: CachedEmbedding, asked: Asked, ahead: RowsAhead | None, anchor: Tensor
    ) -> Tensor:
        ctx.table, ctx.asked, ctx.like = table, asked, (anchor.shape, anchor.dtype, anchor.device)
        if ctx.needs_input_grad[3]:
            table.slots.keep(asked.wanted)
        return table.answer(asked, ahead, anchor.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, Tensor]:
        ctx.table.row_gradients.give(ctx.asked, grad.contiguous())
        shape, dtype, device = ctx.like
        return None, None, None, torch.zeros(shape, dtype=dtype, device=device)
