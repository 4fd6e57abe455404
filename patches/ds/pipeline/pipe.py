"""Track a DeepSpeed engine's pipeline on this rank: its next message and that message's codec.

``patches/ds/pipeline/pipeline.py`` describes how the stages agree.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hybridcomp.channels import Channel
from hybridcomp.collectives import finish_sends
from hybridcomp.dimensions import Direction
from hybridcomp.patches.common.scope import Scope
from hybridcomp.patches.ds.pipeline.agreement import Agreed, Agreement, Neighbour
from hybridcomp.patches.ds.pipeline.posted_messages import PostedMessages

if TYPE_CHECKING:
    from hybridcomp.patches.ds.pipeline.async_pipeline import AsyncPipeline

#: attribute of an attached pipeline engine
PIPE = "_hybridcomp_pipe"


@dataclass
class Pipe:
    """The pipeline of one engine on this rank."""

    engine: Any
    channel: Channel
    outgoing: Neighbour = field(default_factory=Neighbour)  # agreement with the next stage
    incoming: Neighbour = field(default_factory=Neighbour)  # agreement with the previous stage
    #: marks to set, while the message of shapes is being sent
    marks: Sequence[bool] | None = None
    #: whether the message of shapes is being received, so that its marks must be read
    reading: bool = False
    agreed_without_grad: bool = False
    #: the last marks of training, for evaluations, in which no tensor requires grad
    trained: Sequence[bool] | None = None
    #: pipeline without a flush after every batch; None: as in upstream
    waitless: AsyncPipeline | None = None
    #: posts the messages while a batch without a flush runs; None: messages block
    posts: PostedMessages | None = None

    def begin(self) -> None:
        """Prepare for a schedule; may make the engine send the shapes again (mutates it).

        An evaluation does not show which tensors will require grad, so the first training batch
        after it agrees again, which costs 1 KiB. Every stage runs the same schedule and does the
        same.
        """
        self.outgoing.restart()
        self.incoming.restart()
        if self.agreed_without_grad and torch.is_grad_enabled():
            self.agreed_without_grad = False
            self.engine.first_output_send = True
            self.engine.pipe_recv_buf = None

    @contextmanager
    def posting(self, posts: PostedMessages | None) -> Iterator[None]:
        """Post the messages inside this context; None: messages block."""
        before, self.posts = self.posts, posts
        try:
            yield
        finally:
            self.posts = before

    def advance(self, peer: int, sending: bool) -> tuple[Agreed | None, Direction]:
        """Return the agreement on the next message with stage ``peer``, and its direction.

        Activations go to the next stage, gradients to the previous one. It advances to that
        message.
        """
        is_next = peer == self.engine.next_stage
        link = self.outgoing if is_next else self.incoming
        if is_next == sending:
            return link.activation(), "forward"
        return link.gradient(), "backward"

    @functools.cached_property
    def own_rank(self) -> int:
        """Return the global rank of this stage."""
        return self.rank(self.engine.stage_id)

    def rank(self, stage: int) -> int:
        """Return the global rank of ``stage`` in this pipeline."""
        return int(self.engine.grid.stage_to_global(stage_id=stage))

    def agree(self, neighbour: Neighbour, activations: Sequence[Agreed]) -> None:
        """Store an agreed set of tensors, and derive the gradients that come back for it."""
        engine = self.engine
        back = list(activations)
        if engine.has_attention_mask or engine.has_bool_tensors:
            back.pop()  # upstream sends the mask as half, and sends no gradient for it
        if engine.is_grad_partitioned:
            back = back[:2]
        else:
            if engine.is_pipe_partitioned:
                del back[0]  # drop the description of the partition: the gradient comes back whole
            back = [agreed for agreed in back if agreed.dtype.is_floating_point]
        neighbour.agreed = Agreement(tuple(activations), tuple(back))
        self.agreed_without_grad = not torch.is_grad_enabled()


#: pipeline whose schedule runs in this thread
RUNNING: Scope[Pipe | None] = Scope("pipe", None)


def drain(engine: Any, why: str) -> None:
    """Empty ``engine``'s pipeline, if it has one that does not wait; on all stages."""
    pipe: Pipe | None = getattr(engine, PIPE, None)
    if pipe is not None and pipe.waitless is not None:
        pipe.waitless.drain(why)


def close(engine: Any) -> None:
    """Free the last payload and weight versions of ``engine``'s pipeline, if any; no message."""
    pipe: Pipe | None = getattr(engine, PIPE, None)
    if pipe is None:
        return
    finish_sends()
    if pipe.waitless is not None:
        pipe.waitless.close()


def running() -> Any:
    """Return the attached engine whose pipeline schedule runs in this thread, None outside one."""
    pipe = RUNNING.get()
    return None if pipe is None else pipe.engine
