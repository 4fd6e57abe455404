"""Secondary copies of ZeRO 3 (hpZ) that only get what an optimizer step changed in them.

DeepSpeed keeps a copy of all parameters on every node with ``zero_hpz_partition_size``, drops it
after each step and gathers parameters over all ranks again. Here the copy stays, and what the step
changed in it is sent once to each node (``channels/messages/node_copies.py``); upstream's own path
then gathers inside the node, natively.

Seams:

* ``invalidate_secondary_tensor`` of the stage-3 optimizer, after each step and each load: the
  tensors that upstream drops are kept, as the references of the next steps.
* ``_partition_param_sec`` of ``Init``, where a gathered parameter is released: upstream makes the
  copy there. Changes by ``GatheredParameters`` are written into the kept copy.
* ``parameter_gathers`` calls ``lent`` around each fetch.

Copies are renewed in buckets, in the order of the model, when the first parameter of a bucket is
fetched: payloads of single layers would mostly be headers. With 8 bits a copy consists of blockint
payloads, one for each shard. Upstream gets the decoded slice for the time of a fetch and makes no
copy. Vectors (norms, biases) and parameters below ``min_bytes`` stay exact even with 8 bits.
Upstream gathers persistent parameters after each step; they have no copy.

Copies are freed with their parameters, and checkpoints do not hold them: after a load the first
gather sends parameters whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybridcomp.channels import Channel, Channels
from hybridcomp.channels.messages.delta_references import is_exact
from hybridcomp.channels.messages.node_copies import KEY, CopyGroups, renew, state_of, width_of
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives.topology import discover
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.job.together import ending, together
from hybridcomp.log import say
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.patches.ds.zero.partitions import filled
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam

INVALIDATE = Seam(
    REQUIREMENT,
    "deepspeed.runtime.zero.stage3",
    "DeepSpeedZeroOptimizer_Stage3.invalidate_secondary_tensor",
    ("self",),
)
RELEASE = Seam(
    REQUIREMENT,
    "deepspeed.runtime.zero.partition_parameters",
    "Init._partition_param_sec",
    ("self", "param", "buffer", "has_been_updated"),
)
SIZE = "zero_hpz_partition_size"
#: the operation, for messages
WHAT = "zero: renewing the secondary copies"
#: attribute of a parameter: its ``NodeCopy``
ATTRIBUTE = "_hybridcomp_secondary"
#: elements of the parameters in one bucket, over all ranks' shards
BUCKET_NUMEL = 1 << 26


@dataclass(eq=False)
class NodeCopy:
    """Hold this rank's slice of its node's copy of one parameter.

    Attributes:
        param: DeepSpeed's parameter.
        copies: all copies of the engine.
        codec: encodes the copy; None: the copy is exact, in DeepSpeed's ``ds_secondary_tensor``.
        held: the slice if it is encoded, or an exact one that upstream has dropped; else None.
        fresh: whether an encoded slice has the parameter's present values.
        bucket: the copies that are renewed together with this one.
    """

    param: Any
    copies: SecondaryCopies
    codec: Codec | None
    held: Tensor | None = None
    fresh: bool = False
    bucket: Bucket = field(init=False)

    @property
    def numel(self) -> int:
        """Return the elements of one rank's shard of the parameter, padding included."""
        return int(self.param.ds_tensor.ds_numel)

    @property
    def is_stale(self) -> bool:
        """Return whether neither this copy nor upstream's has the parameter's present values."""
        return self.param.ds_secondary_tensor is None and not self.fresh

    def own(self) -> Tensor:
        """Return this rank's shard as it is sent, with zeros after the parameter's end."""
        values: Tensor = self.param.ds_tensor.data.view(-1).to(self.copies.device)
        values = _filled_up(values[: filled(self.param)], self.numel)
        if self.codec is None:
            return values
        self.copies.channel.sample(values, self.codec, "forward")
        return self._encoded(values)

    def put(self, rows: Tensor) -> None:
        """Store the new slice ``rows``, which has a row for each shard."""
        if self.codec is not None:
            self.held, self.fresh = rows.reshape(-1), True
            return
        held, self.held = self.held, None
        if held is None:
            own = self.param.ds_tensor
            held = _as_upstream(own, own.new_empty(rows.numel(), pin_memory=own.is_pinned()))
        held.view(rows.shape).copy_(rows)
        self.param.ds_secondary_tensor = held

    def keep(self) -> None:
        """Keep the tensor that upstream is about to drop, as the reference of the next step."""
        tensor, self.fresh = self.param.ds_secondary_tensor, False
        if self.codec is None and tensor is not None:
            self.held = tensor
        elif self.codec is not None and self.copies.stays_native:
            self.held = None

    def lend(self) -> bool:
        """Give upstream the decoded slice; return whether it needed and got one."""
        if self.codec is None or not self.fresh or self.param.ds_secondary_tensor is not None:
            return False
        assert self.held is not None, "fresh"
        count, own = len(self.copies.groups.shares), self.param.ds_tensor
        out = torch.empty(count * self.numel, dtype=own.dtype, device=self.copies.device)
        for payload, values in zip(self.held.view(count, -1), out.view(count, -1), strict=True):
            self.codec.decode(payload, values)
        self.param.ds_secondary_tensor = _as_upstream(own, out)
        return True

    def encode(self, values: Tensor, begin: int) -> None:
        """Encode this rank's slice, cut from ``values``: the parameter (1-D) from ``begin`` on."""
        shares, numel = self.copies.groups.shares, self.numel
        parts = [values[share * numel - begin : (share + 1) * numel - begin] for share in shares]
        self.held = torch.cat([self._encoded(_filled_up(part, numel)) for part in parts])
        self.fresh = True

    def _encoded(self, values: Tensor) -> Tensor:
        assert self.codec is not None, "an encoded copy"
        nbytes = self.codec.wire_nbytes(values.numel(), values.dtype)
        out = torch.zeros(nbytes, dtype=torch.uint8, device=values.device)
        self.codec.encode(values, out)
        return out


