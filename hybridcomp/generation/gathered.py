"""Gather all weights of a model whose ranks hold shares of them, in few large messages.

Weights are gathered in buckets of one dtype and one process group, by the codec of the block's
``gathered``: steps from the last gather (``channels/kept_slices``), whole and encoded, or natively.
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
from hybridcomp.channels.channel import Channel
from hybridcomp.channels.kept_slices import KeptRows, KeptSlice
from hybridcomp.channels.node_copies import CopyGroups, width_of
from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.expcode import ExpCode
from hybridcomp.codecs.stepcode import STEP_DTYPES
from hybridcomp.collectives import Group, Meter, Transfer, native_nbytes
from hybridcomp.collectives.topology import discover, ranks_of
from hybridcomp.collectives.wire import transfer, transport
from hybridcomp.config import BLOCK
from hybridcomp.config.error_messages import Shown
from hybridcomp.config.gathered import GatheredConfig
from hybridcomp.config.memory import size
from hybridcomp.errors import ConfigError
from hybridcomp.log import say_once

KEY = f"{BLOCK}.gathered"
#: elements of the weights of one message, all ranks' shares
BUCKET_NUMEL = 1 << 26
#: what a message takes beside the weights, in times of its bytes: all shares before they are put
#: into place, and the slice and the column of a node's copy, or a payload
BUFFERS = 3
_MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True, eq=False)
class CutWeight:
    """A weight of which each rank of a group holds a share.

    Attributes:
        name: its dotted name.
        shape, dtype: of the whole weight, as the model computes with it.
        numel: elements of a share, padding included; the same on all ranks.
        group: the ranks that hold shares, in their order; None: all.
        read: returns this rank's values now, in any shape, dtype and place, without padding.
        dim: the dimension that is cut. Only dimension 0 may leave the last ranks less.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    numel: int
    group: dist.ProcessGroup | None
    read: Callable[[], Tensor]
    dim: int = 0

    def share(self, device: torch.device) -> Tensor:
        """Return this rank's share as it is sent, (numel,), with zeros as padding."""
        out = torch.zeros(self.numel, dtype=self.dtype, device=device)
        values = self.read().detach().reshape(-1)
        out[: len(values)].copy_(values)
        return out

    def whole_of(self, rows: Tensor) -> Tensor:
        """Return a new tensor of the whole weight. ``rows`` (W, numel): all shares."""
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
    """Weights that are gathered by one message, and what is kept of them."""

    weights: list[CutWeight] = field(default_factory=list)
    kept: KeptSlice | KeptRows | None = None

    @property
    def numel(self) -> int:
        """Return the elements of a rank's share."""
        return sum(weight.numel for weight in self.weights)

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.weights[0].group

    @property
    def dtype(self) -> torch.dtype:
        return self.weights[0].dtype

    @property
    def nbytes(self) -> int:
        """Return the bytes of all shares."""
        return self.numel * dist.get_world_size(self.group) * self.dtype.itemsize


