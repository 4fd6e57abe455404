"""Run DeepSpeed's pipeline without a flush after every batch (``pipeline`` of the block).

``train_batch`` keeps its contract: on every stage it processes the same micro-batches, returns
their mean loss and makes one optimizer step from their gradients. But before it returns, earlier
stages have run the first forward passes of the next batch (``nn/async_pipeline/passes.py``), so
stage s has read (S - 1 - s) (1 + slack) micro-batches ahead. Upstream's instructions do the work,
in this module's order; messages are posted (``posted_messages``), including the loss from the last
stage to all others.

Between two calls all stages have made the same number of steps. An evaluation, a checkpoint and a
changed number of micro-batches *drain* the pipeline: passes computed ahead are dropped, and the
first stage runs the same micro-batches again in the next call. So checkpoints hold no pipeline
state, and a run that continues after a checkpoint equals a run resumed from it. The optimizer step
does not wait for other stages: the gradient norm, and so clipping, is per stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from torch import Tensor

from hybridcomp.channels import Channel
from hybridcomp.config.async_pipeline import AsyncPipelineConfig
from hybridcomp.dimensions import DIRECTIONS, Direction
from hybridcomp.log import say
from hybridcomp.nn.async_pipeline import PassOrder, WeightVersions, make_correction
from hybridcomp.patches.ds.pipeline.async_rules import check, is_adam, stages_of
from hybridcomp.patches.ds.pipeline.micro_batch_prefetch import ReadAhead
from hybridcomp.patches.ds.pipeline.posted_messages import PostedMessages
from hybridcomp.patches.ds.pipeline.stage_grid import StageGrid, replaced
from hybridcomp.patches.rules.ds_pipeline import check_micro_batches

Instructions = list[schedule.PipeInstruction]


class AsyncPipeline:
    """The asynchronous pipeline of one engine on this rank, with its pending passes and messages.

    Attributes:
        order: order of this stage's passes. versions: weight versions that it holds.
        engaged: whether the last batch ran without a flush.
        drains: how often the pipeline was emptied.
    """

    def __init__(self, engine: Any, settings: AsyncPipelineConfig, posts: PostedMessages) -> None:
        self.engine, self.settings, self.posts = engine, settings, posts
        self.versions = WeightVersions(engine.module.parameters())
        self.order = self._new_order()
        self.correction = make_correction(
            settings, engine.basic_optimizer, self._delay, lambda: engine.global_steps - self.first
        )
        self.data = ReadAhead(engine)
        self.engaged = self._is_running = False
        self.drains = self._reported = 0

    @property
    def first(self) -> int:
        """Return the first optimizer step without a flush."""
        return self.settings.warmup

    @property
    def ahead(self) -> int:
        """Return by how many micro-batches this stage's forward passes are ahead."""
        module = self.engine.module  # the engine itself may be half built
        return int(module.num_stages - 1 - module.stage_id) * self.posts.depth

    def _delay(self) -> float:
        """Return the average delay of this stage's gradients, in optimizer steps."""
        return self.ahead / int(self.engine.gradient_accumulation_steps())

    def _new_order(self) -> PassOrder:
        return PassOrder(
            self.settings.versions, self.ahead, int(self.engine.gradient_accumulation_steps())
        )

    def waits(self, asked: Any) -> bool:
        """Return whether upstream's schedule ``asked`` runs unchanged."""
        is_training = isinstance(asked, schedule.TrainSchedule)
        self.engaged = is_training and self.engine.global_steps >= self.first
        return not self.engaged

    def begin(self) -> bool:
        """Begin a batch; return whether the pipeline starts with it. Raises ConfigError."""
        micro_batches = int(self.engine.micro_batches)
        if micro_batches != self.order.micro_batches:
            check_micro_batches(self.settings, stages_of(self.engine))
            self.drain("for another number of micro-batches")
            self.order = self._new_order()
        begins, self._is_running = not self._is_running, True
        self.data.begin(begins)
        if begins:
            self.order.begin(self.versions.newest)
        return begins

    def drain(self, why: str) -> None:
        """Drop passes computed ahead; the first stage runs them again. Called on all stages.

        ``why``: printed on rank 0, unless the pipeline has not started.
        """
        if not self._is_running:
            return
        say(f"the pipeline is drained {why}, and starts again")
        self._is_running = False
        self.drains += 1
        self._reported = 0
        self.posts.drain()
        self.order.begin(self.versions.newest)
        self.versions.drop()
        self.data.replay()
        self._forget_passes()

    def _forget_passes(self) -> None:
        """Free the activations of the passes under way."""
        for slots in self.engine.pipe_buffers.values():
            slots[:] = [None] * len(slots)

    def row(self) -> dict[str, float] | None:
        """Return a report's figures, maxima so far; None if no batch ran since the last report."""
        if self.order.backwarded == self._reported:
            return None
        self._reported = self.order.backwarded
        late, held = self.order.staleness, self.versions.most_held
        return {"staleness": float(late), "held": float(held), "drains": float(self.drains)}

    def close(self) -> None:
        """Free weights, hooks and passes under way. Sends no message.

        The passes' autograd graphs hold the versions; the garbage collector does not see into them
        and would keep the whole engine.
        """
        self._forget_passes()
        if self.correction is not None:
            self.correction.close()
        self.versions.drop()

    # one batch

    def instructions(self) -> Iterator[Instructions]:
        """Yield upstream's instructions for one batch, each inside the context that it needs."""
        engine, order = self.engine, self.order
        last = order.backwarded + order.micro_batches
        if not engine.is_first_stage():
            self.posts.expect("forward", last + self.ahead + self.posts.depth)
        if not engine.is_last_stage():
            self.posts.expect("backward", last)
        for is_forward in order.batch():
            if is_forward:
                yield from self._forward(order.forwarded % self.buffers, order.forwarded >= last)
            else:
                yield from self._backward(order.backwarded % self.buffers)
        yield [schedule.ReduceTiedGrads(), schedule.ReduceGrads()]
        self.versions.before_step(order.needed(self.versions.newest))
        with self._own_step():
            yield [schedule.OptimizerStep()]
        self.versions.after_step()

    def _forward(self, buffer: int, is_ahead: bool) -> Iterator[Instructions]:
        """Receive, load, run and send the next micro-batch's forward pass."""
        engine = self.engine
        if not engine.is_first_stage():
            yield [schedule.RecvActivation(buffer)]
            self.posts.end_receive("forward")
        if engine.is_first_stage() or engine.is_last_stage():
            with self.data.reading(is_ahead):
                yield [schedule.LoadMicroBatch(buffer)]
        weights = self.versions.at(self.order.forward(self.versions.newest))
        if self.correction is not None and self.correction.needs_own_weights:
            weights = self.correction.forward_weights(self.versions.parameters) or weights
        with self.versions.forward(weights):
            yield [schedule.ForwardPass(buffer)]
        if not engine.is_last_stage():
            yield [schedule.SendActivation(buffer)]
            self.posts.end_send("forward", self.ahead + 2 * self.posts.depth)

    def _backward(self, buffer: int) -> Iterator[Instructions]:
        """Receive the gradient of the oldest micro-batch, run its backward pass and send on."""
        engine = self.engine
        if not engine.is_last_stage():
            yield [schedule.RecvGrad(buffer)]
            self.posts.end_receive("backward")
        weights = self.versions.at(self.order.backward(self.versions.newest))
        if self.correction is not None and self.correction.needs_own_weights:
            weights = self.correction.backward_weights(self.versions.parameters) or weights
        with self.versions.inside(weights):
            yield [schedule.BackwardPass(buffer)]
        self.data.used()
        if not engine.is_first_stage():
            yield [schedule.SendGrad(buffer)]
            self.posts.end_send("backward", self.ahead + 3 * self.posts.depth)

    @property
    def buffers(self) -> int:
        """Return the number of micro-batches held at once."""
        return max(2, self.ahead + 1)

    @contextmanager
    def _own_step(self) -> Iterator[None]:
        """Correct the step, and make it ask no other stage for norms; restores both afterwards."""
        engine, grid = self.engine, StageGrid(self.engine.mpu)
        with ExitStack() as stack:
            if self.correction is not None:
                stack.enter_context(self.correction.active())
            for owner in (engine, engine.optimizer):
                if getattr(owner, "mpu", None) is not None:
                    stack.enter_context(replaced(owner, "mpu", grid))
            if hasattr(engine.optimizer, "model_parallel_group"):
                group = grid.get_model_parallel_group()
                stack.enter_context(replaced(engine.optimizer, "model_parallel_group", group))
            yield

    # the loss

    def loss(self, original: Callable[[Any], Tensor]) -> Tensor:
        """Return the batch's mean loss, which the last stage posts without waiting.

        ``original``: upstream's ``_aggregate_total_loss``, which broadcasts and waits.
        """
        engine = self.engine
        extra, last = engine.module.get_additional_losses(), engine.num_stages - 1
        names = [] if extra is None else list(extra)
        if engine.is_last_stage():
            with replaced(engine, "is_pipe_parallel", False):  # so that nothing is broadcast
                found = original(engine)
            more = engine.agg_additional_losses or {}
            values = torch.stack([engine.dp_group_loss, found, *more.values()]).float()
            others = [engine.grid.stage_to_global(stage_id=stage) for stage in range(last)]
            self.posts.send_all(values, others)
            return found
        values = torch.zeros(2 + len(names), device=engine.device, dtype=torch.float32)
        self.posts.receive_all(values, engine.grid.stage_to_global(stage_id=last))
        engine.dp_group_loss, found = values[0].clone(), values[1].clone()
        if names:
            engine.agg_additional_losses = dict(zip(names, values[2:].clone(), strict=True))
        return found


