"""Whether a job has the layout that its plan was made for.

A plan's codecs are right for its own messages: with other parallel sizes they are other messages,
between other ranks, and what the plan predicted of step and memory says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from hybridcomp.config import BLOCK, CompressionConfig
from hybridcomp.config.error_messages import show
from hybridcomp.config.planned import FACTS
from hybridcomp.errors import ConfigError


def hold_to_plan(block: CompressionConfig, facts: Mapping[str, int | None]) -> None:
    """Raise ConfigError where the job's ``facts`` are not those of the plan of ``block``.

    ``facts``: by names out of ``planned.FACTS``; None and names that are missing: not known.
    """
    plan = block.planned
    if plan is None:
        return
    differ = [
        f"{FACTS[name]} {facts[name]} instead of {wanted}"
        for name, wanted in plan.layout.items()
        if facts.get(name) not in (None, wanted)
    ]
    if differ:
        todo = "start the job as the plan says, or plan for this layout"
        raise ConfigError(
            f"{BLOCK}.plan", show(plan.path), f"this job has {', '.join(differ)}; {todo}"
        )
