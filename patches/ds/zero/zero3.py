"""Gradient reduce-scatter of ZeRO stage 3, dimension ``dp``.

Seam: the name ``reduce_scatter_coalesced`` in module ``stage3``, which imported the function, so
replacing it in ``coalesced_collectives`` would change nothing. ``__avg_scatter_grads`` around it is
wrapped only to find out which parameters are reduced.

Upstream pads every parameter with ``torch.empty`` to a multiple of the ranks and sends the padding
too. Here undefined values never affect a codec's scale: shards are padded with zeros only if
several shards would be shorter than the first, so that one launch encodes all shards. Gradients are
divided by the number of ranks before the sum, as in upstream.

Not covered: ``reduce_scatter: false`` and qgZ, which the check of the config refuses or announces.
Where upstream calls the seam even then (parameters larger than a bucket; qgZ on one node),
gradients stay native and are counted, and so are the buckets of ``reduce_scatter: false``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import (
    NAME,
    AllReduce,
    Channel,
    Channels,
    ReduceScatter,
    channels_of,
    native_nbytes,
)
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import ReduceScatterHandle, Shards
from hybridcomp.patches.common.scope import Scope
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.patches.ds.zero import node_sums
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam

MODULE = "deepspeed.runtime.zero.stage3"

REDUCE_SCATTER = Seam(REQUIREMENT, MODULE, "reduce_scatter_coalesced", ("tensors", "group"))
AVG_SCATTER = Seam(
    REQUIREMENT,
    MODULE,
    "DeepSpeedZeroOptimizer_Stage3._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
    ("self", "params_to_reduce", "communication_data_type"),
)

#: method of the optimizer that all-reduces whole buckets (``reduce_scatter: false``)
WHOLE = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads"


class _Reducing(NamedTuple):
    """The reduction under way.

    Attributes:
        crosses: whether it is the parameters' last one before the optimizer step.
        native: whether the job was told that gradients stay native.
    """

    channel: Channel
    params: Sequence[Any]
    crosses: bool
    native: bool


_REDUCING: Scope[_Reducing | None] = Scope("stage3", None)


@around
def make_avg_scatter_grads(
    original: Callable[..., list[Tensor]],
    self: Any,
    params_to_reduce: list[Any],
    communication_data_type: torch.dtype,
) -> list[Tensor]:
    """Publish the channel, and the parameters whose gradients are reduced next."""
    channels = channels_of(self)
    reducing = None
    if channels is not None:
        native = _in_whole_buckets(self) or self.all2all_process_group is not None
        crosses = node_sums.crosses(self)
        reducing = _Reducing(channels["dp"], params_to_reduce, crosses, native)
    with _REDUCING.inside(reducing):
        return original(self, params_to_reduce, communication_data_type)


@around
def make_reduce_scatter_coalesced(
    original: Callable[..., list[Tensor]], tensors: list[Tensor], group: Any = None
) -> list[Tensor]:
    """Reduce-scatter gradients encoded; call upstream if there is no codec."""
    reducing = _REDUCING.get()
    if reducing is None:
        return original(tensors, group)
    channel = reducing.channel
    message = _Gradients(
        numel=sum(tensor.numel() for tensor in tensors),
        dtype=tensors[0].dtype,
        group=group,
        tensors=tensors,
        params=reducing.params,
        in_fp32=channel.error_feedback,
        crosses=reducing.crosses,
    )
    if reducing.native:
        return channel.run_native(message, lambda: original(tensors, group))
    return channel.run(message, native=lambda: original(tensors, group), encoded=message.finish)


@dataclass(eq=False, kw_only=True)
class _Gradients(ReduceScatter):
    """Average this rank's part of every gradient, in the gradients' dtype.

    1 lay out the parts by destination: rank r gets ``[r * chunk, (r + 1) * chunk)`` of each
    2 average: divide before the sum, as upstream does
    3 cut the sum of this rank's parts into one tensor per parameter
    """

    tensors: Sequence[Tensor]
    params: Sequence[Any]
    in_fp32: bool

    def native_nbytes(self, size: int) -> int:
        """Return the bytes that upstream sends, padding included."""
        padded = sum(_chunk(tensor.numel(), size) * size for tensor in self.tensors)
        return native_nbytes.reduce_scatter_nbytes(padded, self.dtype, size)

    @torch.no_grad()
    def load(self, codec: Codec) -> Sequence[Tensor]:
        """Lay out and divide the gradients."""
        layout, parts = self._layout, []
        # 1
        flats = [tensor.reshape(-1) for tensor in self.tensors]
        if self.shape and layout.is_even and flats[0].device.type == "cpu" and not self.in_fp32:
            return Shards(self._by_node(flats), layout.each, self.shape)
        for low, high, lengths, gap in layout.runs:
            starts = [low * chunk for chunk in layout.chunks]
            rows = zip(flats, starts, lengths, strict=True)
            table = [flat[at : at + (high - low) * n].view(-1, n) for flat, at, n in rows if n]
            zeros = [flats[0].new_zeros(high - low, gap)] if gap else []
            parts.append(torch.cat([*table, *zeros], dim=1).view(-1))
        # 2
        work = torch.float32 if self.in_fp32 else self.dtype
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        return Shards(flat.to(work).div_(layout.ranks), layout.each)

    def _by_node(self, flats: Sequence[Tensor]) -> Tensor:
        """Lay out and divide gradients in the order of ``shape``, in one pass over memory."""
        nodes, width = self.shape
        out, at = flats[0].new_empty(width, nodes, self._layout.each), 0
        for flat, n in zip(flats, self._layout.chunks, strict=True):
            part = flat.view(nodes, width, n).transpose(0, 1)
            torch.div(part, self._layout.ranks, out=out[:, :, at : at + n])
            at += n
        return out.view(-1)

    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """Return the parameters' parts in each destination's shard."""
        return _pieces(tuple(getattr(param, NAME) for param in self.params), self._layout)

    @functools.cached_property
    def _layout(self) -> _Layout:
        numels = tuple(tensor.numel() for tensor in self.tensors)
        return _layout(numels, dist.get_world_size(self.group))

    @torch.no_grad()
    def finish(self, handle: ReduceScatterHandle) -> list[Tensor]:
        """Complete the sum and return this rank's part of each gradient."""
        # 3
        numels = list(self._layout.lengths(dist.get_rank(self.group)))
        return list(torch.split(handle.wait().to(self.dtype)[: sum(numels)], numels))


