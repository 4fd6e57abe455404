"""Read the preset ``planned``: its codecs come from a file that ``hybridcomp plan`` wrote.

A plan is valid for one layout. Since a block does not know its job, ``rules.planned`` checks the
layout when an engine attaches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridcomp.config.error_messages import NOTHING, problem
from hybridcomp.escaping import parsed_json

#: the preset's name
PLANNED = "planned"
#: key that holds a plan's format version, and the version that this package reads
FORMAT, VERSION = "hybridcomp_plan", 1
#: parallel degrees of a layout, whose product is the number of ranks
DEGREES = ("tensor", "context", "data", "stages")
#: facts of a layout that are compared with the job, and their names in a message
FACTS: Mapping[str, str] = {
    "ranks": "ranks",
    "data": "data parallel",
    "tensor": "tensor parallel",
    "stages": "pipeline stages",
    "expert": "expert parallel",
    "context": "context parallel",
    "zero_stage": "ZeRO stage",
    "micro_batch": "sequences a micro-batch",
    "accumulation": "micro-batches a step",
    "mesh": "ranks on a side of a mesh",
    "shards": "ranks that shard a model",
}
#: further facts, yes (1) or no (0), not part of a block's digest
LATER: Mapping[str, str] = {"offload": "optimizers on a host"}


@dataclass(frozen=True)
class Planned:
    """Plan read from a file.

    Attributes:
        path: path of the file.
        block: the dimensions and other keys that the plan chose.
        layout: facts of the plan's layout, by names of ``FACTS``.
        later: further facts, by names of ``LATER``, which do not enter the block's digest.
        machines: node and device of every rank on which the plan was measured; a negative node is
            unknown. Empty if the user described the cluster by hand.
    """

    path: str
    block: Mapping[str, Any]
    layout: Mapping[str, int]
    machines: tuple[tuple[int, str], ...] = ()
    later: Mapping[str, int] = field(default_factory=dict)


def read(written: Mapping[str, Any]) -> Planned | None:
    """Read the plan that a block names; None for any other preset.

    Raises the error that pydantic turns into a ValidationError, at ``plan``.
    """
    path = written.get("plan")
    if written.get("preset") != PLANNED:
        if path is not None:
            todo = f'only "preset": "{PLANNED}" reads it; write that or remove it'
            raise problem("plan", path, todo)
        return None
    if not isinstance(path, str) or not path:
        todo = f'preset "{PLANNED}" needs what `hybridcomp plan` wrote; add "plan": "plan.json"'
        raise problem("plan", NOTHING if path is None else path, todo)
    return _checked(path, _loaded(path))


def _loaded(path: str) -> Mapping[str, Any]:
    try:
        plan = parsed_json(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        where = f"no such file, seen from {Path.cwd()}; write the whole path"
        raise problem("plan", path, where) from None
    except (OSError, ValueError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise problem("plan", path, f"cannot be read ({first}); plan again") from None
    if not isinstance(plan, Mapping) or FORMAT not in plan:
        todo = "is no plan; expected the plan.json that `hybridcomp plan` wrote"
        raise problem("plan", path, todo)
    return plan


def _checked(path: str, plan: Mapping[str, Any]) -> Planned:
    if plan[FORMAT] != VERSION:
        todo = f"has format {plan[FORMAT]!r}, this version reads {VERSION}; plan again"
        raise problem("plan", path, todo)
    block, layout = plan.get("block"), plan.get("layout")
    if not isinstance(block, Mapping) or not isinstance(layout, Mapping):
        raise problem("plan", path, "lacks its block or its layout; plan again")
    if block.get("preset") == PLANNED:
        raise problem("plan", path, "names itself as its preset; plan again")
    facts = {name: layout[name] for name in FACTS if name in layout}
    wrong = [name for name, value in facts.items() if type(value) is not int or value < 0]
    if wrong or not facts:
        todo = f"{wrong[0]} is no number" if wrong else "its layout says nothing"
        raise problem("plan", path, f"{todo}; plan again")
    ranks = math.prod(facts.get(name, 1) for name in DEGREES) * facts.get("mesh", 1) ** 2
    later = {name: int(layout[name]) for name in LATER if isinstance(layout.get(name), bool)}
    machines = _machines(path, plan.get("machines"))
    return Planned(path, block, {"ranks": ranks, **facts}, machines, later)


def _machines(path: str, written: object) -> tuple[tuple[int, str], ...]:
    """Return node and device by rank; empty for the plan of a described cluster."""
    rows = [] if written is None else written
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and list(map(type, row)) == [int, str] for row in rows
    ):
        raise problem("plan", path, "its machines are no list of nodes and devices; plan again")
    return tuple((node, device) for node, device in rows)
