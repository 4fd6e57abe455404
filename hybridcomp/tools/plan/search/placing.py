"""Place a layout: cut the model's layers into stages and recompute some, to fit into memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from hybridcomp.dimensions import DIRECTIONS
from hybridcomp.errors import HybridcompError
from hybridcomp.tools.plan.algorithms import cuts, dag_partition
from hybridcomp.tools.plan.algorithms.recompute import Stored
from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.cost.calls import EngineCall
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.memory import FP32, device_nbytes, memory_of, states
from hybridcomp.tools.plan.cost.schedule import layout_in_flight
from hybridcomp.tools.plan.cost.work import StageWork, Work, layer_seconds, price, work_of
from hybridcomp.tools.plan.engines import RECOMPUTE_REASONS, can_recompute, recomputations, runs
from hybridcomp.tools.plan.layout import Layout, even_cuts
from hybridcomp.tools.plan.machines.estimates import NOTHING
from hybridcomp.tools.plan.models.model import ModelLayer
from hybridcomp.tools.plan.search.recomputing import cheapest, need
from hybridcomp.tools.plan.search.space import UNCUT_ENGINES

#: index of the layer after each stage's last one
Stops = tuple[int, ...]


@dataclass(eq=False)
class Placer:
    """Places layouts, with a cache of cuts and of recomputed segments.

    Its methods take ``reserve``: bytes per parameter to keep free for residuals; None: no limit of
    memory.
    """

    job: PlannedJob
    #: layouts that cannot be placed with any memory, and the reasons
    unable: dict[Layout, str] = field(default_factory=dict)
    _cuts: dict[tuple[object, ...], Stops | None] = field(default_factory=dict)
    _segments: dict[tuple[object, ...], tuple[tuple[int, int], ...] | None] = field(
        default_factory=dict
    )

    def places(self, layout: Layout, feedback: bool) -> Iterator[Work]:
        """Yield ``layout`` with cuts and recomputation that fit, buffers of codecs not counted.

        feedback: also yield forms that leave room for residuals.
        """
        seen: set[Layout] = set()
        free = self._cut(layout, None, False)  # without a limit of memory
        for reserve in (0.0, FP32) if feedback else (0.0,):
            if free is not None and not self.job.limits.fixed.get("recompute"):
                work = work_of(self.job, free)
                if self._fits(work, reserve):
                    if work.layout not in seen:
                        seen.add(work.layout)
                        yield work
                    continue
            for lean in (False, True) if self._may_recompute(layout) else (False,):
                found = self._place(layout, reserve, lean)
                if found is not None and found.layout not in seen:
                    seen.add(found.layout)
                    yield found

    def _may_recompute(self, layout: Layout) -> bool:
        return self.job.limits.recompute and not layout.slices

    def least_nbytes(self, layout: Layout) -> float:
        """Return the fullest rank's bytes with even cuts and, if allowed, all blocks recomputed."""
        depth = self.job.model.depth
        blocks = self.job.model.repeated if self._may_recompute(layout) else range(0)
        per_layer = tuple((n, n + 1) for n in blocks)
        even = layout.replace(cuts=even_cuts(depth, layout.stages * layout.virtual),
                              recompute=per_layer, nodes=())  # fmt: skip
        work = work_of(self.job, even)
        return max(
            device_nbytes(memory_of(self.job, work, stage, Choices()))
            for stage in range(layout.stages)
        )

    def _place(self, layout: Layout, reserve: float, lean: bool) -> Work | None:
        """Find the best cuts with all activations kept, or (lean) with recomputation as needed."""
        cut = self._cut(layout, reserve, lean)
        if cut is None:
            return None
        if "recompute" in self.job.limits.fixed:
            given = tuple(map(tuple, self.job.limits.fixed["recompute"]))
            cut = cut.replace(recompute=given)
            if not can_recompute(self.job.limits.engine, cut, self.job.model.repeated):
                self.unable[layout] = RECOMPUTE_REASONS[self.job.limits.engine]
                return None
            work = work_of(self.job, cut)
            return work if self._fits(work, reserve) else None
        work = work_of(self.job, cut)
        if self._fits(work, reserve):
            return work
        return self._recomputed(work, reserve) if lean else None

    def _fits(self, work: Work, reserve: float) -> bool:
        return all(
            self._nbytes(work, stage, reserve) <= self.job.capacity
            for stage in range(work.layout.stages)
        )

    def _nbytes(self, work: Work, stage: int, reserve: float) -> float:
        own = work.stages[stage]
        more = reserve * (own.dense + own.experts)
        return device_nbytes(memory_of(self.job, work, stage, Choices())) + more

    def _cut(self, layout: Layout, reserve: float | None, lean: bool) -> Layout | None:
        """Return the layout with its cuts; None where none fit."""
        depth = self.job.model.depth
        if given := self.job.limits.fixed.get("cuts"):
            return layout.replace(cuts=tuple(given)) if sum(given) == depth else None
        if layout.stages == 1:
            return layout.replace(cuts=(depth,))
        if layout.virtual > 1:
            # chunks alternate between the stages: the engine wants equal numbers of blocks
            chunks = layout.stages * layout.virtual
            sizes = list(even_cuts(depth - 2, chunks))
            sizes[0] += 1
            sizes[-1] += 1
            return layout.replace(cuts=tuple(sizes))
        if not self.job.model.is_chain:
            return self._split(layout, reserve)
        found = self._chain_cuts(layout, reserve, lean)
        if found is None:
            return None
        return layout.replace(cuts=tuple(b - a for a, b in pairwise((0, *found))))

    def _chain_cuts(self, layout: Layout, reserve: float | None, lean: bool) -> Stops | None:
        key: tuple[object, ...] = layout, reserve, lean
        if reserve is None:  # without a memory limit, replicas and ZeRO do not matter
            key = (self.job.shape(layout), layout.stages, layout.passes, None,
                   tuple(self._devices(layout, reserve)))  # fmt: skip
        if key not in self._cuts:
            lean_ones, limited = self.job.model.repeated if lean else (), reserve is not None
            layers = [
                cuts.ChainLayer(
                    layer_seconds(self.job, layout, layer, Choices()),
                    self._layer_nbytes(layout, layer, reserve),
                    limited * (layer.input_nbytes if number in lean_ones else layer.kept_nbytes),
                    *self._cut_seconds(layout, layer),
                )
                for number, layer in enumerate(self.job.layers(layout))
            ]
            devices = self._devices(layout, reserve)
            self._cuts[key] = cuts.stage_cuts(layers, devices, layout.passes)
        return self._cuts[key]

    def _devices(self, layout: Layout, reserve: float | None) -> list[cuts.Device]:
        room = float("inf") if reserve is None else self.job.capacity
        speeds = self.job.cluster.speeds
        top = max(speeds[: layout.ranks])
        return [
            cuts.Device(speeds[self.job.slowest_rank(layout, stage)] / top, room)
            for stage in range(layout.stages)
        ]

    def _layer_nbytes(self, layout: Layout, layer: ModelLayer, reserve: float | None) -> float:
        if reserve is None:
            return 0.0
        alone = StageWork(
            0, (), (), (), (), (), NOTHING, layer.parameters,
            layer.expert_parameters, ((0, layer),),
        )  # fmt: skip
        values = layer.parameters + layer.expert_parameters
        return device_nbytes(states(self.job, layout, alone)) + reserve * values

    def _cut_seconds(self, layout: Layout, layer: ModelLayer) -> tuple[float, float]:
        """Return the message seconds of the stages before and after a cut that follows ``layer``.

        A stage waits for the messages that it sends. Where messages block, the stage before the cut
        waits for the gradient and until its send returns, the stage after it for both messages.
        """
        ahead, back = self._message_seconds(layout, layer)
        if not self.job.has_blocking_pipeline(layout):
            return ahead, back
        call = self.job.sends(layout, 0, layer.output, "forward")[0].call
        assert isinstance(call, EngineCall)
        share = self.job.cluster.returned(call.numel * self.job.dtype.itemsize, call.nodes)
        return back + share * ahead, ahead + back

    def _message_seconds(self, layout: Layout, layer: ModelLayer) -> tuple[float, float]:
        """Return link seconds of ``layer``'s messages to the next stage and back."""
        ahead, back = (
            sum(
                price(self.job, item, Choices()).seconds.value
                for item in self.job.sends(layout, 0, layer.output, way)
            )
            for way in DIRECTIONS
        )
        return ahead, back

    def _split(self, layout: Layout, reserve: float | None) -> Layout | None:
        """Return ``layout`` with the stages of a model that is no chain; None where none fit."""
        nodes = [
            dag_partition.Node(
                layer_seconds(self.job, layout, layer, Choices()),
                self._layer_nbytes(layout, layer, reserve)
                + (0.0 if reserve is None else layer.kept_nbytes),
                layer.inputs,
                sum(self._message_seconds(layout, layer)),
            )
            for layer in self.job.layers(layout)
        ]
        try:
            found = dag_partition.graph_split(nodes, self._devices(layout, reserve))
        except HybridcompError as error:  # too wide to be split exactly
            self.unable[layout] = str(error)
            return None
        if found is None or not all(found):
            return None
        return layout.replace(cuts=tuple(map(len, found)), nodes=found)

    def _recomputed(self, work: Work, reserve: float) -> Work | None:
        """Return the work with the engine's cheapest recomputation that fits; None without one."""
        if self.job.limits.engine in UNCUT_ENGINES:
            return self._segmented(work, reserve)
        every = recomputations(self.job.limits.engine, work.layout, self.job.model.repeated)
        works = [work_of(self.job, work.layout.replace(recompute=one)) for one in every]
        fitting = [one for one in works if self._fits(one, reserve)]
        return min(fitting, key=_compute, default=None)

    def _segmented(self, work: Work, reserve: float) -> Work | None:
        """Return the work with the cheapest segments on every stage that exceeds its memory."""
        segments: list[tuple[int, int]] = []
        for stage, own in enumerate(work.stages):
            room = self.job.capacity - self._nbytes(work, stage, reserve)
            if room >= 0:
                continue
            found = self._segments_of(work.layout, stage, own, room)
            if found is None:
                return None
            blocks = self.job.model.repeated  # scripts recompute no embedding and no head
            numbers = [number for number, _ in own.layers]
            for start, stop in found:
                segments += runs(n for n in numbers[start:stop] if n in blocks)
        layout = work.layout.replace(recompute=tuple(sorted(segments)))
        done = work_of(self.job, layout)
        return done if self._fits(done, reserve) else None

    def _segments_of(
        self, layout: Layout, stage: int, own: StageWork, room: float
    ) -> tuple[tuple[int, int], ...] | None:
        """Return the fastest segments that save ``-room`` bytes, as indices in the stage."""
        blocks = self.job.model.repeated
        layers = [
            layer
            if number in blocks
            else dataclasses.replace(layer, input_nbytes=layer.kept_nbytes)
            for number, layer in own.layers
        ]
        others = max(0.0, layout_in_flight(layout, stage) / layout.virtual - 1)
        key = tuple(layers), others, round(room), layout.micro_batch
        if key not in self._segments:
            stored = [
                Stored(self.job.compute(layer, own.rank)[0].value, layer.kept_nbytes,
                       layer.input_nbytes, layer.work_nbytes)
                for layer in layers
            ]  # fmt: skip
            width = self.job.dtype.itemsize
            limit = need(layers, (), others, width) + room
            self._segments[key] = cheapest(stored, layers, others, width, limit)
        return self._segments[key]


def _compute(work: Work) -> float:
    """Return the compute seconds of one pass through all stages."""
    return sum(stage.compute for stage in work.stages)
