"""View the weights of one rank as one flat vector, however the engine stores them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.job.gates import gate
from hybridcomp.sync.exact_sends import start_gather
from hybridcomp.sync.kept_gradients import KeptGradients
from hybridcomp.sync.progress import Part


@dataclass(frozen=True)
class Masters:
    """The weights that one rank's optimizer changes.

    Attributes:
        pieces: names and lengths of the vector's pieces, in order.
        tensors: returns one tensor for each piece, in the order of ``pieces``.
        written: called after tensors were changed, so that the engine updates its 16-bit copies. A
            collective of the island if the tensors are sharded over the island's ranks.
        replicated: whether ranks of the island hold equal vectors, so that each sends one part.
        replicas: group of the ranks with equal vectors; None: the whole island.
        kept: watches for gradients kept across a meeting; None: the engine clears them.
        trained: returns, by parameter name, whether it is currently trained; None: never changes.
    """

    pieces: Sequence[tuple[str, int]]
    tensors: Callable[[], Sequence[Tensor]]
    written: Callable[[], None]
    replicated: bool
    replicas: dist.ProcessGroup | None = None
    kept: KeptGradients | None = None
    trained: Callable[[], Mapping[str, bool]] | None = None
    _trained_at_first: Mapping[str, bool] = field(init=False)

    def __post_init__(self) -> None:
        found = {} if self.trained is None else dict(self.trained())
        object.__setattr__(self, "_trained_at_first", found)

    def check(self) -> None:
        """Raise ConfigError if parameters were frozen or unfrozen since the beginning.

        Islands would not exchange newly trained parameters, and outer momentum would keep moving
        newly frozen ones.
        """
        now = {} if self.trained is None else self.trained()
        odd = next((n for n, is_now in now.items() if self._trained_at_first[n] != is_now), None)
        if odd is not None:
            what = "trained" if now[odd] else "frozen"
            todo = "detach before parameters are frozen or unfrozen, and attach again behind it"
            raise ConfigError(
                "compression.sync", Shown(f"{odd}, {what} only since meetings began"), todo
            )

    @property
    def numel(self) -> int:
        """Return the number of elements of the vector."""
        return sum(numel for _, numel in self.pieces)

    @property
    def digest(self) -> str:
        """Return a digest of names and lengths, equal on ranks with the same part of the model."""
        return hashlib.sha256(repr(list(self.pieces)).encode()).hexdigest()[:16]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of meetings: fp64 if any weights are fp64, else fp32."""
        dtypes = {tensor.dtype for tensor in self.tensors()}
        return torch.float64 if torch.float64 in dtypes else torch.float32

    def shares(self, inside: dist.ProcessGroup | None) -> tuple[int, int]:
        """Return how many ranks hold this vector, and the index of this rank among them.

        ``inside``: group of the island's ranks; None: all ranks of the job.
        """
        if not self.replicated:
            return 1, 0
        group = self.replicas or inside
        return dist.get_world_size(group), dist.get_rank(group)

    def read(self, low: int, high: int, numel: int | None = None) -> Tensor:
        """Return a copy of elements ``low`` to ``high``, zero-padded to ``numel``."""
        first = (
            self.tensors()[0] if self.pieces else torch.empty(0, dtype=torch.float32, device="cpu")
        )
        size = high - low if numel is None else numel
        found = torch.zeros(size, dtype=self.dtype, device=first.device)
        for tensor, start, stop, at in self._overlaps(low, high):
            found[at : at + stop - start].copy_(tensor.reshape(-1)[start:stop])
        return found

    def exchange(
        self, low: int, high: int, values: Tensor, before: list[tuple[Tensor, int, Tensor]]
    ) -> None:
        """Swap elements ``low`` to ``high`` with the first ``high - low`` of ``values``.

        ``before`` receives the arguments of ``put_back``, even if this fails in the middle.
        """
        for tensor, start, stop, at in self._overlaps(low, high):
            new = values[at : at + stop - start]
            old = tensor.reshape(-1)[start:stop].to(new.dtype, copy=True)
            before.append((tensor, start, old))
            _put(tensor, start, new)
            new.copy_(old)
            before[-1] = tensor, start, new  # nothing after this line allocates memory

    def gathered(
        self, part: Part, values: Tensor, whole: tuple[int, int], inside: dist.ProcessGroup | None
    ) -> tuple[int, int, Tensor]:
        """Return the arguments of ``write`` for this rank's ``part`` and the other ranks' parts.

        If several ranks hold the same vector, they all-gather its parts. In either case this passes
        a gate of the operation.

        Args:
            whole: start and end of the fragment that the parts make up.
            inside: group of the island's ranks; None: all ranks of the job.
        """
        width, _ = self.shares(inside)
        if width == 1:
            gate()
            # a copy, because ``exchange`` changes the values
            return part.low, part.high, values.clone()
        found, group = values.new_empty(width * part.numel), self.replicas or inside
        values = values.contiguous()
        gate()
        start_gather(found, values, group).wait()
        return *whole, found

    def _overlaps(self, low: int, high: int) -> list[tuple[Tensor, int, int, int]]:
        """Return the tensors in the range, each with its slice and its position in the range."""
        found = []
        ends = list(accumulate(numel for _, numel in self.pieces))
        for tensor, (_, numel), end in zip(self.tensors(), self.pieces, ends, strict=True):
            begin = end - numel
            start, stop = max(low, begin), min(high, end)
            if start < stop:
                found.append((tensor.detach(), start - begin, stop - begin, start - low))
        return found