class WeightGather:
    """Gathers all weights of a model; keeps from one call to the next what steps are taken from.

    Making one is a collective of the job where the block asks for a codec.
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
            weights: all of them, in one order on all ranks.
            device: where they are gathered.
            channel: of parameter gathers; None without a block.
            settings: None: natively.
            whole_job: whether all ranks of the job make one, and not those of an island alone.
        """
        self.weights, self.device = list(weights), device
        self.settings = settings if channel is not None else None
        self.channel = channel
        codec = None if self.settings is None else self.settings.codec_of()
        self._codec: Codec | None = codec
        asks = codec is not None and channel is not None and whole_job
        self._nodes = _nodes_of(channel) if asks and channel is not None else None
        self._buckets = list(_buckets(self.weights, codec is not None and not codec.lossless))

    def matches(self, weights: Sequence[CutWeight]) -> bool:
        """Return whether ``weights`` are those of this gather, by name, shape, dtype and group."""
        return [_facts(one) for one in weights] == [_facts(one) for one in self.weights]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all whole weights."""
        return sum(math.prod(one.shape) * one.dtype.itemsize for one in self.weights)

    @property
    def kept_nbytes(self) -> int:
        """Return the bytes that this rank keeps between two gathers, once there was one."""
        found = 0
        for bucket in self._buckets:
            if self._steps(bucket):
                ranks = dist.get_world_size(bucket.group)
                found += bucket.nbytes // (ranks // self._shares(bucket))
        return found

    def check(self, free: int) -> None:
        """Raise ConfigError where this rank has no memory for the weights.

        ``free``: bytes that are free on the device now.
        """
        asked = None if self.settings is None else self.settings.limit_gb
        buffers = max((BUFFERS * bucket.nbytes for bucket in self._buckets), default=0)
        needed, kept = self.nbytes + buffers, self._unkept_nbytes()
        limit = free if asked is None else min(free, int(asked * 1e9))
        if needed + kept <= limit:
            return
        parts = f"{size(self.nbytes)} of weights, {size(buffers)} of buffers"
        parts += f" and {size(kept)} kept for the next gather" if kept else ""
        which = "free" if limit == free else f"allowed by {KEY}.limit_gb"
        todo = (
            f"a roll-out with all weights on every rank needs {parts}, and {size(limit)} are "
            f"{which}; sample from an engine that hybridcomp.publish feeds"
        )
        raise ConfigError(KEY, Shown(f"{size(needed + kept)} needed"), todo)

    def _unkept_nbytes(self) -> int:
        """Return the bytes on the device that the next gather keeps beside those kept already."""
        if self.settings is None or self.settings.keep == "host":
            return 0
        return 0 if any(bucket.kept is not None for bucket in self._buckets) else self.kept_nbytes

    @torch.no_grad()
    def gather(self) -> list[Tensor]:
        """Return all whole weights on the device, in their order; a collective of their groups."""
        found: dict[int, Tensor] = {}
        for bucket in self._buckets:
            own = torch.cat([weight.share(self.device) for weight in bucket.weights])
            parts = torch.split(self._rows(bucket, own), [one.numel for one in bucket.weights], 1)
            for weight, part in zip(bucket.weights, parts, strict=True):
                found[id(weight)] = weight.whole_of(part)
        if kept := self.kept_nbytes:
            assert self.settings is not None, "steps"
            say_once(
                f"gathered: {size(self.nbytes)} of weights on every rank; each keeps {size(kept)} "
                f"on the {self.settings.keep} to send only what changes until the next gather"
            )
        return [found[id(weight)] for weight in self.weights]

    def forget(self) -> None:
        """Free what is kept: the next gather sends all weights whole. All ranks call it."""
        for bucket in self._buckets:
            bucket.kept = None

    def _rows(self, bucket: _Bucket, own: Tensor) -> Tensor:
        """Return all ranks' shares of a bucket, (W, n)."""
        channel, codec = self.channel, self._codec
        small = channel is not None and bucket.nbytes < channel.state.config.min_bytes
        if channel is None or codec is None or small or dist.get_world_size(bucket.group) == 1:
            return self._native(bucket, own)
        if not codec.lossless and len(bucket.weights[0].shape) < 2:
            codec = ExpCode()  # norms and biases: few bytes, and errors in them cost the most
        if codec.references and own.dtype not in STEP_DTYPES:
            codec = ExpCode()
            kind = str(own.dtype).removeprefix("torch.")
            say_once(f"gathered: weights of {kind} have no 16 bits; they are sent whole by expcode")
        if not codec.takes(own.dtype):
            return self._native(bucket, own)
        if not codec.references:
            return self._whole(bucket, own, channel, codec)
        if isinstance(bucket.kept, KeptRows):
            return bucket.kept.gather(own)
        on_host = self.settings is not None and self.settings.keep == "host"
        if bucket.kept is None and (nodes := self._over_nodes(bucket)) is None:
            bucket.kept = KeptRows(channel, bucket.group, on_host)
            return bucket.kept.gather(own)
        if bucket.kept is None:
            assert nodes is not None
            bucket.kept = KeptSlice(channel, nodes, on_host)
        return bucket.kept.gather(own, (own.numel(), own.dtype))

    def _whole(self, bucket: _Bucket, own: Tensor, channel: Channel, codec: Codec) -> Tensor:
        """Gather encoded, between nodes alone where the group has several of several ranks."""
        nodes, group = self._over_nodes(bucket), channel.group(bucket.group)
        if nodes is not None:
            group = nodes.nodes.group(None, two_levels=True)
        meter = channel.meter(own.device)
        out = own.new_empty(group.size, own.numel())
        cuts = list(accumulate(weight.numel for weight in bucket.weights))[:-1]
        via = Transfer(codec, group, meter, () if codec.lossless else cuts)
        collectives.all_gather(own, out.view(-1), via).wait()
        raw = native_nbytes.all_gather_nbytes(own.numel(), own.dtype, group.size)
        channel.record(meter, raw, "forward", group.ring)
        return out

    def _native(self, bucket: _Bucket, own: Tensor) -> Tensor:
        group, meter = Group.of(bucket.group), Meter(where="gathered weights")
        out = own.new_empty(group.size, own.numel())
        transfer(lambda: transport.all_gather(out.view(-1), own, group, meter), meter)
        if self.channel is not None:
            self.channel.count_native(meter.wire_nbytes)
        return out

    def _over_nodes(self, bucket: _Bucket) -> CopyGroups | None:
        """Return the grid of nodes that a bucket's shares lie on; None: they cover no such grid."""
        nodes = self._nodes
        return nodes if nodes and len(ranks_of(bucket.group)) == nodes.size else None

    def _steps(self, bucket: _Bucket) -> bool:
        """Return whether a bucket is sent as steps."""
        codec, channel = self._codec, self.channel
        if codec is None or channel is None or not codec.references:
            return False
        least = channel.state.config.min_bytes
        many = dist.get_world_size(bucket.group) > 1
        return many and bucket.dtype in STEP_DTYPES and bucket.nbytes >= least

    def _shares(self, bucket: _Bucket) -> int:
        """Return how many ranks' shares of a bucket this rank keeps."""
        nodes = self._over_nodes(bucket)
        return dist.get_world_size(bucket.group) if nodes is None else nodes.levels.nodes


def _nodes_of(channel: Channel) -> CopyGroups | None:
    """Return the job's ranks by node; None where nodes are not alike, or have one rank."""
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
    """Return the bytes that are free on ``device``; of a host, this rank's part of them."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    lines = _MEMORY.read_text(encoding="ascii").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(kilobytes) * 1024 // here
