"""Collect a run's ledger from figures in a log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hybridcomp.metric_names import PREFIX, split_event
from hybridcomp.tools.compare.runs import Curve, Errors, Rows


def ledger_of(
    records: Iterable[Mapping[str, Any]], codecs: Mapping[str, str], prefix: str = PREFIX
) -> Rows:
    """Return totals over all reports; errors by their root mean square.

    ``records``: rows of the log, names and values. ``codecs``: known codecs, by dimension and
    direction ("dp/forward"). ``prefix``: begins the names of the ledger's figures.
    """
    sums: dict[tuple[str, str], dict[str, list[float]]] = {}
    for values in records:
        for name, value in values.items():
            place = split_event(name, prefix)
            if place is not None:
                figures = sums.setdefault(place[:2], {})
                figures.setdefault(place[2], []).append(float(value))
    rows: Rows = {}
    for (dimension, way), figures in sums.items():
        if "wire_MB" not in figures:
            continue
        total = {
            name: sum(figures.get(name, []))
            for name in ("raw_MB", "wire_MB", "codec_ms", "wait_ms")
        }
        errors = figures.get("error")
        rows.setdefault(dimension, {})[way] = {
            "codec": codecs.get(f"{dimension}/{way}", "?"),
            **total,
            "ratio": total["raw_MB"] / total["wire_MB"] if total["wire_MB"] else None,
            "error": float(np.sqrt(np.mean(np.square(errors)))) if errors else None,
        }
    return rows


def wire_of(values: Mapping[str, Any], prefix: str = PREFIX) -> float:
    """Return the MB sent according to one report of the ledger, over all dimensions."""
    places = ((split_event(name, prefix), value) for name, value in values.items())
    return sum(float(value) for place, value in places if place and place[2] == "wire_MB")


def errors_of(records: Iterable[tuple[float, Mapping[str, Any]]], prefix: str = PREFIX) -> Errors:
    """Return the sampled errors of each dimension; ``records``: steps with names and values."""
    found: Errors = {}
    for step, values in records:
        for name, value in values.items():
            place = split_event(name, prefix)
            if place is not None and place[2] == "error":
                found.setdefault(named(*place[:2]), []).append((step, float(value)))
    return found


def named(dimension: str, way: str) -> str:
    """Return a dimension with its direction, which is left out for forward."""
    return dimension if way == "forward" else f"{dimension} {way}"


def sent_until(reports: Iterable[tuple[float, float]], at: Curve) -> Curve | None:
    """Return the MB sent up to each step in ``at``; None if nothing was reported.

    ``reports``: for each report, its step and the MB since the previous report, which this function
    spreads evenly over the steps in between.
    """
    found = sorted(reports)
    if not sum(sent for _, sent in found):
        return None
    places = np.array([0.0, *(place for place, _ in found)])
    return np.asarray(np.interp(at, places, np.cumsum([0.0, *(sent for _, sent in found)])))
