"""All-reduce of tied weights' gradients between pipeline stages, dimension ``dp``.

Seam: the entry of ``ReduceTiedGrads`` in ``PipelineEngine._INSTRUCTION_MAP``. The method
``_exec_reduce_tied_grads`` was captured there when the class was made, so replacing the method has
no effect, and ``PipelineModule.allreduce_tied_weight_gradients`` is not called by the engine. The
map is replaced as a whole, by a copy with three other entries; DualPipeV has another map.

The sum is never divided, as in upstream. Both replicas decode the same payloads and get the same
bits, but lossy messages around the sum would make them drift apart, since the stages lay out their
buckets differently and a codec's error depends on the layout:

* the reduction over data-parallel ranks follows this sum. If it leaves every rank with whole
  gradients (no ZeRO, BF16_Optimizer), the two are swapped: sums commute, and the replicas then
  decode the same payloads as the last operation, without extra bytes;
* ZeRO-1 keeps only slices of the gradients, and gathers parameters after the step. There
  upstream's ``_synchronize_tied_weights`` broadcasts the first replica after the step, and wherever
  checkpoints fill the weights from the masters again; the ledger counts it as wire bytes that
  native would not have sent. With deltas the other replicas keep what the gather left in a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.channels import NAME, Channel, Channels, channels_of
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.patches.common.collective_wrappers import AllReduceInPlace
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.seams.patching import Seam, has_module

PIPELINE = Seam(
    REQUIREMENT, "deepspeed.runtime.pipe.engine", "PipelineEngine._INSTRUCTION_MAP", None
)
DUALPIPEV = Seam(
    REQUIREMENT, "deepspeed.runtime.pipe.dualpipev", "DualPipeVEngine._INSTRUCTION_MAP", None
)

#: distinguishes this sum's residuals from those of the data-parallel reduction after it
SUFFIX = "#tied"
#: attribute of an engine: tied weights, and their values before the last broadcast
BEFORE = "_hybridcomp_tied_before"

Executor = Callable[..., None]


class InstructionMap(dict[type, Executor]):
    """Instruction map with replaced entries: a dict subclass that can carry a patch's
    attributes.
    """


def make_instruction_map(original: dict[type, Executor]) -> InstructionMap:
    """Wrap the three instructions that end a batch."""
    from deepspeed.runtime.pipe import schedule

    reduce_tied = original[schedule.ReduceTiedGrads]
    reduce_grads = original[schedule.ReduceGrads]
    optimizer_step = original[schedule.OptimizerStep]

    def _exec_reduce_tied_grads(self: Any) -> None:
        channels = channels_of(self)
        if channels is None:
            reduce_tied(self)
        elif not sums_after(self, channels):
            reduce_tied_grads(self, channels["dp"], reduce_tied)

    def _exec_reduce_grads(self: Any) -> None:
        reduce_grads(self)
        channels = channels_of(self)
        if channels is not None and sums_after(self, channels):
            reduce_tied_grads(self, channels["dp"], reduce_tied)

    def _exec_optimizer_step(self: Any, lr_kwargs: Any = None) -> None:
        put_back(self)
        optimizer_step(self, lr_kwargs)
        channels = channels_of(self)
        if channels is not None:
            equalize(self, channels)

    return InstructionMap(
        {
            **original,
            schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
            schedule.ReduceGrads: _exec_reduce_grads,
            schedule.OptimizerStep: _exec_optimizer_step,
        }
    )


def reduce_tied_grads(engine: Any, channel: Channel, original: Executor) -> None:
    """Sum the gradients of tied weights between their stages (mutates the gradients).

    1. if none of the gradients has a codec, upstream reduces all of them;
    2. otherwise gradients with a codec are encoded, and the rest is reduced as in upstream.
    """
    grads = [
        (weight, weight._hp_grad if engine.using_bf16_optimizer else weight.grad, group)
        for weight, group in engine.module.get_tied_weights_and_groups()
    ]
    messages = [
        _TiedGradient(numel=grad.numel(), dtype=grad.dtype, group=group, tensor=grad, weight=weight)
        for weight, grad, group in grads
        if grad is not None
    ]
    if not any(
        channel.encodes(message.numel, message.dtype, message.group) for message in messages
    ):  # 1
        for message in messages:
            channel.run_native(message, lambda: None)
        original(engine)
        return
    for message in messages:  # 2
        native = partial(dist.all_reduce, message.tensor, group=message.group)
        channel.run(message, native=native, encoded=message.finish)


@dataclass(eq=False, kw_only=True)
class _TiedGradient(AllReduceInPlace):
    """Sum of one tied weight's gradient over the stages that have the weight."""

    weight: Any

    def pieces(self) -> list[Piece]:
        """Return the weight, under another name than in the data-parallel reduction."""
        return [Piece(getattr(self.weight, NAME) + SUFFIX, 0, self.numel)]


def sums_after(engine: Any, channels: Channels) -> bool:
    """Return whether the tied sum must follow the data-parallel reduction; equal on every rank."""
    return channels.lossy("dp") and engine.is_data_parallel and not _sliced(engine)


def equalize(engine: Any, channels: Channels) -> None:
    """Broadcast tied weights that each stage has got from masters of its own, if these drift.

    That is after a step, a load, and the decoding of weights behind a save.
    """
    if drifts(engine, channels):
        synchronize(engine, channels)


def drifts(engine: Any, channels: Channels) -> bool:
    """Return whether replicas of tied weights need a broadcast; equal on every rank."""
    if not getattr(engine.module, "tied_comms", None) or not engine.is_data_parallel:
        return False
    sliced = _sliced(engine)
    gathered = sliced or engine.using_bf16_optimizer
    return (sliced and channels.lossy("dp")) or (gathered and channels.lossy("zero"))


def _sliced(engine: Any) -> bool:
    """Return whether the reduction leaves each rank with only a slice of the gradients (ZeRO-1)."""
    return bool(engine.zero_optimization()) and not engine.using_bf16_optimizer


def synchronize(engine: Any, channels: Channels) -> None:
    """Broadcast the first replica of every tied weight to the others (mutates them)."""
    before = []
    for weight, group in engine.module.get_tied_weights_and_groups():
        meter = channels["dp"].meter(weight.device)
        if dist.get_rank(group) == 0:
            meter.sent((dist.get_world_size(group) - 1) * weight.nbytes)
        elif channels["zero"].delta:
            before.append((weight, weight.detach().clone()))
        channels.ledger.record(("dp", "forward"), 0, meter)
    setattr(engine, BEFORE, before)
    engine.module._synchronize_tied_weights()


def put_back(engine: Any) -> None:
    """Give tied weights their values before the last broadcast, to which gathers add deltas."""
    with torch.no_grad():
        for weight, values in vars(engine).pop(BEFORE, ()):
            weight.copy_(values)


def _patches() -> tuple[tuple[Seam, Callable[..., Any]], ...]:
    # DualPipeV came with 0.19.8
    if not has_module(DUALPIPEV.module):
        return ((PIPELINE, make_instruction_map),)
    return ((PIPELINE, make_instruction_map), (DUALPIPEV, make_instruction_map))


COVERS = ("dp",)
PATCHES = _patches()
