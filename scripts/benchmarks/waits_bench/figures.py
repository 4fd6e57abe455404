"""Compute an arm's figures from traces, and attribute the gap to the allowed time to causes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.training_bench.report import ideal
from benchmarks.waits_bench.causes import CAUSES, Parts, beside, parts_of
from benchmarks.waits_bench.intervals import length
from benchmarks.waits_bench.lanes import CODEC, COPIES, WIRE, Lanes, lanes_of
from benchmarks.waits_bench.traces import TraceError, read

Figures = dict[str, Any]
MS = 1e6  # nanoseconds


def recorded(paths: Sequence[Path], skip: int = 1, gpu: bool = False) -> list[Lanes]:
    """Read the traces of all ranks without their first ``skip`` steps; ``gpu``: from a GPU.

    Raises TraceError, also if ranks have different numbers of steps or a GPU trace no kernels.
    """
    ranks = []
    for path in paths:
        trace = read(path)
        if gpu and not trace.device:
            raise TraceError(
                f"{path}: expected kernels of a GPU, found none: the profiler was not allowed to "
                "record them (CUPTI); the log of the rank says why"
            )
        trace.steps = trace.steps[skip:] if len(trace.steps) > skip else trace.steps
        ranks.append(lanes_of(trace))
    counts = {lanes.trace.name: len(lanes.trace.steps) for lanes in ranks}
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise TraceError(f"ranks of one training have the same steps, found {told}")
    return ranks


def figures_of(ranks: Sequence[Lanes], shared: bool) -> Figures:
    """Return a step's parts in ms, as means over ranks and steps; ``shared``: on one GPU."""
    every = [parts_of(ranks, rank, shared) for rank in range(len(ranks))]
    steps = [step for lanes in ranks for step in lanes.trace.steps]
    found: Figures = {
        "steps": len(steps), "ms": length(steps) / len(steps) / MS,
        "kernels": any(lanes.of for lanes in ranks),
        "untold": "; ".join(filter(None, (lanes.trace.untold for lanes in ranks))),
        "causes": {name: _mean(every, name) for name in CAUSES},
        "lanes": {name: _lane(ranks, name, len(steps)) for name in (CODEC, WIRE, COPIES)},
    }  # fmt: skip
    return found


def _mean(every: Sequence[Sequence[Parts]], name: str) -> float:
    return statistics.fmean(length(parts[name]) / MS for steps in every for parts in steps)


def _lane(ranks: Sequence[Lanes], name: str, steps: int) -> dict[str, float]:
    """Return how long a lane is busy in a step, overlapping computation and exposed."""
    pairs = [beside(lanes, name, lanes.trace.steps) for lanes in ranks]
    whole, hidden = (sum(each) / steps / MS for each in zip(*pairs, strict=True))
    return {"ms": whole, "beside_ms": hidden, "exposed_ms": whole - hidden}


def reached(turns: dict[str, Figures], names: tuple[str, str, str], saving: float) -> float:
    """Return the share of the allowed speed that unprofiled steps reach; see ``missing``."""
    native, compute, own = (turns[name]["ms"] for name in names)
    return float((compute + (native - compute) / saving) / own)


def missing(arms: dict[str, Figures], names: tuple[str, str, str], saving: float) -> Figures:
    """Return the step time that the bytes allow, and the excess over it by cause.

    Args:
        arms: figures by arm.
        names: native, native without a wire, compressed.
        saving: native bytes over the compressed arm's bytes.

    The allowed time is the time of the arm without a wire, plus the native arm's excess divided
    by ``saving``. Each cause is computed in the same way, so their sum is the missing time.
    """
    native, compute, own = (arms[name] for name in names)
    wire = native["ms"] - compute["ms"]  # below 0 if the difference is noise
    allowed_ms = compute["ms"] + wire / saving
    beyond = {}
    for name in CAUSES:
        free, more = compute["causes"][name], native["causes"][name] - compute["causes"][name]
        beyond[name] = own["causes"][name] - free - more / saving
    left = own["ms"] - allowed_ms
    return {
        "saving": saving, "r": wire / compute["ms"],
        "allowed": ideal(wire / compute["ms"], saving), "speed_up": native["ms"] / own["ms"],
        "reached": allowed_ms / own["ms"], "missing_ms": left,
        "causes_ms": beyond,
        "causes_percent": {name: 100 * value / own["ms"] for name, value in beyond.items()},
    }  # fmt: skip
