"""Parameter gathers of ZeRO, dimension ``zero``.

Seams:

* stages 1 and 2 and BF16_Optimizer, after the step: ``all_gather_into_tensor_dp_groups`` in
  ``runtime.utils``, where its caller ``all_gather_dp_groups`` looks it up. That caller is no seam,
  since four modules import it by name.
* stage 3, for every forward and backward: ``_dist_allgather_fn`` in ``partition_parameters``, a
  module global; the closures that call it cannot be patched. ``__all_gather_params_`` of the
  coordinator is wrapped to know which parameters are fetched for training.

Every rank, the owner included, decodes the same payloads. The optimizer's fp32 master weights are
separate tensors at every stage and stay exact, so errors do not accumulate. With ``delta``, and
with ``stepcode``, payloads carry differences from the last gather
(``channels/messages/parameter_deltas.py``).

Exact, because written back or saved: ``GatheredParameters``, checkpoint consolidation and the
refresh of persistent parameters (they call other functions); the first fetch of persistent
parameters, so that a resumed run computes with the same values as an uninterrupted one; and saved
weights of stages 1 and 2 (``exact_weights``).

If nodes keep secondary copies, upstream gathers natively inside a node (``secondary``); kept frozen
weights are not gathered at all (``frozen``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import ATTRIBUTE, AllGather, Channel, Channels, channels_of
from hybridcomp.channels.messages.parameter_deltas import GatherParameters
from hybridcomp.codecs.base import Codec
from hybridcomp.patches.common.scope import Scope
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.patches.ds.zero import frozen, secondary
from hybridcomp.patches.ds.zero.partitions import filled
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam

DP_GROUPS = Seam(
    REQUIREMENT,
    "deepspeed.runtime.utils",
    "all_gather_into_tensor_dp_groups",
    ("groups_flat", "partitioned_param_groups", "dp_process_group"),
)
ALLGATHER_FN = Seam(
    REQUIREMENT,
    "deepspeed.runtime.zero.partition_parameters",
    "_dist_allgather_fn",
    ("input_tensor", "output_tensor", "group"),
)
FETCH = Seam(
    REQUIREMENT,
    "deepspeed.runtime.zero.partitioned_param_coordinator",
    "PartitionedParameterCoordinator._PartitionedParameterCoordinator__all_gather_params_",
    ("self", "params", "forward", "quantize"),
)

#: attributes of the optimizers: the flat groups that are gathered after a step
FLAT_GROUPS = ("bit16_groups_flat", "bf16_groups_flat")

#: attribute of a flat group with frozen parts (``trained_gathers``)
TRAINED = "_hybridcomp_trained_gather"
#: most elements of one gather after a step, which bounds the memory of payloads; upstream gathers
#: all parameters of a group in one call
GATHER_NUMEL = 1 << 27


@dataclass(frozen=True)
class _Fetch:
    """Channel and partition lengths of a fetch of stage 3."""

    channel: Channel
    #: elements of each parameter's partition, in message order; empty: one slice
    lengths: tuple[int, ...] = ()

    def cuts(self, numel: int) -> list[int]:
        """Return the start of each parameter except the first in a shard of ``numel`` elements."""
        if numel in self.lengths or not self.lengths:
            return []  # one parameter per message ("stage3_allgather_sequential")
        if numel != sum(self.lengths):
            raise RuntimeError(
                f"hybridcomp: stage 3 gathers {numel} elements of a rank, expected partitions of "
                f"{list(self.lengths)}; please report this with the version of DeepSpeed"
            )
        return list(accumulate(self.lengths))[:-1]


@dataclass(eq=False, kw_only=True)
class _FetchMessage(AllGather):
    """All-gather of the partitions of one or several parameters."""

    fetch: _Fetch

    def cuts(self, codec: Codec) -> list[int]:
        """Return the start of each parameter except the first."""
        return self.fetch.cuts(self.shard.numel())


_FETCHING: Scope[_Fetch | None] = Scope("fetch", None)


@around
def make_all_gather_into_tensor_dp_groups(
    original: Any,
    groups_flat: Sequence[Tensor],
    partitioned_param_groups: Sequence[Sequence[Tensor]],
    dp_process_group: Sequence[Any],
) -> None:
    """Gather each flat group encoded; upstream gathers the groups that have no codec."""
    for flat, partitions, group in zip(
        groups_flat, partitioned_param_groups, dp_process_group, strict=True
    ):
        native = functools.partial(original, [flat], [partitions], [group])
        channels = channels_of(flat)
        if channels is None:
            native()
            continue
        shard = partitions[dist.get_rank(group)]
        whole = functools.partial(_gather, channels["zero"], flat, shard, group, native)
        trained = getattr(flat, TRAINED, None)
        if trained is None:
            whole()
        else:
            trained.run(channels["zero"], flat, group, whole)


def _gather(
    channel: Channel, flat: Tensor, shard: Tensor, group: Any, native: Callable[[], None]
) -> None:
    """Gather ``flat`` from this rank's ``shard``, a view of it."""
    message = GatherParameters(
        numel=flat.numel(),
        dtype=flat.dtype,
        group=group,
        shard=shard.detach(),
        out=flat.detach(),
        buffer=flat,
        limit=GATHER_NUMEL,
    )

    def leave() -> None:
        message.leave(channel)
        native()

    channel.run(message, native=leave, encoded=lambda handle: handle.wait())


