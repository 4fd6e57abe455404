"""Cut a model that is no chain into stages: encoder-decoders, several towers.

After Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS
2020): stages that follow each other are differences of nested ideals (sets of nodes that hold all
predecessors of their nodes), so dynamic programming over ideals finds the best cut. The number of
ideals is exponential in the width of the graph, not in its size; a chain of n nodes has n + 1
ideals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridcomp.errors import HybridcompError
from hybridcomp.tools.plan.algorithms.cuts import Device

#: largest number of ideals to search: so many take seconds of Python and some hundred MB
MOST_IDEALS = 20_000


@dataclass(frozen=True)
class Node:
    """One layer or block of a graph.

    seconds: of one micro-batch on a device of speed 1. nbytes: that the node keeps on its device.
    inputs: indices of the nodes whose outputs it reads, all smaller than its index.
    send_seconds: to send the node's output to a later stage, once for all nodes that read it there.
    """

    seconds: float
    nbytes: float = 0.0
    inputs: tuple[int, ...] = ()
    send_seconds: float = 0.0


def graph_split(
    nodes: Sequence[Node], devices: Sequence[Device]
) -> tuple[tuple[int, ...], ...] | None:
    """Split ``nodes`` over ``devices``, in that order; make the slowest stage as fast as possible.

    Returns the ascending indices of each stage's nodes; a stage may be empty. None where nothing
    fits into the devices' memory.
    Raises HybridcompError on a graph that is not in topological order, or with too many ideals.
    """
    for index, node in enumerate(nodes):
        if any(not 0 <= source < index for source in node.inputs):
            raise HybridcompError(
                f"node {index}: inputs must be smaller indices, found {node.inputs}"
            )
    ideals = sorted(_ideals(nodes), key=int.bit_count)
    # ideal that the stages so far can fill -> (seconds of the slowest stage, ideal before the last)
    reached: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for device in devices:
        reached.append(_grown(nodes, ideals, reached[-1], device))
    whole = (1 << len(nodes)) - 1
    if whole not in reached[-1]:
        return None
    stages, ideal = [], whole
    for states in reversed(reached[1:]):
        before = states[ideal][1]
        stages.append(_members(ideal & ~before))
        ideal = before
    return tuple(reversed(stages))


def _ideals(nodes: Sequence[Node]) -> set[int]:
    """Return all ideals, as bit masks. Raises HybridcompError where they are too many."""
    needs = [sum(1 << source for source in set(node.inputs)) for node in nodes]
    found, fresh = {0}, [0]
    while fresh:
        ideal = fresh.pop()
        for index, needed in enumerate(needs):
            larger = ideal | 1 << index
            if larger != ideal and needed & ~ideal == 0 and larger not in found:
                found.add(larger)
                fresh.append(larger)
                if len(found) > MOST_IDEALS:
                    raise HybridcompError(
                        f"a graph of {len(nodes)} nodes with more than {MOST_IDEALS} ideals is too "
                        "wide to be split exactly; join the nodes of a block into one"
                    )
    return found


def _grown(
    nodes: Sequence[Node],
    ideals: Sequence[int],
    states: dict[int, tuple[float, int]],
    device: Device,
) -> dict[int, tuple[float, int]]:
    """Add a stage on ``device``; return ideal -> (slowest stage's seconds, ideal before)."""
    grown: dict[int, tuple[float, int]] = {}
    for before, (slowest, _) in states.items():
        for ideal in ideals:
            if before & ~ideal:
                continue
            cost = _stage_seconds(nodes, before, ideal & ~before, device)
            if cost is None:
                continue
            worst = max(slowest, cost)
            if ideal not in grown or worst < grown[ideal][0]:
                grown[ideal] = (worst, before)
    return grown


def _stage_seconds(
    nodes: Sequence[Node], before: int, members: int, device: Device
) -> float | None:
    """Return the seconds of the stage ``members`` after the ideal ``before``; None if too large."""
    inside = _members(members)
    if sum(nodes[index].nbytes for index in inside) > device.nbytes:
        return None
    read = {source for index in inside for source in nodes[index].inputs if before >> source & 1}
    work = sum(nodes[index].seconds for index in inside) / device.speed
    return work + sum(nodes[source].send_seconds for source in read)


def _members(mask: int) -> tuple[int, ...]:
    return tuple(index for index in range(mask.bit_length()) if mask >> index & 1)
