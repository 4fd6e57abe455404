"""The dynamic programs against exhaustive search."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations, product

import pytest

from hybridcomp.errors import HybridcompError
from hybridcomp.tools.plan.algorithms.cuts import ChainLayer, Device, stage_cuts
from hybridcomp.tools.plan.algorithms.dag_partition import Node, graph_split
from hybridcomp.tools.plan.algorithms.recompute import Stored, cheapest_recomputation, peak_nbytes

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


@pytest.mark.parametrize("any_order", [True, False])
def test_cuts_are_the_best_of_all(any_order: bool) -> None:
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
        orders = set(permutations(devices)) if any_order else {tuple(devices)}
        best = min(
            (
                cut_seconds(layers, order, (*stops, len(layers)), micro_batches)
                for order in orders
                for stops in combinations(range(1, len(layers)), len(devices) - 1)
            ),
            default=INFINITE,
        )
        found = stage_cuts(layers, devices, micro_batches, any_order=any_order)
        if best == INFINITE:
            assert found is None
            continue
        fits += 1
        assert found is not None
        assert found.step_seconds(micro_batches) == best
        assert cut_seconds(layers, found.devices, found.stops, micro_batches) == best
        assert sorted(map(str, found.devices)) == sorted(map(str, devices))
    assert fits > 150


def test_a_slow_device_gets_fewer_layers() -> None:
    found = stage_cuts([ChainLayer(1.0)] * 12, [Device(), Device(0.5)], 64)
    assert found is not None
    sizes = {device.speed: stop - start for device, start, stop in zip(
        found.devices, (0, *found.stops), found.stops, strict=False)}  # fmt: skip
    assert sizes == {1.0: 8, 0.5: 4}


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
        if best == INFINITE:
            assert found is None
            continue
        fits += 1
        assert found is not None and found.slowest == best
        stage_of = [0] * len(nodes)
        for stage, members in enumerate(found.stages):
            for member in members:
                stage_of[member] = stage
        assert sorted(sum(found.stages, ())) == list(range(len(nodes)))
        assert split_seconds(nodes, devices, stage_of) == best
    assert fits > 150


def test_graphs_that_cannot_be_split_are_told() -> None:
    with pytest.raises(HybridcompError, match=r"node 0: inputs must be smaller indices.*\(1,\)"):
        graph_split([Node(1.0, inputs=(1,)), Node(1.0)], [Device()])
    with pytest.raises(HybridcompError, match="a graph of 40 nodes with more than 20000 ideals"):
        graph_split([Node(1.0)] * 40, [Device()])


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
        limit = draw.uniform(0.3, 1.1) * peak_nbytes(layers, [])
        fitting = [
            sum(layer.forward_seconds for start, stop in segments for layer in layers[start:stop])
            for segments in segmentations(len(layers))
            if peak_nbytes(layers, segments) <= limit
        ]
        found = cheapest_recomputation(layers, limit)
        if not fitting:
            assert found is None
            continue
        assert found is not None
        assert found.seconds == min(fitting)
        assert found.peak_nbytes == peak_nbytes(layers, found.segments) <= limit
        recomputed += bool(found.segments)
    assert recomputed > 50
