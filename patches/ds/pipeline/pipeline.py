"""Pipeline sends of activations (forward) and of their gradients (backward), dimension ``pp``.

Seams: ``p2p.send`` and ``p2p.recv`` are looked up as module attributes at every call.
``PipelineEngine._exec_send_activations`` and similar methods are not seams: ``_INSTRUCTION_MAP``
captured the functions when the class was created, so replacing the methods changes nothing.
``_exec_schedule`` is wrapped to find out which engine is sending; in ``_send_tensor_meta`` and
``_recv_tensor_meta`` two stages agree on the tensors that follow.

Agreement: the receiver's buffer does not show dtypes, because the engine's pool of receive buffers
ignores them, and both sides must decide without the values of a message. So the sender decides once
per set of shapes which tensors hold values that a codec may change (``values``) and marks
them in the message of shapes that upstream sends anyway: the id of a dtype gets the bit VALUES,
which the receiver removes before upstream reads the message. Both sides then ask the policy with
the agreed dtype and the number of elements. Gradients travel back for the floating-point tensors of
the same set, in the same order.

Native: the message of shapes, masks and other tensors that are not activations, loss broadcasts
(not sent by p2p), the warm-up message of ``PipelineEngine.__init__``, messages below ``min_bytes``.
DualPipeV sends through ``batch_isend_irecv``, which is no seam here: refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridcomp.channels import Channels, Receive, Send
from hybridcomp.errors import ConfigError
from hybridcomp.log import say
from hybridcomp.patches.ds.pipeline.agreement import Agreed, set_marks, take_marks
from hybridcomp.patches.ds.pipeline.pipe import PIPE, RUNNING, Pipe, drain
from hybridcomp.patches.ds.pipeline.posted_messages import PostedForm
from hybridcomp.patches.ds.pipeline.values import carries_values
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.patches.rules.ds_pipeline import no_schedule
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam

ENGINE = "deepspeed.runtime.pipe.engine"
P2P = "deepspeed.runtime.pipe.p2p"

SEND = Seam(REQUIREMENT, P2P, "send", ("tensor", "dest_stage", "async_op"))
RECV = Seam(REQUIREMENT, P2P, "recv", ("tensor", "src_stage", "async_op"))
SCHEDULE = Seam(REQUIREMENT, ENGINE, "PipelineEngine._exec_schedule", ("self", "pipe_schedule"))
SEND_META = Seam(
    REQUIREMENT, ENGINE, "PipelineEngine._send_tensor_meta", ("self", "buffer", "recv_stage")
)
LOSS = Seam(REQUIREMENT, ENGINE, "PipelineEngine._aggregate_total_loss", ("self",))
RECV_META = Seam(REQUIREMENT, ENGINE, "PipelineEngine._recv_tensor_meta", ("self", "send_stage"))


@around
def make_exec_schedule(original: Any, self: Any, pipe_schedule: Any) -> Any:
    """Publish the engine whose messages follow; train_batch and eval_batch both call this."""
    pipe: Pipe | None = getattr(self, PIPE, None)
    waitless = None if pipe is None else pipe.waitless
    if pipe is None or waitless is None or waitless.waits(pipe_schedule):
        drain(self, "for an evaluation")
        if pipe is not None:
            pipe.begin()
        with RUNNING.inside(pipe):
            return original(self, pipe_schedule)
    from hybridcomp.patches.ds.pipeline.async_pipeline import BatchSchedule

    if waitless.begin():
        pipe.begin()
    with RUNNING.inside(pipe), pipe.posting(waitless.posts):
        return original(self, BatchSchedule(waitless))


def _form(tensor: Tensor, agreed: Agreed | None) -> PostedForm:
    """Return the form of a message that is received into or sent from ``tensor``."""
    if agreed is None:
        return PostedForm(tensor.numel(), tensor.dtype, values=False)
    return PostedForm(tensor.numel(), agreed.dtype, agreed.values)


@dataclass(eq=False, kw_only=True)
class _Activation(Send):
    """Message of a tensor of any shape, in the agreed dtype."""

    def native_nbytes(self, size: int) -> int:
        """Return the bytes that upstream sends, in the tensor's own dtype."""
        return int(self.values.nbytes)

    def load(self) -> Tensor:
        """Return the flat values in the agreed dtype."""
        return self.values.detach().to(self.dtype).reshape(-1).contiguous()


@dataclass(eq=False, kw_only=True)
class _Buffer(Receive):
    """Receive into upstream's buffer, whatever shape and dtype that has."""

    def buffer(self) -> Tensor:
        """Return upstream's buffer, flat, or a new one if it has another dtype than agreed."""
        values = self.out.detach()
        if values.dtype == self.dtype and values.is_contiguous():
            return values.view(-1)
        return values.new_empty(self.numel, dtype=self.dtype)

    def put(self, values: Tensor) -> None:
        """Copy the values of a new buffer into upstream's."""
        if values.data_ptr() != self.out.data_ptr():
            self.out.detach().copy_(values.view(self.out.shape))


