"""Weights of ZeRO 3 that no optimizer changes, gathered once and kept encoded on every rank.

With adapters (LoRA) nearly all weights that stage 3 gathers in every pass are frozen base
weights. With ``zero.frozen`` a fetch of a kept weight decodes it and sends nothing. The first
fetch gathers natively, keeps the weight encoded, and already computes with the decoded values, so
that all passes use the same values.

Before each pass every rank hashes its shards and compares them with the hashes of the kept weights;
the ranks then exchange one bit per weight: whether it was changed by merging adapters, a load, or
by hand. Changed weights, and weights that train from now on, are dropped and gathered again.

Seam: ``Init._partition_param``, which partitions weights again after ``GatheredParameters`` changed
them: the kept copy is dropped. ``parameter_gathers`` asks ``serve`` which parameters still have to
be gathered. Kept weights are freed with their parameters and never saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from hybridcomp.channels import Channel, Channels, native_nbytes
from hybridcomp.channels.messages.kept_weights import (
    NONE_KEPT,
    KeptWeights,
    changed_anywhere,
    hashes_of,
)
from hybridcomp.config.parameter import FrozenConfig
from hybridcomp.job.devices import default_device
from hybridcomp.job.gates import gate
from hybridcomp.job.together import ending, together
from hybridcomp.log import say
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.patches.ds.zero.partitions import filled
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam

CUT = Seam(
    REQUIREMENT,
    "deepspeed.runtime.zero.partition_parameters",
    "Init._partition_param",
    ("self", "param", "buffer", "has_been_updated", "free_data"),
)
#: name of the operation in messages
WHAT = "zero: gathering frozen weights to keep them"
#: the operation in which kept weights are decoded, for messages
DECODING = "zero: decoding frozen weights"
#: attribute of a parameter: its ``FrozenWeight``
ATTRIBUTE = "_hybridcomp_frozen"
#: the counter of gathered elements in a stage-3 coordinator
AVAILABLE = "_PartitionedParameterCoordinator__n_available_params"


class FrozenWeight:
    """One frozen parameter of an engine."""

    def __init__(self, param: Any, weights: FrozenWeights) -> None:
        self.param, self.weights = param, weights
        self.kept: KeptWeights | None = None
        self.hash = 0  # hash of this rank's shard when the weight was kept

    @property
    def share(self) -> Tensor:
        """Return this rank's shard of the parameter, 1-D."""
        found: Tensor = self.param.ds_tensor.data.view(-1)[: filled(self.param)]
        return found

    def keep(self) -> None:
        """Encode and keep the gathered parameter, and replace it by its decoded values."""
        values: Tensor = self.param.data.detach().reshape(-1)
        is_vector = len(self.param.ds_shape) < 2
        self.kept = KeptWeights(values, self.weights.settings, is_vector)
        (self.hash,) = hashes_of([self.share])
        self.put()

    def put(self) -> None:
        """Give upstream the decoded parameter, as after a gather."""
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        assert self.kept is not None, "kept"
        self.param.data = self.kept.decoded().view(self.param.ds_shape)
        self.param.ds_status = ZeroParamStatus.AVAILABLE