@dataclass(eq=False)
class Bucket:
    """Copies of one kind that are renewed together.

    ``generation``: the channels' at the last renewal; ``resync`` outdates it.
    """

    copies: list[NodeCopy]
    generation: int

    def forget(self, copies: Iterable[NodeCopy]) -> None:
        """Make the next gather send the parameters of ``copies`` whole."""
        self.generation = -1
        for copy in copies:
            copy.keep()
            copy.param.ds_secondary_tensor = None


class SecondaryCopies:
    """The secondary copies of one engine's parameters."""

    def __init__(self, channel: Channel, groups: CopyGroups, device: torch.device) -> None:
        self.channel, self.groups, self.device = channel, groups, device
        self.buckets: list[Bucket] = []

    @torch.no_grad()
    def follow(self, params: Iterable[Any], codec: Codec | None) -> None:
        """Keep copies of ``params``; ``codec``, if given, encodes those of matrices."""
        least = self.channel.state.config.min_bytes
        alike: dict[tuple[torch.dtype, bool], list[NodeCopy]] = {}
        for param in sorted(params, key=lambda p: p.ds_id):
            dtype = param.ds_tensor.dtype
            encodes = len(param.ds_shape) > 1 and param.ds_numel * dtype.itemsize >= least
            copy = NodeCopy(param, self, codec if encodes else None)
            setattr(param, ATTRIBUTE, copy)
            alike.setdefault((dtype, copy.codec is None), []).append(copy)
        for copies in alike.values():
            self.buckets += self._cut(copies)
        if self.channel.state.config.insists("zero"):
            return  # ``auto`` measures first; upstream's copies serve until a step drops them
        for copy in (copy for bucket in self.buckets for copy in bucket.copies):
            made = copy.param.ds_secondary_tensor
            if copy.codec is not None and made is not None and self.acts:
                copy.encode(made.to(self.device), self.groups.shares[0] * copy.numel)
                copy.param.ds_secondary_tensor = None

    def _cut(self, copies: Iterable[NodeCopy]) -> list[Bucket]:
        found: list[Bucket] = []
        room = 0
        for copy in copies:
            if not found or room < copy.numel:
                found.append(Bucket([], self.channel.generation))
                room = BUCKET_NUMEL // self.groups.size
            room -= copy.numel
            found[-1].copies.append(copy)
            copy.bucket = found[-1]
        return found

    @property
    def acts(self) -> bool:
        """Return whether copies are renewed now: not before ``start_step``, for example."""
        channel, group = self.channel, self.groups.levels.outer.process_group
        return channel.encodes(BUCKET_NUMEL, torch.bfloat16, group)

    @property
    def stays_native(self) -> bool:
        """Return whether ``auto`` has decided against the copies, and compares no more steps."""
        state = self.channel.state
        return state.verdicts.native("zero", state.step) and not state.verdicts.may_change

    @contextmanager
    def lent(self, params: Iterable[Any], stream: Any) -> Iterator[None]:
        """Renew the copies of the parameters that upstream gathers in the body; a collective.

        Upstream gathers parameters without a copy over all ranks, and all of them on ``stream``.
        """
        from deepspeed.accelerator import get_accelerator

        wanted = sorted(params, key=lambda p: p.ds_id)
        away = [p for p in wanted if p.ds_status.name == "NOT_AVAILABLE" and hasattr(p, ATTRIBUTE)]
        copies: list[NodeCopy] = [getattr(p, ATTRIBUTE) for p in away]
        lent: list[NodeCopy] = []
        with get_accelerator().stream(stream), torch.no_grad():
            if self.acts:
                for bucket in dict.fromkeys(copy.bucket for copy in copies if copy.is_stale):
                    self._renew(bucket)
                with ending("zero: decoding the secondary copies"):  # upstream's gather follows
                    lent = [copy for copy in copies if copy.lend()]
        try:
            yield
        finally:
            for copy in lent:
                copy.param.ds_secondary_tensor = None

    def _renew(self, bucket: Bucket) -> None:
        """Renew the stale copies of a bucket on all ranks or on none.

        Shards are sent as differences if all nodes hold the same old copies, else whole. After a
        failure the copies stay stale, and the next renewal sends whole shards.
        """
        copies = [copy for copy in bucket.copies if copy.is_stale]
        held = [copy.held for copy in copies if copy.held is not None]
        known = len(held) == len(copies) and bucket.generation == self.channel.generation
        known = known and not is_exact(self.channel)
        shares: list[Tensor] = []
        table: Tensor | None = None

        def prepared() -> tuple[list[Tensor] | None, bool]:
            nonlocal table
            shares.extend(copy.own() for copy in copies)
            if not known:
                return None, False
            rows = len(self.groups.shares)  # one table, since hashing many tensors takes longer
            table = torch.cat([one.view(rows, -1).to(self.device) for one in held], 1)
            return [table.view(-1)], False

        native = sum(copy.numel for copy in copies), copies[0].param.ds_tensor.dtype
        sent = state_of(self.channel, self.groups, prepared, self.device)
        with together(WHAT, lambda: bucket.forget(copies), votes=True):
            old = table if sent == "steps" else None
            new = renew(self.channel, self.groups, torch.cat(shares), old, native)
            parts = torch.split(new, [share.numel() for share in shares], 1)
            for copy, part in zip(copies, parts, strict=True):
                copy.put(part)
        bucket.generation = self.channel.generation

    def forget(self) -> Callable[[], None]:
        """Make the next gathers send all parameters whole, frozen ones too; return the undo."""
        before = [(bucket, bucket.generation) for bucket in self.buckets]
        for bucket in self.buckets:
            bucket.forget(bucket.copies)

        def put_back() -> None:
            for bucket, generation in before:
                bucket.generation = generation

        return put_back


