"""Cuts and recomputation of a layout: the model's layers on its stages, within their memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hybridcomp.errors import HybridcompError
from hybridcomp.plan.algorithms import cuts, ideals
from hybridcomp.plan.algorithms.recompute import Stored, cheapest_recomputation
from hybridcomp.plan.choices import NATIVE, Choices
from hybridcomp.plan.cost.job import Job
from hybridcomp.plan.cost.memory import FP32, device_nbytes, memory_of, states, worst_moment
from hybridcomp.plan.cost.schedule import in_flight
from hybridcomp.plan.cost.work import Stage, Work, work_of
from hybridcomp.plan.layout import Layout, even_cuts
from hybridcomp.plan.machines.figures import Figure
from hybridcomp.plan.models.model import Layer
from hybridcomp.policy import DIRECTIONS

#: limits of one pass under which recomputation is searched, where several are in flight
LIMITS = 8


@dataclass(frozen=True)
class Reserve:
    """Bytes that are kept free: of a parameter, for what codecs keep, and of a rank."""

    of_parameter: float = 0.0


@dataclass(eq=False)
class Placer:
    """Places layouts; equal questions are answered once."""

    job: Job
    _cuts: dict[tuple[object, ...], cuts.Cuts | None] = field(default_factory=dict)
    _segments: dict[tuple[object, ...], tuple[tuple[int, int], ...] | None] = field(
        default_factory=dict
    )

    def places(self, layout: Layout, feedback: bool) -> Iterator[Work]:
        """Cut and recomputed forms of ``layout`` that fit, without what codecs keep.

        feedback: whether one more is made that leaves room for residuals.
        """
        seen: set[Layout] = set()
        free = self._cut(layout, None, False)  # as if memory were endless
        for reserve in (Reserve(), Reserve(FP32)) if feedback else (Reserve(),):
            if free is not None and not self.job.limits.fixed.get("recompute"):
                work = work_of(self.job, free)
                if self._fits(work, reserve):
                    if work.layout not in seen:
                        seen.add(work.layout)
                        yield work
                    continue
            for lean in (False, True) if self.job.limits.recompute else (False,):
                found = self._place(layout, reserve, lean)
                if found is not None and found.layout not in seen:
                    seen.add(found.layout)
                    yield found

    def cut(self, layout: Layout) -> Layout:
        """``layout`` with the fastest cuts that there are if memory is endless."""
        found = self._cut(layout, None, False)
        assert found is not None  # endless memory, and no more stages than layers
        return found

    def least_nbytes(self, layout: Layout) -> float:
        """What the fullest rank needs if everything is recomputed and cuts are even."""
        depth = self.job.model.depth
        recompute = ((0, depth),) if self.job.limits.recompute else ()
        per_layer = tuple((n, n + 1) for start, stop in recompute for n in range(start, stop))
        even = layout.replace(cuts=even_cuts(depth, layout.stages * layout.virtual),
                              recompute=per_layer, nodes=())  # fmt: skip
        work = work_of(self.job, even)
        return max(
            device_nbytes(memory_of(self.job, work, stage, Choices()))
            for stage in range(layout.stages)
        )

    def _place(self, layout: Layout, reserve: Reserve, lean: bool) -> Work | None:
        """The best cuts with everything kept, or (lean) with what has to be recomputed."""
        cut = self._cut(layout, reserve, lean)
        if cut is None:
            return None
        if "recompute" in self.job.limits.fixed:
            given = tuple(map(tuple, self.job.limits.fixed["recompute"]))
            cut = cut.replace(recompute=given)
            work = work_of(self.job, cut)
            return work if self._fits(work, reserve) else None
        work = work_of(self.job, cut)
        if self._fits(work, reserve):
            return work
        return self._recomputed(work, reserve) if lean else None

    def _fits(self, work: Work, reserve: Reserve) -> bool:
        return all(
            self._nbytes(work, stage, reserve) <= self.job.capacity
            for stage in range(work.layout.stages)
        )

    def _nbytes(self, work: Work, stage: int, reserve: Reserve) -> float:
        own = work.stages[stage]
        more = reserve.of_parameter * (own.dense + own.experts)
        return device_nbytes(memory_of(self.job, work, stage, Choices())) + more

    def _cut(self, layout: Layout, reserve: Reserve | None, lean: bool) -> Layout | None:
        """The layout with its cuts, without a reserve those of endless memory; None: none fits."""
        depth = self.job.model.depth
        if given := self.job.limits.fixed.get("cuts"):
            return layout.replace(cuts=tuple(given)) if sum(given) == depth else None
        if layout.stages == 1:
            return layout.replace(cuts=(depth,))
        if layout.virtual > 1:
            # chunks alternate between the stages: blocks evenly, as the engine wants them
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
        starts = (0, *found.stops)
        sizes = [b - a for a, b in zip(starts, found.stops, strict=False)]
        return layout.replace(cuts=tuple(sizes))

    def _chain_cuts(self, layout: Layout, reserve: Reserve | None, lean: bool) -> cuts.Cuts | None:
        key: tuple[object, ...] = layout, reserve, lean
        if reserve is None:  # what is replicated how does not matter
            key = (self.job.shape(layout), layout.stages, layout.accumulation, None,
                   tuple(self._devices(layout, reserve)))  # fmt: skip
        if key not in self._cuts:
            fastest = max(range(layout.ranks), key=self.job.cluster.speeds.__getitem__)
            layers = [
                cuts.Layer(
                    self._layer_seconds(layout, layer, fastest),
                    self._layer_nbytes(layout, layer, reserve),
                    0.0 if reserve is None else layer.input_nbytes if lean else layer.kept_nbytes,
                    self._send_seconds(layout, layer),
                )
                for layer in self.job.layers(layout)
            ]
            self._cuts[key] = cuts.stage_cuts(
                layers, self._devices(layout, reserve), layout.accumulation, any_order=False
            )
        return self._cuts[key]

    def _devices(self, layout: Layout, reserve: Reserve | None) -> list[cuts.Device]:
        room = float("inf") if reserve is None else self.job.capacity
        speeds = self.job.cluster.speeds
        top = max(speeds[: layout.ranks])
        return [
            cuts.Device(speeds[self.job.slowest_rank(layout, stage)] / top, room)
            for stage in range(layout.stages)
        ]

    def _layer_seconds(self, layout: Layout, layer: Layer, rank: int) -> float:
        """Forward and backward, with its native messages, on the fastest rank."""
        seconds = sum(figure.value for figure in self.job.compute(layer, rank))
        for messages, way in ((layer.forward, "forward"), (layer.backward, "backward")):
            for item in self.job.layer_items(layout, 0, messages, way):  # type: ignore[arg-type]
                price = self.job.prices.of(item.call, NATIVE, item.dtype)
                seconds += item.count * price.seconds.value
        return seconds

    def _layer_nbytes(self, layout: Layout, layer: Layer, reserve: Reserve | None) -> float:
        if reserve is None:
            return 0.0
        alone = Stage(
            0, (), (), (), (), (), Figure(0.0, 0.0, 0.0), layer.parameters,
            layer.expert_parameters, ((0, layer),),
        )  # fmt: skip
        values = layer.parameters + layer.expert_parameters
        return device_nbytes(states(self.job, layout, alone)) + reserve.of_parameter * values

    def _send_seconds(self, layout: Layout, layer: Layer) -> float:
        return sum(
            self.job.prices.of(item.call, NATIVE, item.dtype).seconds.value
            for way in DIRECTIONS
            for item in self.job.sends(layout, 0, layer.output, way)
        )

    def _split(self, layout: Layout, reserve: Reserve | None) -> Layout | None:
        """Stages of a model that is no chain."""
        fastest = max(range(layout.ranks), key=self.job.cluster.speeds.__getitem__)
        nodes = [
            ideals.Node(
                self._layer_seconds(layout, layer, fastest),
                self._layer_nbytes(layout, layer, reserve)
                + (0.0 if reserve is None else layer.kept_nbytes),
                layer.inputs,
                self._send_seconds(layout, layer),
            )
            for layer in self.job.layers(layout)
        ]
        try:
            found = ideals.graph_split(nodes, self._devices(layout, reserve))
        except HybridcompError:
            return None  # too wide to be split exactly
        if found is None or not all(found.stages):
            return None
        return layout.replace(
            cuts=tuple(map(len, found.stages)), nodes=tuple(map(tuple, found.stages))
        )

    def _recomputed(self, work: Work, reserve: Reserve) -> Work | None:
        """The work with the cheapest segments on every stage that is too full."""
        segments: list[tuple[int, int]] = []
        for stage, own in enumerate(work.stages):
            room = self.job.capacity - self._nbytes(work, stage, reserve)
            if room >= 0:
                continue
            found = self._segments_of(work.layout, stage, own, room)
            if found is None:
                return None
            numbers = [number for number, _ in own.layers]
            for start, stop in found:
                segments += _contiguous(numbers[start:stop])
        layout = work.layout.replace(recompute=tuple(sorted(segments)))
        done = work_of(self.job, layout)
        return done if self._fits(done, reserve) else None

    def _segments_of(
        self, layout: Layout, stage: int, own: Stage, room: float
    ) -> tuple[tuple[int, int], ...] | None:
        """Segments of a stage, by places in it, that save ``-room`` bytes in the least seconds."""
        layers = [layer for _, layer in own.layers]
        flying = in_flight(stage, layout.stages, layout.virtual, layout.accumulation)
        others = max(0.0, flying / layout.virtual - 1)
        key = tuple(layers), others, round(room), layout.micro_batch
        if key not in self._segments:
            stored = [
                Stored(self.job.compute(layer, own.rank)[0].value, layer.kept_nbytes,
                       layer.input_nbytes, layer.work_nbytes)
                for layer in layers
            ]  # fmt: skip
            width = self.job.dtype.itemsize
            limit = _need(layers, (), others, width) + room
            self._segments[key] = _cheapest(stored, layers, others, width, limit)
        return self._segments[key]


def _contiguous(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of numbers that follow each other (virtual stages have gaps)."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def _need(
    layers: Sequence[Layer], segments: Sequence[tuple[int, int]], others: float, width: int
) -> float:
    """Bytes of activations with ``others`` more micro-batches in flight."""
    starts, kept, position = dict(segments), 0.0, 0
    while position < len(layers):
        layer = layers[position]
        kept += layer.input_nbytes if position in starts else layer.kept_nbytes
        position = starts.get(position, position + 1)
    return others * kept + worst_moment(layers, segments, width, grows=False).activations


def _cheapest(
    stored: Sequence[Stored], layers: Sequence[Layer], others: float, width: int, limit: float
) -> tuple[tuple[int, int], ...] | None:
    """The fewest seconds whose need stays within ``limit``.

    The dynamic program knows one pass. What the others in flight keep shrinks with what it may
    take, so several limits are tried, and what it finds is counted in full. Single layers from the
    front, as Megatron's "block" does it, are candidates as well.
    """
    tried = [tuple((n, n + 1) for n in range(count)) for count in range(len(layers) + 1)]
    for step in range(1, LIMITS + 1) if others else (LIMITS,):
        found = cheapest_recomputation(stored, limit * step / LIMITS)
        if found is not None:
            tried.append(tuple(found.segments))
    seconds = [layer.forward_seconds for layer in stored]
    fitting = [
        (sum(sum(seconds[start:stop]) for start, stop in segments), segments)
        for segments in tried
        if _need(layers, segments, others, width) <= limit
    ]
    return min(fitting)[1] if fitting else None
