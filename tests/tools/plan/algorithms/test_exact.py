"""The dynamic programs against exhaustive search."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, product

import pytest

from hybridcomp.errors import HybridcompError
from hybridcomp.tools.plan.algorithms.cuts import ChainLayer, Device, stage_cuts
from hybridcomp.tools.plan.algorithms.dag_partition import Node, graph_split
from hybridcomp.tools.plan.algorithms.recompute import Stored, cheapest_recomputation
from hybridcomp.tools.plan.cost.memory import worst_moment
from hybridcomp.tools.plan.models.model import ModelLayer

INFINITE = float("inf")


def cut_seconds(
    layers: Sequence[ChainLayer],
    devices: Sequence[Device],
    stops: Sequence[int],
    micro_batches: int,
) -> float:
    """Return seconds of a 1F1B step with these cuts, infinite if a stage does not fit."""
    costs, first = [], 0
    for stage, (device, stop) in enumerate(zip(devices, stops, strict=True)):
        inside = layers[first:stop]
        in_flight = min(micro_batches, len(devices) - stage)
        nbytes = sum(layer.nbytes + in_flight * layer.activation_nbytes for layer in inside)
        if nbytes > device.nbytes:
            return INFINITE
        sent = inside[-1].send_seconds if stop < len(layers) else 0.0
        sent += layers[first - 1].receive_seconds if first else 0.0
        costs.append(sum(layer.seconds for layer in inside) / device.speed + sent)
        first = stop
    return sum(costs) + (micro_batches - 1) * max(costs)


def test_cuts_are_the_best_of_all() -> None:
    draw, fits = random.Random(1), 0
    for _ in range(300):
        # integers: sums are exact in any order
        layers = [
            ChainLayer(*(float(draw.randrange(1, 9)) for _ in range(5)))
            for _ in range(draw.randrange(2, 8))
        ]
        kinds = [Device(2.0 ** draw.randrange(-1, 2), draw.randrange(8, 90)) for _ in range(2)]
        devices = [draw.choice(kinds) for _ in range(draw.randrange(1, 4))]
        micro_batches = draw.choice([1, 2, 8])
        best = min(
            (
                cut_seconds(layers, devices, (*stops, len(layers)), micro_batches)
                for stops in combinations(range(1, len(layers)), len(devices) - 1)
            ),
            default=INFINITE,
        )
        found = stage_cuts(layers, devices, micro_batches)
        assert (found is None) == (best == INFINITE)
        if found is not None:
            fits += 1
            assert cut_seconds(layers, devices, found, micro_batches) == best
    assert fits > 150


def split_seconds(
    nodes: Sequence[Node], devices: Sequence[Device], stage_of: Sequence[int]
) -> float:
    """Return the slowest stage's time, infinite if one does not fit or an edge goes back."""
    costs = []
    for node, stage in zip(nodes, stage_of, strict=True):
        if any(stage_of[source] > stage for source in node.inputs):
            return INFINITE
    for stage, device in enumerate(devices):
        inside = [index for index in range(len(nodes)) if stage_of[index] == stage]
        if sum(nodes[index].nbytes for index in inside) > device.nbytes:
            return INFINITE
        read = {
            source for index in inside for source in nodes[index].inputs
            if stage_of[source] < stage
        }  # fmt: skip
        work = sum(nodes[index].seconds for index in inside) / device.speed
        costs.append(work + sum(nodes[source].send_seconds for source in read))
    return max(costs)


def random_graph(draw: random.Random, most: int) -> list[Node]:
    return [
        Node(
            float(draw.randrange(1, 9)),
            float(draw.randrange(1, 9)),
            tuple(source for source in range(index) if draw.random() < 0.35),
            float(draw.randrange(3)),
        )
        for index in range(draw.randrange(1, most + 1))
    ]


def test_splits_of_graphs_are_the_best_of_all() -> None:
    draw, fits = random.Random(2), 0
    for index in range(300):
        nodes = random_graph(draw, 10 if index % 10 == 0 else 7)
        stages = 2 if len(nodes) > 7 else draw.randrange(1, 4)
        devices = [
            Device(2.0 ** draw.randrange(-1, 2), float(draw.randrange(8, 60)))
            for _ in range(stages)
        ]
        best = min(
            split_seconds(nodes, devices, stage_of)
            for stage_of in product(range(stages), repeat=len(nodes))
        )
        found = graph_split(nodes, devices)
        assert (found is None) == (best == INFINITE)
        if found is not None:
            fits += 1
            of_node = {node: stage for stage, members in enumerate(found) for node in members}
            assert sorted(sum(found, ())) == list(range(len(nodes)))
            stage_of = [of_node[node] for node in range(len(nodes))]
            assert split_seconds(nodes, devices, stage_of) == best
    assert fits > 150


def test_graphs_that_cannot_be_split_are_told() -> None:
    with pytest.raises(HybridcompError, match=r"node 0: inputs must be smaller indices.*\(1,\)"):
        graph_split([Node(1.0, inputs=(1,)), Node(1.0)], [Device()])
    with pytest.raises(HybridcompError, match="a graph of 40 nodes with more than 20000 ideals"):
        graph_split([Node(1.0)] * 40, [Device()])


def peak(layers: Sequence[Stored], segments: Sequence[tuple[int, int]]) -> float:
    """Return the peak bytes of the memory model for these layers."""
    whole = [
        ModelLayer("m", "module", 0, 0, 0, 0, 0, one.nbytes, one.input_nbytes, one.work_nbytes, 0)
        for one in layers
    ]
    return worst_moment(whole, segments, 2, grows=False).activations


def segmentations(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield every choice of segments to recompute."""
    for marks in product((0, 1, 2), repeat=count):  # kept, begins a segment, continues it
        segments: list[tuple[int, int]] = []
        valid = True
        for index, mark in enumerate(marks):
            if mark == 1:
                segments.append((index, index + 1))
            elif mark == 2:
                if not segments or segments[-1][1] != index:
                    valid = False
                    break
                segments[-1] = (segments[-1][0], index + 1)
        if valid:
            yield segments


def test_recomputation_is_the_best_of_all() -> None:
    draw, recomputed = random.Random(3), 0
    for _ in range(200):
        layers = [
            Stored(*(float(draw.randrange(*span)) for span in ((1, 9), (4, 20), (1, 5), (0, 6))))
            for _ in range(draw.randrange(1, 7))
        ]
        limit = draw.uniform(0.3, 1.1) * peak(layers, [])

        def seconds(segments: Sequence[tuple[int, int]], layers: list[Stored] = layers) -> float:
            return sum(
                one.forward_seconds for start, stop in segments for one in layers[start:stop]
            )

        every = segmentations(len(layers))
        fitting = [seconds(some) for some in every if peak(layers, some) <= limit]
        found = cheapest_recomputation(layers, limit)
        assert (found is None) == (not fitting)
        if found is not None:
            assert seconds(found) == min(fitting) and peak(layers, found) <= limit
            recomputed += bool(found)
    assert recomputed > 50