@around
def make_send(original: Any, tensor: Tensor, dest_stage: int, async_op: bool = False) -> Any:
    """Encode tensors as agreed; count all others and leave them to upstream."""
    pipe = RUNNING.get()
    if pipe is None:
        return original(tensor, dest_stage, async_op)
    if pipe.marks is not None:
        pipe.channel.count_native(tensor.nbytes, "forward")
        return original(set_marks(tensor, pipe.marks), dest_stage, async_op)
    agreed, direction = pipe.advance(dest_stage, sending=True)
    if pipe.posts is not None:
        return pipe.posts.send(tensor, _form(tensor, agreed), direction, pipe.rank(dest_stage))
    message = _Activation(
        numel=tensor.numel(),
        dtype=agreed.dtype if agreed is not None else tensor.dtype,
        group=None,
        direction=direction,
        between=(pipe.own_rank, pipe.rank(dest_stage)),
        values=tensor,
    )
    native = functools.partial(original, tensor, dest_stage, async_op)
    if agreed is None or not agreed.values:
        return pipe.channel.run_native(message, native)
    return pipe.channel.run(message, native=native, encoded=lambda _: None)


@around
def make_recv(original: Any, tensor: Tensor, src_stage: int, async_op: bool = False) -> Any:
    """Decode tensors as agreed into upstream's buffer, whatever its dtype."""
    pipe = RUNNING.get()
    if pipe is None:
        return original(tensor, src_stage, async_op)
    if pipe.reading:
        result = original(tensor, src_stage, async_op)
        pipe.agree(pipe.incoming, take_marks(tensor, pipe.engine.ID_TO_DTYPE))
        return result
    agreed, direction = pipe.advance(src_stage, sending=False)
    if pipe.posts is not None:
        return pipe.posts.receive(tensor, _form(tensor, agreed), direction)
    native = functools.partial(original, tensor, src_stage, async_op)
    if agreed is None or not agreed.values:
        return native()
    message = _Buffer(
        numel=tensor.numel(),
        dtype=agreed.dtype,
        group=None,
        direction=direction,
        between=(pipe.rank(src_stage), pipe.own_rank),
        out=tensor,
    )
    return pipe.channel.run(message, native=native, encoded=lambda _: None)


@around
def make_send_tensor_meta(
    original: Any, self: Any, buffer: Tensor | tuple[Tensor, ...], recv_stage: int
) -> Any:
    """Decide which tensors may be encoded, and mark them in the message of shapes."""
    pipe = RUNNING.get()
    if pipe is None:
        return original(self, buffer, recv_stage)
    if not pipe.channel.active:
        # the message of shapes is not posted
        with RUNNING.inside(None if pipe.posts else pipe):
            return original(self, buffer, recv_stage)
    tensors = (buffer,) if isinstance(buffer, Tensor) else buffer
    marks = carries_values(
        tensors,
        mask_last=self.has_attention_mask or self.has_bool_tensors,
        partitioned=self.is_pipe_partitioned,
        known=pipe.trained,
    )
    if torch.is_grad_enabled():
        pipe.trained = marks
    dtypes = [tensor.dtype for tensor in tensors]
    pipe.agree(pipe.outgoing, [Agreed(d, m) for d, m in zip(dtypes, marks, strict=True)])
    pipe.marks = marks
    try:
        return original(self, buffer, recv_stage)
    finally:
        pipe.marks = None


@around
def make_recv_tensor_meta(original: Any, self: Any, send_stage: int) -> Any:
    """Read the marks, and remove them before upstream reads the message."""
    pipe = RUNNING.get()
    if pipe is None:
        return original(self, send_stage)
    if not pipe.channel.active:
        with RUNNING.inside(None if pipe.posts else pipe):
            return original(self, send_stage)
    pipe.reading = True
    try:
        return original(self, send_stage)
    finally:
        pipe.reading = False


@around
def make_aggregate_total_loss(original: Callable[..., Tensor], self: Any) -> Tensor:
    """Make the last stage post the loss, if the pipeline does not wait."""
    pipe: Pipe | None = getattr(self, PIPE, None)
    if pipe is None or pipe.waitless is None or not pipe.waitless.engaged:
        return original(self)
    return pipe.waitless.loss(original)


def attached(engine: Any, channels: Channels) -> None:
    """Create a pipeline engine's Pipe. Raises ConfigError for DualPipeV with ``pp`` compressed."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    settings = channels.config.pipeline
    if settings.waitless and (not isinstance(engine, PipelineEngine) or is_dualpipev(engine)):
        raise no_schedule(settings)
    if not isinstance(engine, PipelineEngine):
        return
    if not is_dualpipev(engine):
        pipe = Pipe(engine, channels["pp"])
        setattr(engine, PIPE, pipe)
        if settings.waitless:
            from hybridcomp.patches.ds.pipeline import async_pipeline

            pipe.waitless = async_pipeline.start(engine, pipe.channel, settings)
    elif channels["pp"].active:
        config = channels.config
        if config.on_unsupported == "error" and "pp" in config.explicit:
            raise ConfigError(
                "compression.pp",
                "DualPipeVModule",
                "DualPipeV sends with batch_isend_irecv, which is not compressed; use a "
                'PipelineModule, set "pp": "none", or set "on_unsupported": "native"',
            )
        say("pp stays native: DualPipeV uses batch_isend_irecv")


def is_dualpipev(engine: Any) -> bool:
    """Return whether the engine is a DualPipeVEngine (deepspeed >= 0.19.8)."""
    module = sys.modules.get("deepspeed.runtime.pipe.dualpipev")
    return module is not None and isinstance(engine, module.DualPipeVEngine)


COVERS = ("pp",)
ATTACHED = attached
PATCHES = (
    (SCHEDULE, make_exec_schedule),
    (SEND, make_send),
    (RECV, make_recv),
    (SEND_META, make_send_tensor_meta),
    (RECV_META, make_recv_tensor_meta),
    (LOSS, make_aggregate_total_loss),
)
