"""Several measurements of one cluster as one: a machine's speed is another one a minute later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hybridcomp.plan.machines.cluster import Cluster
from hybridcomp.plan.machines.figures import Figure

#: rows of a cluster, and which of their fields are figures
KINDS = {
    "links": ("seconds", "compute_left", "returned"), "encoded": ("seconds",),
    "channels": ("seconds", "direct"), "host_codecs": ("seconds",),
    "codecs": ("seconds",), "copies": ("seconds",), "kernels": ("seconds",),
    "trainings": ("micro", "last"),
}  # fmt: skip


def merged(clusters: Sequence[Cluster]) -> Cluster:
    """The first cluster with the mean of every figure over all that have it."""
    kinds: dict[str, Any] = {}
    for kind, figures in KINDS.items():
        rows: dict[str, list[Any]] = {}
        for cluster in clusters:
            for row in getattr(cluster, kind):
                own = {name: value for name, value in vars(row).items() if name not in figures}
                rows.setdefault(repr(own), []).append(row)
        kinds[kind] = tuple(_mean(own, figures) for own in rows.values())
    return replace(clusters[0], **kinds)


def _mean(rows: Sequence[Any], figures: Sequence[str]) -> Any:
    means = {}
    for name in figures:
        known = [figure for row in rows if (figure := getattr(row, name)) is not None]
        if known:
            means[name] = Figure.total(known).times(1 / len(known))
    return replace(rows[0], **means)
