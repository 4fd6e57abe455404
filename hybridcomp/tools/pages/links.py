"""Draw the traffic of each link: two nodes with their ranks, and the MB of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybridcomp.escaping import one_line
from hybridcomp.tools import pages

#: pixels of the longest bar, and most ranks of a node that are drawn
BAR, MOST_RANKS = 250, 8


@dataclass(frozen=True)
class LinkMB:
    """MB on one link in a step, natively and with the block."""

    name: str
    native: float
    block: float


def draw(
    title: str, links: Sequence[LinkMB], nodes: int | None = None, per_node: int | None = None
) -> str:
    """Return the picture as SVG, which follows the light or dark colours of its reader.

    ``nodes``: nodes of the job; ``per_node``: ranks of a node; None: unknown. Raises
    HybridcompError if Jinja is not installed.
    """
    longest = max((max(link.native, link.block) for link in links), default=0.0) or 1.0
    rows = [
        (one_line(link.name), [
            ("native", amount(link.native, link.block), BAR * link.native / longest),
            ("block", amount(link.block, link.native), BAR * link.block / longest),
        ])
        for link in links
    ]  # fmt: skip
    return pages.render(
        "links.svg.jinja", title=one_line(title), rows=rows,
        names=["a node", "another node"] if nodes is None else ["node 1", f"node 2 of {nodes}"],
        drawn=min(per_node or 4, MOST_RANKS), per_node=per_node,
    )  # fmt: skip


def amount(megabytes: float, other: float = 0.0) -> str:
    """Format MB: three digits, and GB where these or ``other``, beside them, are 10,000 MB."""
    if max(megabytes, other) >= 10_000:
        gigabytes = megabytes / 1e3
        return f"{gigabytes:,.1f} GB" if gigabytes >= 1 else f"{gigabytes:.3g} GB"
    return f"{megabytes:,.0f} MB" if megabytes >= 100 else f"{megabytes:.3g} MB"
