"""Find the node of every rank, and the switches and sites that contain the nodes.

DeepSpeed's ``launch.py`` sets the node's number as ``CROSS_RANK`` on every rank; torchrun
(torch.distributed.elastic) sets it as ``GROUP_RANK``. Unless all ranks have one of these, ranks
with the same host name and boot id share a node, as in NCCL's ``getHostHash``. Switches above nodes
come from ``SLURM_TOPOLOGY_ADDR`` of Slurm's topology/tree, such as ``s0.s3.node7``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from hybridcomp.errors import ConfigError
from hybridcomp.job.agreement import tell

#: ``auto``, ``none``, the number of consecutive ranks that share a node, or a list of ranks per
#: node, nodes per switch or site, and so on, with ``auto`` for numbers that the launcher knows
Hierarchy = Literal["auto", "none"] | int | list[int | Literal["auto"]]
#: environment variables in which launchers give the number of the node
VARIABLES = ("CROSS_RANK", "GROUP_RANK")
#: environment variable with the switches above a node, outermost first, and then the node
ADDRESS = "SLURM_TOPOLOGY_ADDR"
KEY = "compression.hierarchy"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class PlacedRanks:
    """Nodes of a job's ranks.

    Attributes:
        units: for each level, the innermost first, the unit number of every global rank.
        source: where the mapping comes from, for messages to the user.
    """

    units: list[list[int]]
    source: str


def placed(hierarchy: Hierarchy) -> PlacedRanks:
    """Find the units that hold each rank; with ``auto`` a collective through the rendezvous store.

    Raises ConfigError if a number does not divide the count of units one level below, or if a unit
    is unknown.
    """
    first, *above = _widths(hierarchy)
    if isinstance(first, int):
        _check_divides(hierarchy, 0, first, dist.get_world_size())
        units, source = [[rank // first for rank in range(dist.get_world_size())]], KEY
    else:
        nodes, source = _launched()
        units = [nodes]
    for level, width in enumerate(above, 1):
        below = units[-1]
        if isinstance(width, int):
            _check_divides(hierarchy, level, width, len(set(below)))
            units.append([number // width for number in below])
        else:
            units.append(_switches(hierarchy, below, level))
    return PlacedRanks(units, source)


def check_widths(hierarchy: Hierarchy, ranks: int) -> None:
    """Raise ConfigError if a number does not divide the count of units one level below.

    ``ranks``: number of ranks of the job. Levels above an ``auto`` level are not checked.
    """
    count = ranks
    for level, width in enumerate(_widths(hierarchy)):
        if not isinstance(width, int):
            return
        _check_divides(hierarchy, level, width, count)
        count //= width


def _widths(hierarchy: Hierarchy) -> Sequence[int | str]:
    return hierarchy if isinstance(hierarchy, list) else [hierarchy]


def _check_divides(hierarchy: Hierarchy, level: int, width: int, count: int) -> None:
    if count % width == 0:
        return
    units = ("ranks", "nodes")[level] if level < 2 else f"units of level {level}"
    what = "a node" if level == 0 else "a switch or a site"
    of = width if isinstance(hierarchy, list) else "it"
    why = f"the job has {count} {units}, no multiple of {of}"
    raise ConfigError(
        KEY, hierarchy, f'{why}; write the number of {units} that share {what}, or "auto"'
    )


def _launched() -> tuple[list[int], str]:
    """Return the node of every rank, and where this mapping comes from; a collective."""
    said = tell(
        {**{name: os.environ.get(name) for name in VARIABLES}, "host": _host()}, what="node"
    )
    for name in (*VARIABLES, "host"):
        values = [statement[name] for statement in said]
        if None not in values:
            return _numbered(values), name
    raise AssertionError("every rank has a host")


def _switches(hierarchy: Hierarchy, below: Sequence[int], level: int) -> list[int]:
    """Return the switch of every rank, as Slurm reports it; a collective.

    ``level``: levels from the node up to this switch. ``below``: the unit of every rank one level
    below.
    """
    said = tell({"address": os.environ.get(ADDRESS)}, what="switch")
    addresses = [str(statement["address"] or "").split(".") for statement in said]
    if min(map(len, addresses)) <= level:
        why = f"no launcher tells level {level + 1} ({ADDRESS} has no such switch on every rank)"
        raise ConfigError(KEY, hierarchy, f'{why}; write a number in place of this "auto"')
    found = _numbered([tuple(address[:-level]) for address in addresses])
    if len(set(zip(below, found, strict=True))) > len(set(below)):
        why = f"by {ADDRESS} ranks of one unit of level {level} are on different switches"
        raise ConfigError(KEY, hierarchy, f"{why}; write numbers that fit the machines")
    return found


def _numbered(values: Iterable[Hashable]) -> list[int]:
    """Number ``values`` in the order in which they appear first."""
    every = list(values)
    numbers = {value: index for index, value in enumerate(dict.fromkeys(every))}
    return [numbers[value] for value in every]


def _host() -> str:
    boot = BOOT_ID.read_text().strip() if BOOT_ID.is_file() else ""
    return f"{socket.gethostname()} {boot}"
