"""Describe a cluster in a few lines, for the user and for ``hybridcomp doctor``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.estimates import Estimate
from hybridcomp.tools.plan.machines.rows import Operation

OPERATIONS: tuple[Operation, ...] = (
    "send", "all_reduce", "all_gather", "reduce_scatter", "all_to_all",
)  # fmt: skip
#: bytes of the message whose seconds are shown
MESSAGE = 1 << 22


def lines(cluster: Cluster) -> Iterator[str]:
    """Yield lines with the ranks, and the speeds of devices, links, codecs and channels."""
    how = "described by hand" if cluster.by_hand else "measured"
    counts = Counter(rank.device for rank in cluster.ranks)
    devices = ", ".join(f"{count} x {device}" for device, count in counts.items())
    yield (
        f"cluster {how}: {cluster.world_size} ranks on {cluster.nodes} node"
        f"{'s' * (cluster.nodes > 1)}: {devices}"
    )
    if cluster.made:
        yield "by " + ", ".join(f"{name} {value}" for name, value in cluster.made.items())
    yield from _ranks(cluster)
    yield from _links(cluster)
    yield from _uplinks(cluster)
    yield from _drives(cluster)
    yield from _codecs(cluster)
    yield from _channels(cluster)


def _ranks(cluster: Cluster) -> Iterator[str]:
    for dtype in dict.fromkeys(name for rank in cluster.ranks for name in rank.flops):
        rates = [rank.flops[dtype].value for rank in cluster.ranks if dtype in rank.flops]
        low, high = min(rates) / 1e12, max(rates) / 1e12
        text = f"{high:.3g}" if low > 0.98 * high else f"{low:.3g} to {high:.3g}"
        yield f"matrix products in {dtype}: {text} TFLOP/s a rank"
    slow = [(rank, speed) for rank, speed in enumerate(cluster.speeds) if speed < 0.9]
    for rank, speed in slow:
        yield f"rank {rank} computes at {speed:.0%} of the fastest one's speed"


def _uplinks(cluster: Cluster) -> Iterator[str]:
    """Yield the speed of a site's link, by the largest message that was timed on it."""
    if cluster.uplinks:
        row = max(cluster.uplinks, key=lambda row: row.nbytes)
        rate = row.nbytes / row.seconds.value / 1e6
        yield (
            f"uplink of a site of {cluster.nodes_per_site} nodes: {rate:,.3g} MB/s, with "
            f"{row.nbytes / 1e6:,.3g} MB of all its ranks at once"
        )


def _drives(cluster: Cluster) -> Iterator[str]:
    """Yield the speed of a rank's files, by the largest that was timed."""
    if cluster.drives:
        most = max(row.nbytes for row in cluster.drives)
        there, back = (
            most / cluster.copy(way, most).value / 1e6 for way in ("to_drive", "from_drive")
        )
        yield (
            f"drive: a rank's files of {most / 1e6:,.3g} MB, all ranks at once: written at "
            f"{there:,.3g} MB/s, read at {back:,.3g} MB/s"
        )


def _links(cluster: Cluster) -> Iterator[str]:
    groups = dict.fromkeys((row.ranks, row.nodes) for row in cluster.links)
    for ranks, nodes in groups:
        place = "inside a node" if nodes == 1 else f"on {nodes} nodes"
        cells = []
        for operation in OPERATIONS:
            if operation != "send" or ranks == 2:
                rows = [r for r in cluster.links if (r.operation, r.ranks, r.nodes) ==
                        (operation, ranks, nodes)]  # fmt: skip
                if rows:
                    cells.append(f"{operation} {_rate(cluster, operation, ranks, nodes)}"
                                 f"{_reach(max(row.nbytes for row in rows))}")  # fmt: skip
        yield f"{ranks} ranks {place}, {MESSAGE >> 20} MiB: {', '.join(cells)}"


def _rate(cluster: Cluster, operation: Operation, ranks: int, nodes: int) -> str:
    alone = cluster.seconds(operation, MESSAGE, ranks, nodes)
    busy = cluster.seconds(operation, MESSAGE, ranks, nodes, computing=True)
    return f"{milliseconds(alone)} ms (others at work: {milliseconds(busy)})"


def _reach(longest: int) -> str:
    """Return a note that the stated size was not timed, "" if it was; ``longest``: bytes timed."""
    if longest >= MESSAGE:
        return ""
    return f" (from messages of up to {longest} bytes; longer ones would have taken too long)"


def milliseconds(figure: Estimate) -> str:
    """Format a figure in milliseconds: the value and half its range."""
    half = (figure.high - figure.low) / 2
    return f"{1e3 * figure.value:.3g}±{1e3 * half:.2g}"


def _channels(cluster: Cluster) -> Iterator[str]:
    """Yield a line for each dimension and operation: its longest message in the largest group."""
    kinds = dict.fromkeys((row.dimension, row.operation) for row in cluster.channels)
    for dimension, operation in kinds:
        rows = [r for r in cluster.channels if (r.dimension, r.operation) == (dimension, operation)]
        shown = max(rows, key=lambda r: (r.ranks, r.nodes, r.beside == "groups", r.numel))
        same = [r for r in rows if all(getattr(r, name) == getattr(shown, name)
                for name in ("ranks", "nodes", "beside", "numel"))]  # fmt: skip
        cells = [f"{row.setting} {milliseconds(row.seconds)}" for row in same]
        place = "inside a node" if shown.nodes == 1 else f"on {shown.nodes} nodes"
        yield (
            f"{dimension} {operation} of {shown.numel} values in {shown.dtype}, {shown.ranks} ranks"
            f" {place}, in ms: torch alone {milliseconds(shown.direct)}, through its channel "
            f"{', '.join(cells)}"
        )


def _codecs(cluster: Cluster) -> Iterator[str]:
    numel = 1 << 20
    for dtype in dict.fromkeys(row.dtype for row in cluster.codecs):
        cells = []
        for setting in dict.fromkeys(r.setting for r in cluster.codecs if r.dtype == dtype):
            encode = cluster.coding(setting, dtype, numel, "encode")
            decode = cluster.coding(setting, dtype, numel, "decode")
            both = encode.plus(decode).value
            cells.append(f"{setting} {1e-9 * numel / both:.3g}" if both else setting)
        yield f"codecs in {dtype}, 1e9 values a second there and back: {', '.join(cells)}"