def start(engine: Any, channel: Channel, settings: AsyncPipelineConfig) -> AsyncPipeline:
    """Check ``engine``, make the groups of its messages, and return its pipeline; a collective.

    Raises ConfigError.
    """
    check(engine, settings)
    if settings.versions == 2 and settings.correction == "none" and is_adam(engine):
        say(
            "pipeline.versions 2 with Adam is known to lose by gradients that are one step late; "
            'try "stash", a correction, NAdam, or "flush", and compare losses'
        )
    grid, mine = engine.module._grid, {}
    ways: tuple[Direction, ...] = DIRECTIONS
    for way in ways:
        for ranks in grid._topo.get_axis_comm_lists("pipe"):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mine[way] = group
    stage, last, sources = engine.module.stage_id, engine.module.num_stages - 1, {}
    if stage > 0:
        sources[ways[0]] = int(grid.stage_to_global(stage_id=stage - 1))
    if stage < last:
        sources[ways[1]] = int(grid.stage_to_global(stage_id=stage + 1))
    posts = PostedMessages(channel, mine, sources, engine.device, 1 + settings.slack)
    return AsyncPipeline(engine, settings, posts)


class BatchSchedule(schedule.PipeSchedule):  # type: ignore[misc]
    """One batch of a pipeline that does not wait, in the form of upstream's schedules."""

    def __init__(self, pipeline: AsyncPipeline) -> None:
        engine = pipeline.engine
        super().__init__(engine.micro_batches, engine.num_stages, engine.stage_id)
        self._pipeline = pipeline

    def steps(self) -> Iterator[Instructions]:
        """Yield the instructions."""
        return self._pipeline.instructions()

    def num_pipe_buffers(self) -> int:
        """Return the number of micro-batches held at once."""
        return self._pipeline.buffers