def _filled_up(values: Tensor, numel: int) -> Tensor:
    """Return 1-D ``values`` padded with zeros to ``numel`` elements."""
    lacks = numel - values.numel()
    return torch.cat([values, values.new_zeros(lacks)]) if lacks else values


def _as_upstream(share: Any, tensor: Any) -> Tensor:
    """Give a slice the attributes of DeepSpeed's secondary tensors, from ``ds_tensor``."""
    tensor.ds_numel, tensor.status = tensor.numel(), share.status
    tensor.final_location = None
    found: Tensor = tensor
    return found


def copies_of(params: Iterable[Any]) -> SecondaryCopies | None:
    """Return the copies of the engine that has these parameters; None if it keeps none."""
    return next((p_copy.copies for p in params if (p_copy := _of(p)) is not None), None)


def _of(param: Any) -> NodeCopy | None:
    found: NodeCopy | None = getattr(param, ATTRIBUTE, None)
    return found


@around
def make_invalidate_secondary_tensor(original: Any, self: Any) -> None:
    """Keep the copies of trained parameters, which upstream drops."""
    for param in (param for group in self.fp16_groups for param in group):
        copy = _of(param)
        if copy is not None:
            copy.keep()
    original(self)


@around
def make_partition_param_sec(
    original: Any, self: Any, param: Any, buffer: Any = None, has_been_updated: bool = False
) -> None:
    """Write a released parameter's values into the kept copy if the copy lacks them."""
    copy = _of(param)
    if copy is None or param.ds_status.name != "AVAILABLE":
        original(self, param, buffer, has_been_updated)
    elif copy.codec is not None and copy.copies.acts:
        if has_been_updated:
            copy.encode(param.data.detach().reshape(-1), 0)
    elif copy.codec is None and copy.held is not None and param.ds_secondary_tensor is None:
        param.ds_secondary_tensor, copy.held = copy.held, None
        original(self, param, buffer, True)
    else:
        original(self, param, buffer, has_been_updated)


