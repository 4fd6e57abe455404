"""List the compute and the messages of every stage of a layout in one step.

Nothing in this module depends on the choices: a search prices the same messages under many choices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from hybridcomp.autotune.zero3_moves import Knobs
from hybridcomp.dimensions import DIRECTIONS, Direction, Key
from hybridcomp.tools.plan.choices import NATIVE, Choice, Choices
from hybridcomp.tools.plan.cost import fully_shard
from hybridcomp.tools.plan.cost.calls import EngineCall, Price
from hybridcomp.tools.plan.cost.copies import Whole, whole_of
from hybridcomp.tools.plan.cost.gathers import DEFAULT, Gathered, ModelPass
from hybridcomp.tools.plan.cost.job import Item, PlannedJob
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.machines.estimates import NOTHING, Estimate
from hybridcomp.tools.plan.models.model import ModelLayer

Items = tuple[Item, ...]
#: codec of the messages between nodes that update a secondary copy (``COPIED``: of its gathers)
STEPS = Choice.of("stepcode")
#: codec in which ranks keep frozen weights
KEPT = Choice.of("expcode")
COPIED = {"native": NATIVE, "exact": NATIVE, "bits8": Choice.of({"codec": "blockint", "bits": 8})}


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of one chunk over one micro-batch.

    compute: seconds. items: messages that the pass waits for. sent: messages to the next stage.
    """

    compute: Estimate
    items: Items
    sent: Items


@dataclass(frozen=True)
class StageWork:
    """Compute and messages of the slowest rank of a stage.

    forward, backward: by virtual stage. micro: reductions and gathers of every micro-batch (ZeRO 2
    and 3). reduce, gather: messages once a step. adam: seconds of the optimizer. dense, experts:
    number of this rank's parameters outside and in experts. layers: the stage's layers with their
    numbers in the model, by virtual stage. copies: copies between device and host, once a step.
    """

    rank: int
    forward: tuple[Pass, ...]
    backward: tuple[Pass, ...]
    micro: Items
    reduce: Items
    gather: Items
    adam: Estimate
    dense: float
    experts: float
    layers: tuple[tuple[int, ModelLayer], ...]
    copies: Items = ()

    @property
    def trained(self) -> tuple[float, float]:
        """Return how many parameters of ``dense`` and of ``experts`` this rank trains."""
        layers = [layer for _, layer in self.layers]
        dense = _mean((layer.parameters, layer.frozen) for layer in layers)
        experts = _mean((layer.expert_parameters, layer.frozen) for layer in layers)
        return self.dense * (1 - dense), self.experts * (1 - experts)

    def messages(self) -> Iterator[tuple[Items, bool]]:
        """Yield all messages, with True if they are sent once per step, False if more often."""
        for one in (*self.forward, *self.backward):
            yield from ((one.items, False), (one.sent, False))
        yield self.micro, False
        yield from ((items, True) for items in (self.reduce, self.gather, self.copies))

    @property
    def compute(self) -> float:
        """Return the compute seconds of one micro-batch."""
        return sum(one.compute.value for one in (*self.forward, *self.backward))


def _mean(found: Iterable[tuple[float, float]]) -> float:
    """Return the mean of the second numbers, weighted by the first; 0 if all weights are 0."""
    values, product = 0.0, 0.0
    for weight, share in found:
        values, product = values + weight, product + weight * share
    return product / values if values else 0.0


@dataclass(frozen=True)
class Work:
    """All stages of a layout."""

    layout: Layout
    stages: tuple[StageWork, ...]


def work_of(job: PlannedJob, layout: Layout) -> Work:
    """Build the stages of ``layout``, whose cuts must be known."""
    layers = job.layers(layout)
    return Work(layout, tuple(_stage(job, layout, index, layers) for index in range(layout.stages)))