@around
def make_all_gather_params(
    original: Any, self: Any, params: Any, forward: bool, quantize: bool = False
) -> None:
    """Publish the channel and partition lengths of the parameters fetched for training."""
    channels = next((found for p in params if (found := channels_of(p)) is not None), None)
    if channels is None:
        original(self, params, forward, quantize)
        return
    channel = channels["zero"]
    kept = frozen.weights_of(params)
    if kept is not None:
        params = kept.serve(self, params, lambda: _fetch(_Fetch(channel), suspended=True))
    copies = secondary.copies_of(params)
    if copies is not None:
        stream = self._PartitionedParameterCoordinator__allgather_stream
        with copies.lent(params, stream), _fetch(_Fetch(channel), suspended=True):
            original(self, params, forward, quantize)
        return
    if not channel.active:
        batches: list[_Batch] = [(params, (), False)]
    else:
        _zero_padding(self, params)
        # they come out of a set, which ranks iterate in different orders, and upstream gathers
        # those of one group after those of another (experts, other weights)
        params = sorted(params, key=lambda p: p.ds_id)
        others = [p for p in params if not p.ds_persist]
        batches = [([p for p in params if p.ds_persist], (), True)]
        batches += _apart(channel, others) if channels.lossy("zero") else [(others, (), False)]
    for some, lengths, suspended in batches:
        with _fetch(_Fetch(channel, lengths), suspended):
            original(self, some, forward, quantize)


#: parameters that one upstream call gathers; the lengths of their partitions, each of which is
#: encoded alone; whether the gather is exact
_Batch = tuple[Iterable[Any], tuple[int, ...], bool]


def _apart(channel: Channel, params: Iterable[Any]) -> list[_Batch]:
    """Split sorted parameters into batches, each of which upstream gathers in one message.

    An engine's first step fetches the parameters of one module together, later steps those of
    several modules. Decoded values must not depend on that, or a resumed run would differ. So each
    parameter's codec depends only on the parameter's size, and each parameter of a message is
    encoded independently.
    """
    found: dict[tuple[Any, ...], list[Any]] = {}
    for p in params:
        if p.ds_status.name != "NOT_AVAILABLE":
            continue
        group, shard = p.ds_process_group, p.ds_tensor
        numel = _partition_numel(p) * dist.get_world_size(group)
        encoded = channel.encodes(numel, shard.dtype, group)
        # the keys by which upstream groups parameters
        key = (encoded, id(group), shard.dtype, p.ds_secondary_tensor is None)
        found.setdefault(key, []).append(p)
    return [
        (some, tuple(_partition_numel(p) for p in some), not encoded)
        for (encoded, *_), some in found.items()
    ]


def _partition_numel(param: Any) -> int:
    """Return the elements of this rank's partition of ``param``, or of its secondary one (hpZ)."""
    groups = 1 if param.ds_secondary_tensor is None else param.ds_secondary_tensor_num_of_groups
    return int(param.ds_tensor.ds_numel * groups)


def _zero_padding(coordinator: Any, params: Iterable[Any]) -> None:
    """Zero the padding after the end of parameters, which upstream leaves uninitialized.

    The padding shares codec blocks with parameters. This runs before every fetch, since optimizer
    steps and checkpoints overwrite the padding, on the stream that is about to read it.
    """
    from deepspeed.accelerator import get_accelerator

    padded = [(param, end) for param in params if (end := filled(param)) < param.ds_tensor.numel()]
    if not padded:
        return
    stream = coordinator._PartitionedParameterCoordinator__allgather_stream
    with get_accelerator().stream(stream), torch.no_grad():
        for param, end in padded:
            param.ds_tensor[end:].zero_()


@contextmanager
def _fetch(fetch: _Fetch, suspended: bool) -> Iterator[None]:
    with _FETCHING.inside(fetch), fetch.channel.suspended() if suspended else nullcontext():
        yield


@around
def make_dist_allgather_fn(
    original: Any, input_tensor: Tensor, output_tensor: Tensor, group: Any = None
) -> Any:
    """Gather encoded shards; ``wait()``, which upstream calls before it reads, decodes them.

    Native gathers inside a node over gloo become messages between pairs.
    """
    fetch = _FETCHING.get()
    if fetch is None:
        return original(input_tensor, output_tensor, group)
    message = _FetchMessage(
        numel=output_tensor.numel(),
        dtype=output_tensor.dtype,
        group=group,
        shard=input_tensor.detach().view(-1),
        out=output_tensor.detach().view(-1),
        async_op=True,
        # modules' parameters are sets, so ranks may wait for handles in different orders
        single_post=True,
        fetch=fetch,
    )
    return fetch.channel.run(
        message,
        native=lambda: (
            message.in_node(fetch.channel) or original(input_tensor, output_tensor, group)
        ),
        encoded=lambda handle: handle,
    )


def attached(engine: Any, channels: Channels) -> None:
    """Tag the optimizer's flat groups, by which the gather after the step finds its engine."""
    for name in FLAT_GROUPS:
        for flat in getattr(engine.optimizer, name, None) or ():
            setattr(flat, ATTRIBUTE, channels)


COVERS = ("zero",)
ATTACHED = attached
PATCHES = (
    (DP_GROUPS, make_all_gather_into_tensor_dp_groups),
    (FETCH, make_all_gather_params),
    (ALLGATHER_FN, make_dist_allgather_fn),
)