def put_back(before: list[tuple[Tensor, int, Tensor]]) -> None:
    """Restore the values that the weights had before ``exchange``."""
    while before:
        _put(*before.pop())


def _put(tensor: Tensor, start: int, values: Tensor) -> None:
    """Copy ``values`` into the elements of ``tensor`` from ``start`` on."""
    flat = tensor.reshape(-1)  # a copy if the tensor is a slice of a larger one
    flat[start : start + values.numel()].copy_(values)
    if not _is_view(flat, tensor):
        tensor.copy_(flat.view(tensor.shape))


def _is_view(flat: Tensor, tensor: Tensor) -> bool:
    """Return whether ``flat``, which was made from ``tensor``, shares the memory of ``tensor``."""
    return flat.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def in_memory(tensor: Tensor) -> Tensor:
    """Return a view of ``tensor`` in memory order; complex values as pairs.

    Weights in ``torch.channels_last`` are contiguous in no other order.
    """
    found = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return found.permute(_order(found))


def piece_of(name: str, tensor: Tensor) -> tuple[str, int]:
    """Return the name, with the memory order unless contiguous, and the number of elements."""
    found = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    order = _order(found)
    how = "" if order == list(range(found.dim())) else f" by dimensions {order}"
    return f"{name}{how}", found.numel()


def _order(tensor: Tensor) -> list[int]:
    """Return the dimensions of ``tensor`` in memory order, the slowest first."""
    dimensions = range(tensor.dim())
    if tensor.is_contiguous():
        return list(dimensions)
    return sorted(dimensions, key=tensor.stride, reverse=True)


def bounds(numel: int, fragments: int, index: int) -> tuple[int, int]:
    """Return start and end of a fragment in a vector of ``numel`` elements."""
    return numel * index // fragments, numel * (index + 1) // fragments


def cut(numel: int, fragments: int, ranks: int, rank: int) -> list[tuple[int, int, int]]:
    """Cut a vector into fragments and return this rank's part of each.

    Every element belongs to one fragment; a fragment consists of ``ranks`` parts, one for each
    rank. Parts are equally long, with padding after the last. Returns for each fragment the part's
    start, its end, and its length with padding.
    """
    found = []
    for index in range(fragments):
        low, high = bounds(numel, fragments, index)
        length = -(-(high - low) // ranks)
        start = min(low + rank * length, high)
        found.append((start, min(start + length, high), length))
    return found