class FrozenWeights:
    """The frozen parameters of one engine."""

    def __init__(
        self, channel: Channel, settings: FrozenConfig, params: Iterable[Any], module: Any
    ) -> None:
        self.channel, self.settings = channel, settings
        # runs before stage 3's own hook, which fetches parameters
        self._before_passes = module.register_forward_pre_hook(
            lambda *_: self.check(), prepend=True
        )
        self.all: list[FrozenWeight] = []
        self.add(params)
        self._has_told = False

    def add(self, params: Iterable[Any]) -> None:
        """Keep further parameters, from their next gather on."""
        self.all += [FrozenWeight(p, self) for p in params]
        self.all.sort(key=lambda weight: weight.param.ds_id)
        for weight in self.all:
            setattr(weight.param, ATTRIBUTE, weight)

    @property
    def nbytes(self) -> int:
        """Return the bytes that this rank keeps."""
        return sum(weight.kept.nbytes for weight in self.all if weight.kept is not None)

    @torch.no_grad()
    def serve(
        self,
        coordinator: Any,
        params: Iterable[Any],
        exactly: Callable[[], AbstractContextManager[None]],
    ) -> list[Any]:
        """Make frozen parameters available; return those that still have to be gathered.

        ``exactly``: returns a context in which upstream's gathers are native.
        """
        from deepspeed.accelerator import get_accelerator

        wanted = sorted(params, key=lambda p: p.ds_id)
        found = [
            weight for p in wanted
            if (weight := _of(p)) is not None
            and not p.requires_grad and p.ds_status.name == "NOT_AVAILABLE"
        ]  # fmt: skip
        if not found:
            return wanted
        stream = coordinator._PartitionedParameterCoordinator__allgather_stream
        lacking = [weight for weight in found if weight.kept is None]
        begun = ending(DECODING)  # nothing is gathered in the body
        if lacking:
            begun = together(WHAT, lambda: _release(found, lacking), votes=True)
        with get_accelerator().stream(stream), begun:
            spared = [weight for weight in found if weight.kept is not None]
            for weight in spared:
                weight.put()
            if lacking:
                with exactly():
                    self._gather(lacking)
                for weight in lacking:
                    weight.keep()
            for weight in spared:
                self._count(weight.param)
        numel = sum(weight.param.ds_numel for weight in found)
        setattr(coordinator, AVAILABLE, getattr(coordinator, AVAILABLE) + numel)
        served = {id(weight.param) for weight in found}
        return [p for p in wanted if id(p) not in served]

    def _gather(self, lacking: Iterable[FrozenWeight]) -> None:
        """Gather weights natively."""
        for has_copy in (False, True):
            some = [w for w in lacking if (w.param.ds_secondary_tensor is not None) == has_copy]
            if some:
                gate()
                some[0].param.all_gather_coalesced([w.param for w in some]).wait()

    def _count(self, param: Any) -> None:
        """Count the native bytes of a gather that a kept weight made unnecessary."""
        group = self.channel.group(param.ds_process_group)
        share = int(param.ds_tensor.ds_numel)
        raw = native_nbytes.all_gather_nbytes(share, param.ds_tensor.dtype, group.size)
        self.channel.record(self.channel.meter(param.ds_tensor.device), raw, "forward", group.ring)

    @torch.no_grad()
    def check(self) -> None:
        """Drop outdated weights; a collective if any are kept."""
        kept = [weight for weight in self.all if weight.kept is not None]
        if not kept:
            return
        if not self._has_told:
            self._has_told = True
            say(f"zero: rank 0 keeps frozen weights in {self.nbytes / 1e6:.3g} MB")

        def flags() -> list[bool]:
            now = hashes_of([weight.share for weight in kept])
            return [
                weight.param.requires_grad or own != weight.hash
                for weight, own in zip(kept, now, strict=True)
            ]

        # shards may be on the host (offload_param)
        changed = changed_anywhere(self.channel, flags, len(kept), default_device())
        for weight, flag in zip(kept, changed, strict=True):
            if flag:
                weight.kept = None
                # the secondary copy of hpZ, which has the old values
                weight.param.ds_secondary_tensor = None

    def forget(self) -> None:
        """Drop all kept weights, which the next pass gathers again. Called on all ranks."""
        for weight in self.all:
            weight.kept = weight.param.ds_secondary_tensor = None

    def leave(self) -> None:
        """Release the parameters, for another engine to take over."""
        self._before_passes.remove()
        for weight in self.all:
            delattr(weight.param, ATTRIBUTE)


def _release(fetched: Iterable[FrozenWeight], lacking: Iterable[FrozenWeight]) -> None:
    """Restore the state of weights before a failed fetch."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, free_param

    for weight in lacking:
        weight.kept = None
    for weight in fetched:
        if weight.param.ds_status == ZeroParamStatus.AVAILABLE:
            free_param(weight.param)
        weight.param.ds_status = ZeroParamStatus.NOT_AVAILABLE


def _of(param: Any) -> FrozenWeight | None:
    found: FrozenWeight | None = getattr(param, ATTRIBUTE, None)
    return found


def weights_of(params: Iterable[Any]) -> FrozenWeights | None:
    """Return the frozen weights of the engine that owns these parameters; None if it keeps none."""
    return next((found.weights for p in params if (found := _of(p)) is not None), None)


@around
def make_partition_param(
    original: Any,
    self: Any,
    param: Any,
    buffer: Any = None,
    has_been_updated: bool = False,
    free_data: bool = True,
) -> None:
    """Drop a kept weight if ``GatheredParameters`` changed it."""
    weight = _of(param)
    if weight is not None and has_been_updated:
        weight.kept = None
    original(self, param, buffer, has_been_updated, free_data)


def leave(engine: Any) -> None:
    """Drop the kept weights of an engine that had the model before."""
    before = weights_of(engine.module.parameters())
    if before is not None:
        before.leave()


def attached(engine: Any, channels: Channels) -> None:
    """Keep the frozen weights of an engine from their first gather on."""
    leave(engine)
    if channels.config.zero.keeps_frozen is not None and not keep(engine, channels):
        say(NONE_KEPT)


def keep(engine: Any, channels: Channels) -> bool:
    """Keep the weights frozen by now, if the block asks for it; return whether any are kept."""
    settings = channels.config.zero.keeps_frozen
    if settings is None:
        return False
    every = list(engine.module.parameters())
    params = [
        p for p in every
        if hasattr(p, "ds_id") and not p.requires_grad and p.is_floating_point()
        and not p.ds_persist and _of(p) is None
    ]  # fmt: skip
    found = weights_of(every)
    if found is None and params:
        FrozenWeights(channels["zero"], settings, params, engine.module)
    elif found is not None:
        found.add(params)
    return bool(params)


COVERS = ("zero",)
ATTACHED = attached
PATCHES = ((CUT, make_partition_param),)
