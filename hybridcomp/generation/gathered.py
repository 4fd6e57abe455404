"""Gather all weights of a sharded model in few large messages.

Weights are gathered in buckets of one dtype and one process group. The codec of the block's
``gathered`` decides what a message contains: encoded deltas from the last gather
(``channels/messages/kept_slices``), encoded weights, or native weights.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp import collectives
from hybridcomp.channels.accounting.memory import size
from hybridcomp.channels.channel import Channel
from hybridcomp.channels.messages.kept_slices import KeptRows, KeptSlice
from hybridcomp.channels.messages.node_copies import CopyGroups, width_of
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.expcode import ExpCode
from hybridcomp.codecs.stepcode import STEP_DTYPES
from hybridcomp.collectives import Group, Meter, Transfer, native_nbytes
from hybridcomp.collectives.topology import discover
from hybridcomp.collectives.wire import transport
from hybridcomp.collectives.wire.steps import transfer
from hybridcomp.config import BLOCK
from hybridcomp.config.error_messages import Shown
from hybridcomp.config.gathered import GatheredConfig
from hybridcomp.errors import ConfigError
from hybridcomp.log import say_once

KEY = f"{BLOCK}.gathered"
#: elements of a bucket, over all ranks' shares
BUCKET_NUMEL = 1 << 26
#: temporary memory of a bucket's gather, as a multiple of the bucket's bytes: for all shares before
#: they are copied into whole weights, for payloads, and for the slice of a node's copy
BUFFERS = 3
_MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True, eq=False)
class CutWeight:
    """A weight that is sharded over the ranks of a group.

    Attributes:
        name: dotted name of the weight.
        shape, dtype: shape and dtype of the whole weight, with which the model computes.
        numel: elements of a share, padding included; the same on all ranks.
        group: the ranks that hold the shares, in order of the shares; None: all ranks.
        read: returns this rank's current values, in any shape, dtype and device, without padding.
        dim: the sharded dimension. Shares of unequal size are allowed only along dimension 0, where
            the last ranks may have less.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    numel: int
    group: dist.ProcessGroup | None
    read: Callable[[], Tensor]
    dim: int = 0

    def share(self, device: torch.device) -> Tensor:
        """Return this rank's share in the form in which it is sent: (numel,), zero-padded."""
        out = torch.zeros(self.numel, dtype=self.dtype, device=device)
        values = self.read().detach().reshape(-1)
        out[: len(values)].copy_(values)
        return out

    def whole_of(self, rows: Tensor) -> Tensor:
        """Return the whole weight as a new tensor. ``rows`` (W, numel): all shares."""
        if self.dim:
            local = list(self.shape)
            local[self.dim] //= len(rows)
            return torch.cat([row[: math.prod(local)].view(local) for row in rows], self.dim)
        whole = rows.new_empty(self.shape)
        flat = whole.view(-1)
        full = min(len(rows), len(flat) // self.numel) if self.numel else 0
        start = full * self.numel
        flat[:start].view(full, -1 if full else 0).copy_(rows[:full])
        if start < len(flat):
            flat[start:].copy_(rows[full, : len(flat) - start])
        return whole


@dataclass(eq=False)
class _Bucket:
    """Weights of one dtype and group that are gathered by one message.

    Attributes:
        codec: codec of the message; None: native.
        kept: shares of the last gather, if deltas are sent.
    """

    weights: list[CutWeight] = field(default_factory=list)
    codec: Codec | None = None
    kept: KeptSlice | KeptRows | None = None

    @property
    def numel(self) -> int:
        return sum(weight.numel for weight in self.weights)

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.weights[0].group

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def dtype(self) -> torch.dtype:
        return self.weights[0].dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.size * self.dtype.itemsize


class WeightGather:
    """Gathers all weights of a model; keeps the previous weights between calls if it sends deltas.

    The constructor is a collective of the job if the block has a codec for ``gathered``.
    """

    def __init__(
        self,
        weights: Sequence[CutWeight],
        device: torch.device,
        channel: Channel | None,
        settings: GatheredConfig | None,
        whole_job: bool = True,
    ) -> None:
        """Cut the weights into messages.

        Args:
            weights: all weights, in one order on all ranks.
            device: device to gather on.
            channel: channel of parameter gathers; None without a block.
            settings: the block's ``gathered``; None: gather natively.
            whole_job: whether all ranks of the job call this, or only the ranks of an island.
        """
        self.weights, self.device, self.channel = list(weights), device, channel
        self._settings = settings or GatheredConfig(codec="none")
        codec = None if channel is None else self._settings.codec_of()
        self._nodes = None if codec is None or not whole_job else _nodes_of(channel)
        self._buckets = list(_buckets(self.weights, codec is not None and not codec.lossless))
        for bucket in self._buckets:
            bucket.codec = _codec_for(bucket, codec, channel)

    def matches(self, weights: Sequence[CutWeight]) -> bool:
        """Return whether ``weights`` have the names, shapes, dtypes and groups of this gather."""
        return [_facts(weight) for weight in weights] == [_facts(weight) for weight in self.weights]

    @property
    def nbytes(self) -> int:
        return sum(math.prod(weight.shape) * weight.dtype.itemsize for weight in self.weights)

    @property
    def kept_nbytes(self) -> int:
        """Return the bytes that this rank keeps from one gather to the next, for deltas."""
        steps = [
            bucket
            for bucket in self._buckets
            if bucket.codec is not None and bucket.codec.references
        ]
        widths = [1 if (n := self._over_nodes(step)) is None else n.levels.width for step in steps]
        return sum(kept.nbytes // width for kept, width in zip(steps, widths, strict=True))

    def check(self, free: int) -> None:
        """Raise ConfigError if this rank lacks memory for the weights.

        ``free``: free bytes on the device now.
        """
        asked = self._settings.limit_gb
        buffers = max((BUFFERS * bucket.nbytes for bucket in self._buckets), default=0)
        is_new = not any(bucket.kept for bucket in self._buckets)
        kept = self.kept_nbytes if is_new and self._settings.keep == "device" else 0
        needed = self.nbytes + buffers + kept
        limit = free if asked is None else min(free, int(asked * 1e9))
        if needed <= limit:
            return
        which = "free" if limit == free else f"allowed by {KEY}.limit_gb"
        todo = (
            f"a roll-out with all weights on every rank needs {size(self.nbytes)} of weights, "
            f"{size(buffers)} of buffers and {size(kept)} kept for the next gather, and "
            f"{size(limit)} are {which}; sample from an engine that hybridcomp.publish feeds"
        )
        raise ConfigError(KEY, Shown(f"{size(needed)} needed"), todo)

    @torch.no_grad()
    def gather(self) -> list[Tensor]:
        """Return all whole weights, in order, on the device; a collective of all their groups."""
        wholes: dict[int, Tensor] = {}
        for bucket in self._buckets:
            own = torch.cat([weight.share(self.device) for weight in bucket.weights])
            parts = torch.split(self._rows(bucket, own), [cut.numel for cut in bucket.weights], 1)
            for weight, part in zip(bucket.weights, parts, strict=True):
                wholes[id(weight)] = weight.whole_of(part)
        if kept := self.kept_nbytes:
            say_once(
                f"gathered: {size(self.nbytes)} of weights on every rank; each keeps {size(kept)} "
                f"on the {self._settings.keep} to send only what changes until the next gather"
            )
        return [wholes[id(weight)] for weight in self.weights]

    def forget(self) -> None:
        """Free the kept shares: the next gather sends all weights whole. All ranks call it."""
        for bucket in self._buckets:
            bucket.kept = None

    def _rows(self, bucket: _Bucket, own: Tensor) -> Tensor:
        """Return all ranks' shares of a bucket, (W, n)."""
        channel, codec, nodes = self.channel, bucket.codec, self._over_nodes(bucket)
        if channel is None or codec is None:
            return self._native(bucket, own)
        if not codec.references:
            return _whole(bucket, own, channel, codec, nodes)
        if bucket.kept is None:
            on_host = self._settings.keep == "host"
            bucket.kept = (
                KeptRows(channel, bucket.group, on_host) if nodes is None
                else KeptSlice(channel, nodes, on_host)
            )  # fmt: skip
        if isinstance(bucket.kept, KeptRows):
            return bucket.kept.gather(own)
        return bucket.kept.gather(lambda: own, (own.numel(), own.dtype), own.device)

    def _native(self, bucket: _Bucket, own: Tensor) -> Tensor:
        group, meter = Group.of(bucket.group), Meter(where="gathered weights")
        out = own.new_empty(group.size, own.numel())
        transfer(lambda: transport.all_gather(out.view(-1), own, group, meter), meter)
        if self.channel is not None:
            self.channel.count_native(meter.wire_nbytes)
        return out

    def _over_nodes(self, bucket: _Bucket) -> CopyGroups | None:
        """Return the node groups for a bucket of the whole job; None if nodes are not used."""
        return self._nodes if self._nodes and bucket.size == self._nodes.size else None


def _codec_for(bucket: _Bucket, codec: Codec | None, channel: Channel | None) -> Codec | None:
    """Return the codec of a bucket's message: ``codec`` or its substitute; None: native."""
    if codec is None or channel is None or bucket.size == 1:
        return None
    if bucket.nbytes < channel.state.config.min_bytes:
        return None
    if codec.references and bucket.dtype not in STEP_DTYPES:
        kind = str(bucket.dtype).removeprefix("torch.")
        say_once(f"gathered: weights of {kind} have no 16 bits; they are sent whole by expcode")
        codec = ExpCode()
    if not codec.lossless and len(bucket.weights[0].shape) < 2:
        codec = ExpCode()  # norms and biases: few bytes, and errors in them do the most harm
    return codec if codec.takes(bucket.dtype) else None


def _whole(
    bucket: _Bucket, own: Tensor, channel: Channel, codec: Codec, nodes: CopyGroups | None
) -> Tensor:
    """Gather with the codec; with ``nodes``, encode only what is sent between nodes."""
    group, meter = channel.group(bucket.group), channel.meter(own.device)
    if nodes is not None:
        group = nodes.nodes.group(None, two_levels=True)
    out = own.new_empty(group.size, own.numel())
    cuts = list(accumulate(weight.numel for weight in bucket.weights))[:-1]
    via = Transfer(codec, group, meter, () if codec.lossless else cuts)
    collectives.all_gather(own, out.view(-1), via).wait()
    raw = native_nbytes.all_gather_nbytes(own.numel(), own.dtype, group.size)
    channel.record(meter, raw, "forward", group.ring)
    return out


def _nodes_of(channel: Channel | None) -> CopyGroups | None:
    """Return the job's ranks by node; None if nodes differ in size, or have one rank."""
    assert channel is not None, "a codec of a block"
    config = channel.state.config
    nodes = discover("auto" if config.hierarchy == "none" else config.widths)
    try:
        width = width_of(nodes)
    except ConfigError:  # then each rank keeps all shares
        return None
    return CopyGroups.of(width, nodes.source)


def _facts(weight: CutWeight) -> tuple[object, ...]:
    return weight.name, weight.shape, weight.dtype, weight.numel, weight.dim, id(weight.group)


def _buckets(weights: Iterable[CutWeight], splits: bool) -> Iterator[_Bucket]:
    """Yield buckets of one dtype and group, each in the order of the model.

    ``splits``: whether vectors and scalars have buckets of their own.
    """
    open_: dict[tuple[torch.dtype, int, bool], _Bucket] = {}
    for weight in weights:
        key = weight.dtype, id(weight.group), splits and len(weight.shape) < 2
        ranks = dist.get_world_size(weight.group)
        bucket = open_.setdefault(key, _Bucket())
        if bucket.weights and (bucket.numel + weight.numel) * ranks > BUCKET_NUMEL:
            yield bucket
            bucket = open_[key] = _Bucket()
        bucket.weights.append(weight)
    yield from open_.values()


def free_nbytes(device: torch.device) -> int:
    """Return the free bytes on ``device``; for a CPU, divided by the ranks of the host."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())
    lines = _MEMORY.read_text(encoding="ascii").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kilobytes) * 1024 // here