def give_size(config: Any, block: CompressionConfig | None) -> None:
    """Set DeepSpeed's ``zero_hpz_partition_size`` to a node's ranks if the file does not set it.

    A collective if the block asks for copies. ``config``: DeepSpeed's parsed configuration.
    Raises ConfigError, on all ranks, where nodes are not alike or have one rank.
    """
    zero = config.zero_config
    if block is None or not block.zero.keeps_copy or zero.stage != 3:
        return
    if getattr(zero, SIZE) == 1:
        nodes = discover("auto")
        width = width_of(nodes)
        setattr(zero, SIZE, width)
        say(f"zero: {SIZE} is {width}, the ranks of a node (by {nodes.source})")


def leave(engine: Any) -> None:
    """Drop the copies of an engine that had the model before; the next gathers are upstream's."""
    for param in engine.module.parameters():
        vars(param).pop(ATTRIBUTE, None)


def attached(engine: Any, channels: Channels) -> None:
    """Follow the secondary tensors of an engine; a collective if the block asks for copies.

    Raises ConfigError, on all ranks, if DeepSpeed keeps none.
    """
    leave(engine)
    settings = channels.config.zero
    if not settings.keeps_copy:
        return
    params = [p for p in engine.module.parameters() if hasattr(p, "ds_id")]
    if any(p.ds_zero_param_process_group is None for p in params):
        todo = (
            f"the model was built under zero.Init without {SIZE}, so its parameters have no copy; "
            "write it in the configuration that zero.Init gets, too"
        )
        raise ConfigError(KEY, settings.secondary, todo)
    cut = [p for p in params if not p.ds_persist]
    if not cut:
        say("zero: all parameters are persistent, so there is no secondary copy to renew")
        return
    groups = CopyGroups.of(cut[0].ds_secondary_tensor_group_size, SIZE)
    codec = None if settings.secondary == "exact" else channels.policy.codecs["zero", "forward"]
    copies = SecondaryCopies(channels["zero"], groups, torch.device(engine.device))
    copies.follow(cut, codec)


def forget(engine: Any) -> Callable[[], None]:
    """Make the gathers after a load send parameters whole; return a function that undoes this."""
    copies = copies_of(engine.module.parameters())
    return (lambda: None) if copies is None else copies.forget()


COVERS = ("zero",)
ATTACHED = attached
PATCHES = ((INVALIDATE, make_invalidate_secondary_tensor), (RELEASE, make_partition_param_sec))