def divided(job: PlannedJob, work: Work, layout: Layout) -> Work:
    """Return ``work`` with the ``ratio``, ``sub_group`` and ``knobs`` of ``layout``."""
    stages = (_with_step(job, layout, index, one) for index, one in enumerate(work.stages))
    return Work(layout, tuple(stages))


def _stage(job: PlannedJob, layout: Layout, index: int, layers: Sequence[ModelLayer]) -> StageWork:
    rank = job.slowest_rank(layout, index)
    own = layout.chunks(index)
    forward, backward = (
        tuple(
            _pass(job, layout, index, rank, layers, chunk, index + place * layout.stages, way)
            for place, chunk in enumerate(own)
        )
        for way in DIRECTIONS
    )
    held = tuple((number, layers[number]) for chunk in own for number in chunk)
    dense = sum(layer.parameters for _, layer in held)
    experts = sum(layer.expert_parameters for _, layer in held)
    if layout.stages == 1:
        dense -= job.model.shared(job.shape(layout))
    return _with_step(job, layout, index, StageWork(
        rank, forward, backward, (), (), (), NOTHING, dense, experts, held,
    ))  # fmt: skip


def _pass(
    job: PlannedJob, layout: Layout, stage: int, rank: int, layers: Sequence[ModelLayer],
    chunk: Sequence[int], number: int, way: Direction,
) -> Pass:  # fmt: skip
    """Build a pass of chunk ``number``; backward also runs recomputed layers forward."""
    own, again, sent = [layers[one] for one in chunk], list[ModelLayer](), list[Item]()
    compute = Estimate.total(job.compute(one, rank)[DIRECTIONS.index(way)] for one in own)
    if way == "forward" and number + 1 < layout.stages * layout.virtual:
        sent = job.sends(layout, stage, crossing(layout, layers, number), way)
    elif way == "backward":
        again = [layers[one] for one in chunk if one in layout.recomputed]
        compute = compute.plus(Estimate.total(job.compute(one, rank)[0] for one in again))
        if number and layers[min(chunk) - 1].frozen < 1:
            sent = job.sends(layout, stage, crossing(layout, layers, number - 1), way)
    items = _messages(job, layout, stage, own, way)
    items += _messages(job, layout, stage, again, "forward")
    return Pass(compute, merged(items), merged(sent))


def _messages(
    job: PlannedJob, layout: Layout, stage: int, layers: Sequence[ModelLayer], way: Direction
) -> list[Item]:
    """Return the messages of ``layers`` in one pass; equal layers share an item."""
    counts = Counter(layer.forward if way == "forward" else layer.backward for layer in layers)
    return [
        replace(item, count=item.count * count)
        for messages, count in counts.items()
        for item in job.layer_items(layout, stage, messages, way)
    ]


def crossing(layout: Layout, layers: Sequence[ModelLayer], number: int) -> float:
    """Return the number of values that chunk ``number`` sends to the next chunk.

    In a chain these are the chunk's last output; in a graph, all outputs that later stages read,
    since stages send to neighbours only.
    """
    if not layout.nodes:
        return layers[sum(layout.cuts[: number + 1]) - 1].output
    early = {node for stage in layout.nodes[: number + 1] for node in stage}
    late = {node for stage in layout.nodes[number + 1 :] for node in stage}
    read = {source for node in late for source in layers[node].inputs}
    return sum(layers[node].output for node in early & read)


