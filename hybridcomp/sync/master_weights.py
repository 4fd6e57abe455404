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
    """The weights that the optimizer of one rank changes.

    Attributes:
        pieces: names and elements of what the vector consists of, in order.
        tensors: returns the tensors that hold them, one for each piece, whose flat order counts.
        written: to be called once some of them were changed: an engine with 16-bit copies makes
            these from them. A collective of the island where they are cut over its ranks.
        replicated: whether ranks of the island hold the same vector, so that each sends a part.
        replicas: the ranks that do; None: all of the island.
        kept: watches for gradients that are kept over a meeting; None: the engine clears them.
        trained: returns by name which parameters are trained now; None: they stay the same.
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
        """Raise ConfigError where parameters were frozen or unfrozen since the beginning.

        Islands would not share those that are trained since then, and outer momentum would go on
        moving those that are not.
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
        """Return the elements of the vector."""
        return sum(numel for _, numel in self.pieces)

    @property
    def digest(self) -> str:
        """Return a digest of names and lengths, equal where two ranks have the same place."""
        return hashlib.sha256(repr(list(self.pieces)).encode()).hexdigest()[:16]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which meetings compute: fp64 for such weights, else fp32."""
        dtypes = {tensor.dtype for tensor in self.tensors()}
        return torch.float64 if torch.float64 in dtypes else torch.float32

    def shares(self, inside: dist.ProcessGroup | None) -> tuple[int, int]:
        """Return how many ranks hold this vector, and the place of this one among them.

        ``inside``: the ranks of the island; None: all of the job.
        """
        if not self.replicated:
            return 1, 0
        group = self.replicas or inside
        return dist.get_world_size(group), dist.get_rank(group)

    def read(self, low: int, high: int, numel: int | None = None) -> Tensor:
        """Return a copy of elements ``low`` to ``high``, with zeros behind up to ``numel``."""
        first = self.tensors()[0] if self.pieces else torch.empty(0)
        size = high - low if numel is None else numel
        found = torch.zeros(size, dtype=self.dtype, device=first.device)
        for tensor, start, stop, at in self._overlaps(low, high):
            found[at : at + stop - start].copy_(tensor.reshape(-1)[start:stop])
        return found

    def exchange(
        self, low: int, high: int, values: Tensor, before: list[tuple[Tensor, int, Tensor]]
    ) -> None:
        """Exchange elements ``low`` to ``high`` with the first ``high - low`` of ``values``.

        ``before``: gets what ``put_back`` takes, after a failure in the middle as well.
        """
        for tensor, start, stop, at in self._overlaps(low, high):
            new = values[at : at + stop - start]
            old = tensor.reshape(-1)[start:stop].to(new.dtype, copy=True)
            before.append((tensor, start, old))
            _put(tensor, start, new)
            new.copy_(old)
            before[-1] = tensor, start, new  # where no more memory is taken

    def gathered(
        self, part: Part, values: Tensor, whole: tuple[int, int], inside: dist.ProcessGroup | None
    ) -> tuple[int, int, Tensor]:
        """Return the arguments of ``write`` for this rank's ``part`` and for the others' parts.

        Others have parts where they hold the same vector; then this is a collective of those.
        A gate of the operation either way.

        Args:
            whole: beginning and end of the fragment that the parts make up.
            inside: the ranks of the island; None: all of the job.
        """
        width, _ = self.shares(inside)
        if width == 1:
            gate()
            return part.low, part.high, values.clone()  # which ``exchange`` changes
        found, group = values.new_empty(width * part.numel), self.replicas or inside
        values = values.contiguous()
        gate()
        start_gather(found, values, group).wait()
        return *whole, found

    def _overlaps(self, low: int, high: int) -> list[tuple[Tensor, int, int, int]]:
        """Return the tensors in the range, with the stretch of each and its place in the range."""
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
    flat = tensor.reshape(-1)  # a copy, where it is a slice of a larger tensor
    flat[start : start + values.numel()].copy_(values)
    if not _is_view(flat, tensor):
        tensor.copy_(flat.view(tensor.shape))


def _is_view(flat: Tensor, tensor: Tensor) -> bool:
    """Return whether ``flat``, made of ``tensor``, has its memory."""
    return flat.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def in_memory(tensor: Tensor) -> Tensor:
    """Return the values of ``tensor`` in the order of its memory, a view; complex ones as pairs.

    Weights in ``torch.channels_last`` are contiguous in no other order.
    """
    found = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return found.permute(_order(found))


def piece_of(name: str, tensor: Tensor) -> tuple[str, int]:
    """Return a name that includes the memory order, unless it is plain, and the elements."""
    found = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    order = _order(found)
    how = "" if order == list(range(found.dim())) else f" by dimensions {order}"
    return f"{name}{how}", found.numel()


def _order(tensor: Tensor) -> list[int]:
    """Return the dimensions of ``tensor`` as they lie in memory, the slowest first."""
    dimensions = range(tensor.dim())
    if tensor.is_contiguous():
        return list(dimensions)
    return sorted(dimensions, key=tensor.stride, reverse=True)


def bounds(numel: int, fragments: int, index: int) -> tuple[int, int]:
    """Return beginning and end of a fragment in a vector of ``numel`` elements."""
    return numel * index // fragments, numel * (index + 1) // fragments


def cut(numel: int, fragments: int, ranks: int, rank: int) -> list[tuple[int, int, int]]:
    """Cut a vector into fragments and return this rank's part of each.

    Every element lies in one fragment and there in the part of one of ``ranks`` ranks, which are
    equally long but for padding behind the last. Returns for each fragment the part's beginning,
    its end, and its length with padding.
    """
    found = []
    for index in range(fragments):
        low, high = bounds(numel, fragments, index)
        length = -(-(high - low) // ranks)
        start = min(low + rank * length, high)
        found.append((start, min(start + length, high), length))
    return found