@dataclass(frozen=True, eq=False)
class _Layout:
    """Layout, by destination, of gradients with these elements; one object for equal gradients.

    Attributes:
        chunks: elements of each gradient's parts; parts of the last destinations may be shorter or
            empty.
        runs: destinations ``[low, high)`` with equal part lengths, these lengths, and the number of
            zeros that follow.
        each: elements of a shard, zeros included; the last one may be shorter.
    """

    numels: tuple[int, ...]
    ranks: int
    chunks: tuple[int, ...]
    runs: tuple[tuple[int, int, tuple[int, ...], int], ...]
    each: int

    @property
    def is_even(self) -> bool:
        """Return whether all shards have equal parts of each gradient, and no zeros."""
        return len(self.runs) == 1 and sum(self.runs[0][2]) == self.each and not self.runs[0][3]

    def lengths(self, destination: int) -> tuple[int, ...]:
        """Return the elements of each gradient's part for ``destination``."""
        both = zip(self.numels, self.chunks, strict=True)
        return tuple(max(0, min(chunk, n - destination * chunk)) for n, chunk in both)


@functools.lru_cache(maxsize=4096)
def _layout(numels: tuple[int, ...], ranks: int) -> _Layout:
    """Lay out gradients, at least one of them non-empty, by runs of destinations of equal sizes."""
    chunks = tuple(_chunk(numel, ranks) for numel in numels)
    plain = _Layout(numels, ranks, chunks, (), sum(chunks))
    edges = {0, ranks}
    for numel, chunk in zip(numels, chunks, strict=True):
        whole = numel // chunk if chunk else 0
        edges |= {min(whole, ranks), min(whole + 1, ranks)}
    runs = [(low, high, plain.lengths(low)) for low, high in pairwise(sorted(edges))]
    short = sum(high - low for low, high, lengths in runs if sum(lengths) < plain.each)
    pads = short > 1 or not any(runs[-1][2])
    gaps = [(plain.each - sum(lengths)) * pads for _, _, lengths in runs]
    return replace(plain, runs=tuple((*run, gap) for run, gap in zip(runs, gaps, strict=True)))


@functools.lru_cache(maxsize=4096)
def _pieces(names: tuple[str, ...], layout: _Layout) -> tuple[tuple[Piece, ...], ...]:
    """Return the parts of parameters ``names`` by destination; the same tuple on every call."""
    found = []
    starts = list(zip(names, layout.chunks, strict=True))
    for low, high, lengths, gap in layout.runs:
        parts = list(zip(starts, lengths, strict=True))
        zeros = (Piece("", 0, gap),) if gap else ()
        found += [
            (*(Piece(name, to * chunk, n) for (name, chunk), n in parts), *zeros)
            for to in range(low, high)
        ]
    return tuple(found)


def _chunk(numel: int, world_size: int) -> int:
    return -(-numel // world_size)


def _in_whole_buckets(optimizer: Any) -> bool:
    return bool(optimizer.contiguous_gradients) and not optimizer.reduce_scatter


def attached(engine: Any, channels: Channels) -> None:
    """Count the buckets that an optimizer all-reduces natively, because the settings ask for it."""
    optimizer = engine.optimizer
    if not hasattr(optimizer, WHOLE) or not _in_whole_buckets(optimizer):
        return
    original, channel = getattr(type(optimizer), WHOLE), channels["dp"]
    here = weakref.proxy(optimizer)

    def counted(buffer: Tensor, dtype: torch.dtype) -> list[Tensor]:
        group = here.ipg_buckets[dtype].process_group
        message = AllReduce(numel=buffer.numel(), dtype=dtype, group=group)
        found: list[Tensor] = channel.run_native(message, lambda: original(here, buffer, dtype))
        return found

    setattr(optimizer, WHOLE, counted)


COVERS = ("dp",)
ATTACHED = attached
PATCHES = (
    (REDUCE_SCATTER, make_reduce_scatter_coalesced),
    (AVG_SCATTER, make_avg_scatter_grads),
)
