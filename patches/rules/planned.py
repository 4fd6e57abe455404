"""Check that a job has the layout and the machines of its plan.

A plan chooses codecs for the messages of one layout. Other parallel sizes give other messages
between other ranks, for which the plan's step time and memory do not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hybridcomp.config import BLOCK, CompressionConfig
from hybridcomp.config.error_messages import show
from hybridcomp.config.planned import FACTS, LATER
from hybridcomp.errors import ConfigError


def hold_to_plan(block: CompressionConfig, facts: Mapping[str, int | None]) -> None:
    """Raise ConfigError if the job's ``facts`` differ from those of the block's plan.

    ``facts``: values by the names in ``planned.FACTS`` and ``planned.LATER``; a missing name or
    None: not known.
    """
    plan = block.planned
    if plan is None:
        return
    words = {**FACTS, **LATER}
    told = {**plan.layout, "shards": plan.layout.get("shards", 1), **plan.later}
    differ = [
        f"{words[name]} {facts[name]} instead of {wanted}"
        for name, wanted in told.items()
        if facts.get(name) not in (None, wanted)
    ]
    if differ:
        todo = "start the job as the plan says, or plan for this layout"
        raise ConfigError(
            f"{BLOCK}.plan", show(plan.path), f"this job has {', '.join(differ)}; {todo}"
        )


def hold_to_machines(
    block: CompressionConfig, found: Callable[[], Sequence[tuple[int, str]]]
) -> None:
    """Raise ConfigError if the plan of ``block`` was measured on other machines.

    ``found`` returns the node and the device of every rank of the job. It may be a collective, and
    is called only where the plan has machines. The thread count of a CPU is ignored.
    """
    plan = block.planned
    if plan is None or not plan.machines:
        return
    now = found()
    for index, ((was_on, was), (is_on, device)) in enumerate(zip(plan.machines, now, strict=False)):
        if _plain(was) != _plain(device):
            _refuse(plan.path, f"rank {index} was {_plain(was)} and is {_plain(device)}")
        for other in range(index):
            together = plan.machines[other][0] == was_on
            if was_on >= 0 and together != (now[other][0] == is_on):
                how = ("one node", "two") if together else ("two nodes", "one")
                _refuse(
                    plan.path, f"ranks {other} and {index} were on {how[0]} and are on {how[1]}"
                )


def _plain(device: str) -> str:
    return device.partition(", ")[0]


def _refuse(path: str, differ: str) -> None:
    raise ConfigError(
        f"{BLOCK}.plan",
        show(path),
        f"was measured on another cluster: {differ}; run `hybridcomp measure` with the launcher of "
        "this job, and plan again",
    )