def _with_step(job: PlannedJob, layout: Layout, index: int, stage: StageWork) -> StageWork:
    """Return ``stage`` with the reductions, gathers, optimizer and copies of a step."""
    dense, experts = stage.trained
    # frozen parameters are gathered only at ZeRO 3, where ranks hold shards of them
    used = (stage.dense, stage.experts) if layout.zero_stage == 3 else stage.trained
    reduce = job.gradient_items(layout, index, dense, "replicas")
    gather = job.gather_items(layout, index, used[0], "replicas")
    if used[1]:
        # the experts of a rank have replicas on every ``expert``-th data rank only
        outer = layout.replace(data=layout.data // layout.expert, expert=1)
        reduce += job.gradient_items(outer, 0, experts, "replicas")
        gather += job.gather_items(outer, 0, used[1], "replicas")
    reduce = [item for item in reduce if item.call.ranks > 1]
    gather = [item for item in gather if item.call.ranks > 1 and job.sharded(layout)]
    if (
        job.model.shared(job.shape(layout))
        and layout.stages > 1
        and (index in (0, layout.stages - 1))
    ):  # first and last stage hold the weight
        nodes, sites = (min(2, count) for count in job.groups.of(layout, "pipeline"))
        numel = job.model.shared(job.shape(layout)) * (1 - stage.layers[0][1].frozen)
        call = EngineCall("all_reduce", numel, 2, nodes, sites=sites)
        reduce.append(Item(("dp", "forward"), call, job.gradient_dtype, fixed=NATIVE))
    micro: list[Item] = []
    each, reduce = _each_micro(layout, reduce)
    if layout.zero_stage == 3 and job.limits.engine == "fsdp2":
        micro, reduce, gather = _fully_sharded(job, layout, stage)
    elif layout.zero_stage == 3:
        per_layer = max(1.0, len(stage.layers) / max(1, len(gather)))
        times = gathered(job, layout, stage).times
        parts = [_in_parts(item, per_layer) for item in gather]
        gather = []
        if layout.hpz > 1:
            trained, frozen = _divided(stage, parts)
            micro = each + _inside(layout, trained, times, 1)
            micro += _inside(layout, frozen, times, 0)
            gather = _crossing(layout, trained)
        else:
            if layout.frozen == "device":
                trained, frozen = _divided(stage, parts)
                parts = trained + [replace(one, call=_opened(one), fixed=KEPT) for one in frozen]
            micro = each + [replace(one, count=one.count * times) for one in parts]
    elif layout.zero_stage == 2 and job.limits.engine != "megatron":
        micro = each
    else:
        reduce = each
    own = (dense + experts) / (layout.owners if job.sharded(layout) else 1)
    copies: list[Item] = []
    adam = job.adam(own, stage.rank, layout.offload)
    if layout.offload:
        share = on_host(job, layout, stage)
        whole = _whole(job, layout, stage)
        copies = job.copy_items(layout, own, len(stage.layers), whole, share)
        if share < 1:  # sub-groups step one after the other
            adam = job.adam(share * own, stage.rank, True).plus(
                job.adam((1 - share) * own, stage.rank))  # fmt: skip
    return replace(
        stage,
        micro=merged(micro),
        reduce=merged(reduce),
        gather=merged(gather),
        adam=adam,
        copies=merged(copies),
    )


def _fully_sharded(
    job: PlannedJob, layout: Layout, stage: StageWork
) -> tuple[list[Item], list[Item], list[Item]]:
    """Return FSDP2's messages of a micro-batch, and its reductions and its gathers once a step."""
    held = stage.layers, stage.dense + stage.experts
    reduces, gathers = fully_shard.messages(job, layout, *held)
    each, reduce = _each_micro(layout, reduces)
    if layout.shards > 1:
        each, reduce = reduces, fully_shard.sums_of_replicas(job, layout, *held)
        if layout.accumulate == "native":
            each, reduce = each + reduce, []
    if layout.hpz == 1:
        if layout.frozen == "device":
            gathers, frozen = _divided(stage, gathers)
            gathers += [replace(one, call=_opened(one), fixed=KEPT) for one in frozen]
        return _sent(each + gathers), _sent(reduce), []
    once = [replace(one, count=1.0) for one in gathers]
    for one, again in zip(once, gathers, strict=True):
        # each micro-batch's forward gather crosses nodes, unless hybridcomp keeps copies in nodes
        each += _inside(layout, [one], again.count, layout.accumulation)
    if layout.copy == "native":
        return _sent(each + once), _sent(reduce), []
    return _sent(each), _sent(reduce), _crossing(layout, _divided(stage, once)[0])


def _sent(items: list[Item]) -> list[Item]:
    """Return the items with values to send and more than one rank."""
    return [item for item in items if item.call.ranks > 1 and item.call.numel]


def model_pass(job: PlannedJob, layout: Layout, stage: StageWork) -> ModelPass:
    """Return the parameters of a stage in the order in which a micro-batch uses them."""
    tied = layout.stages == 1 and bool(job.model.shared(job.shape(layout)))
    return ModelPass.of([layer for _, layer in stage.layers], layout.recompute, tied)


def gathered(job: PlannedJob, layout: Layout, stage: StageWork) -> Gathered:
    """Return the gathers of a micro-batch at ZeRO 3, and the most values gathered at once."""
    if job.limits.engine == "fsdp2":
        values = stage.dense + stage.experts
        return Gathered(0.0, fully_shard.gathered_values(job, layout, stage.layers, values))
    knobs = Knobs(*layout.knobs) if layout.knobs else DEFAULT
    return model_pass(job, layout, stage).gathered(knobs)


def on_host(job: PlannedJob, layout: Layout, stage: StageWork) -> float:
    """Return the fraction of a rank's parameters whose optimizer steps on the host."""
    if not layout.offload or layout.ratio == 1:
        return float(layout.offload)
    model, ranks = model_pass(job, layout, stage), layout.size("replicas")
    return model.on_host(ranks, layout.ratio, layout.sub_group)


def _each_micro(layout: Layout, reduce: list[Item]) -> tuple[list[Item], list[Item]]:
    """Return the reductions of every micro-batch, and those of a step, at ZeRO 2 and 3.

    With sums inside nodes, all micro-batches but the last send only inside nodes.
    """
    if layout.accumulate == "native":
        return reduce, []
    share = 1 - 1 / layout.accumulation
    inside = []
    for one in reduce:
        call = EngineCall("all_to_all", one.call.numel, _width(one), 1)
        inside.append(replace(one, call=call, count=share * one.count, fixed=NATIVE))
    return inside, reduce


def _width(item: Item) -> int:
    """Return how many ranks of a message's group share a node."""
    assert isinstance(item.call, EngineCall)
    return item.call.ranks // item.call.nodes


def _whole(job: PlannedJob, layout: Layout, stage: StageWork) -> Whole:
    """Return the sizes of parameters of which a rank owns a part (``whole_of``)."""
    if layout.zero_stage != 2 or layout.accumulation == 1:
        return Whole()
    layers = [layer for _, layer in stage.layers]
    tensors = [layer.tensors or (layer.parameters,) for layer in layers]
    if layout.stages == 1 and job.model.shared(job.shape(layout)):
        tensors[-1] = tuple(sorted(tensors[-1])[:-1])  # the head's weight is the embedding's
    experts = (layer.expert_tensors or (layer.expert_parameters,) for layer in layers)
    replicas = layout.size("replicas")
    return whole_of((
        (tuple(chain.from_iterable(tensors)), replicas),
        (tuple(chain.from_iterable(experts)), max(1, replicas // layout.expert)),
    ))  # fmt: skip


def _divided(stage: StageWork, parts: Sequence[Item]) -> tuple[list[Item], list[Item]]:
    """Divide gathers into gathers of trained and of frozen weights."""
    trained = sum(stage.trained) / (stage.dense + stage.experts)

    def part(share: float) -> list[Item]:
        found = [(one, replace(one.call, numel=share * one.call.numel)) for one in parts if share]
        return [replace(one, call=call) for one, call in found]

    return part(trained), part(1 - trained)


def _opened(item: Item) -> EngineCall:
    """Return the call that decodes a rank's kept weights instead of gathering them."""
    assert isinstance(item.call, EngineCall)
    return replace(item.call, kept=True)


def _inside(layout: Layout, parts: Sequence[Item], times: float, renewed: int) -> list[Item]:
    """Return the gathers of a micro-batch inside a node, from its secondary copy.

    The first gather of a step, which crosses nodes, makes DeepSpeed's own copy of trained weights
    (``renewed``: 1); the copy of frozen weights stays from step to step.
    """
    count = times
    if layout.copy == "native":
        count -= renewed / layout.accumulation
    how = COPIED[layout.copy]
    found = []
    for one in parts if count else ():
        call = EngineCall("all_gather", one.call.numel, layout.hpz, 1)
        found.append(replace(one, call=call, count=one.count * count, fixed=how))
    return found


def _crossing(layout: Layout, parts: Sequence[Item]) -> list[Item]:
    """Return the messages between nodes once a step: whole gathers, or updates of the copies.

    Each rank gets the updates of its part of the copy from one rank of each other node. Updates in
    8 bits are priced as exact updates, of which they are a part.
    """
    if layout.copy == "native":
        return list(parts)
    found = []
    for one in parts:
        nodes = one.call.ranks // layout.hpz
        whole = one.call if isinstance(one.call, EngineCall) else None
        call = EngineCall(
            "all_gather", one.call.numel / layout.hpz, nodes, nodes,
            sites=whole.sites if whole else 1, crosses_for=whole,
        )  # fmt: skip
        found.append(replace(one, call=call, fixed=STEPS))
    return found


def _in_parts(item: Item, parts: float) -> Item:
    """Split a gather into ``parts`` equal messages, as ZeRO 3 gathers layer by layer."""
    call = replace(item.call, numel=item.call.numel * item.count / parts)
    return replace(item, call=call, count=parts)


def merged(items: Iterable[Item]) -> Items:
    """Merge equal messages into one item with their count."""
    counts: dict[Item, float] = {}
    for item in items:
        one = replace(item, count=1.0)
        counts[one] = counts.get(one, 0.0) + item.count
    return tuple(replace(item, count=count) for item, count in counts.items())


@dataclass(frozen=True)
class Ideal:
    """Prices with the fastest coding and the fastest wire of any option, for every message.

    No real choices are faster, so these prices give lower bounds.
    """

    options: tuple[tuple[Key, tuple[Choice, ...]], ...]

    def price(self, job: PlannedJob, item: Item) -> Price:
        """Price an item with the least coding, wire and inside seconds over its options."""
        table = dict(self.options)
        found = [
            job.prices.of(item.call, choice, item.dtype, item.key[0])
            for choice in ((item.fixed,) if item.fixed else table.get(item.key, (NATIVE,)))
        ]
        fastest = Price(
            min(one.coding for one in found),
            min(one.wire for one in found),
            min(one.inside for one in found),
        )
        return fastest.times(item.count)


def price(job: PlannedJob, item: Item, choices: Choices | Ideal) -> Price:
    """Price all messages of one item."""
    if not isinstance(choices, Choices):
        return choices.price(job, item)
    choice = item.fixed or choices[item.key]
    found = job.prices.of(item.call, choice, item.dtype, item.key[0])
    return found.times(item.count)


def layer_seconds(
    job: PlannedJob, layout: Layout, layer: ModelLayer, choices: Choices | Ideal
) -> float:
    """Return seconds of both passes of ``layer`` on the fastest rank, messages included."""
    fastest = max(range(layout.ranks), key=job.cluster.speeds.__getitem__)
    seconds = sum(figure.value for figure in job.compute(layer, fastest))
    for messages, way in zip((layer.forward, layer.backward), DIRECTIONS, strict=True):
        for item in job.layer_items(layout, 0, messages, way):
            seconds += price(job, item, choices).seconds.value
    return seconds


def lands_behind(job: PlannedJob, item: Item, choices: Choices | Ideal) -> bool:
    """Return whether a copy overlaps with the last pass: encoded gradients do, but not on a CPU."""
    encoded = not isinstance(choices, Choices) or not choices[item.key].native
    return encoded and item.key == ("offload", "backward") and not job.on_cpu
