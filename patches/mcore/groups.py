"""Read megatron-core's process groups: their dimensions and sizes, and this rank's coordinates."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from hybridcomp.dimensions import Dimension

#: getter in megatron.core.parallel_state -> dimension
GETTERS: tuple[tuple[str, Dimension], ...] = (
    ("get_tensor_model_parallel_group", "tp"),
    ("get_expert_tensor_parallel_group", "tp"),
    ("get_expert_model_parallel_group", "ep"),
    ("get_expert_tensor_and_model_parallel_group", "ep"),
    ("get_context_parallel_group", "cp"),
)


#: further groups of a job with several instances of the distributed optimizer
PARTIAL = (
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
)


def dimension_of(group: dist.ProcessGroup | None, default: Dimension) -> Dimension | None:
    """Return the dimension of the messages on ``group``.

    Returns None for other groups, over which upstream sends token counts and losses: these stay
    exact. Returns ``default`` if the job makes its groups without parallel_state.
    """
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return default
    for getter, dimension in GETTERS:
        if getattr(parallel_state, getter)(check_initialized=False) is group:
            return dimension
    return None


def sizes(given: Any = None) -> dict[Dimension, int]:
    """Return ranks per group from parallel_state; empty where a job makes its own groups.

    ``given``: a ProcessGroupCollection whose data-parallel group replaces parallel_state's.
    """
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return {}
    whole = parallel_state.get_data_parallel_group(with_context_parallel=True)
    data = (getattr(given, "dp_cp", None) or whole).size()
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "dp": data,
        "zero": data,
    }


def layout() -> dict[str, int | None]:
    """Return the layout of this job under the names that a plan uses (``config.planned``)."""
    known = sizes()
    names = {"tensor": "tp", "stages": "pp", "expert": "ep", "context": "cp"}
    facts: dict[str, int | None] = {name: known.get(key) for name, key in names.items()}  # type: ignore[call-overload]
    data = None if "dp" not in known else known["dp"] // known["cp"]
    return {**facts, "data": data, "ranks": dist.get_world_size()}


def data_parallel() -> set[tuple[int, ...]]:
    """Return the ranks of this rank's groups that reduce gradients or gather parameters."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return set()
    found = [
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        parallel_state.get_data_parallel_group(with_context_parallel=False),
    ]
    # groups of experts and of optimizer instances, which not every release or job has
    for name in ("_EXPERT_DATA_PARALLEL_GROUP", *PARTIAL):
        found.append(getattr(parallel_state, name, None))
    return {tuple(dist.get_process_group_ranks(group)) for group in found if group is not None}


def replicas() -> dist.ProcessGroup:
    """Return the group over which this rank's dense parameters are replicated."""
    from megatron.core import parallel_state

    group: dist.ProcessGroup = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return group


def coordinates() -> str:
    """Return this rank's coordinates in its model replica, such as ``pp1.tp0.ep0``."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return f"rank{dist.get_rank()}"
    return (
        f"pp{parallel_state.get_pipeline_model_parallel_rank()}"
        f".tp{parallel_state.get_tensor_model_parallel_rank()}"
        f".ep{parallel_state.get_expert_model_parallel_rank()}"
    )
