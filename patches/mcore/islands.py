"""Cut megatron-core's data-parallel groups into islands, and make them meet, for ``sync``.

``pg_collection``, the argument of DistributedDataParallel and of ``get_megatron_optimizer``, gives
upstream the groups of an island, so that gradients, shards and gradient norms stay inside it.
Groups of tensor, pipeline, context and expert ranks remain parallel_state's, and each must lie
inside one island; parallel_state itself is unchanged, so that data is distributed over all ranks of
the job.
"""

from __future__ import annotations

import functools
import gc
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.collectives.topology import Ranks, ranks_of
from hybridcomp.config import BLOCK
from hybridcomp.config.error_messages import NOTHING, Shown
from hybridcomp.errors import ConfigError
from hybridcomp.job import peer_liveness, small_messages
from hybridcomp.patches.common import island_steps
from hybridcomp.patches.mcore import groups
from hybridcomp.patches.mcore.island_masters import masters_of
from hybridcomp.session import process
from hybridcomp.session.engine_session import EngineSession
from hybridcomp.sync import Islands, Masters

KEY = f"{BLOCK}.sync"
TODO = (
    "build DistributedDataParallel and the optimizer with "
    "pg_collection=hybridcomp.island_pg_collection(), the latter also with "
    "use_gloo_process_groups=False; in megatron/training/training.py of Megatron-LM: DP(...) "
    "in get_model and get_megatron_optimizer(...) in setup_model_and_optimizer"
)
#: fields of a ProcessGroupCollection with data-parallel ranks, which islands cut
CUT = ("dp", "dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp", "tp_dp_cp", "intra_dist_opt")
#: fields of a ProcessGroupCollection whose groups must each lie inside one island
WHOLE = {
    "tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert",
    "expt_tp": "expert tensor", "embd": "embedding",
}  # fmt: skip


@dataclass
class _Job:
    """A session's record of its Megatron job.

    Attributes:
        source: parallel_state's data-parallel group, which was cut for ``collection``.
        collection: the groups of this rank's island.
        wrapper: the DistributedDataParallel of the first model chunk.
        optimizer: the outermost optimizer, whose steps are counted.
    """

    source: Any = None
    collection: Any = None
    wrapper: weakref.ref[Any] | None = None
    optimizer: Any = None


_jobs: weakref.WeakKeyDictionary[EngineSession, _Job] = weakref.WeakKeyDictionary()


def cuts(session: EngineSession) -> bool:
    """Return whether the block splits the job into islands, whose groups do not exist yet."""
    sync = session.channels.config.sync
    return sync.acts and sync.jobs is None


def island_pg_collection() -> Any:
    """Return megatron-core's process groups with the data-parallel ones cut into islands.

    Pass this ProcessGroupCollection to DistributedDataParallel and to ``get_megatron_optimizer``
    (with ``use_gloo_process_groups=False``) as ``pg_collection``. Every rank calls it, after
    ``initialize_model_parallel``; a second call returns the same. If islands are jobs of their own,
    the groups are the job's. Raises ConfigError if the process has no block with ``sync``, or if
    islands do not hold whole copies of the model.
    """
    session = process.own_session()
    if session is None or not session.channels.config.sync.acts:
        todo = 'the process has no block with "sync"; give hybridcomp.install one'
        raise ConfigError(KEY, NOTHING, todo)
    source = _source()
    if source is None:
        todo = "Megatron has no groups yet; call initialize_model_parallel before"
        raise ConfigError(KEY, NOTHING, todo)
    job = _jobs.setdefault(session, _Job())
    if job.collection is None or job.source is not source:
        job.source, job.collection = source, _made(session)
    return job.collection


def _source() -> dist.ProcessGroup | None:
    from megatron.core import parallel_state

    return groups.replicas() if parallel_state.model_parallel_is_initialized() else None


def _made(session: EngineSession) -> Any:
    """Make the groups of all islands, on all ranks, and store them in the session; a collective."""
    try:
        from megatron.core.process_groups_config import ProcessGroupCollection
    except ImportError:
        todo = "its data-parallel wrapper takes no groups of the user's; use 0.15 or later"
        raise ConfigError(KEY, Shown("an older megatron-core"), todo) from None
    collection = ProcessGroupCollection.use_mpu_process_groups()
    islands = island_steps.islands_in(session.channels.config)
    if islands is None:  # islands are jobs of their own
        return collection
    held = {name: _ranks(getattr(collection, name, None)) for name in (*CUT, *WHOLE)}
    every = small_messages.gather_objects(held)
    _check(islands, every)
    limit, made = peer_liveness.time_limit(), {islands.ranks: islands.inside}
    for ranks in _cut_groups(islands, every):
        group = dist.new_group(list(ranks), timeout=limit)
        if dist.get_rank() in ranks and group is not None:
            made[ranks] = group
    for name in CUT:
        if held[name]:
            setattr(collection, name, made[_inside(held[name], islands.ranks)])
    collection.inter_dist_opt = None
    session.place({ranks_of(getattr(collection, name)) for name in CUT[:3] if held[name]})
    session.measure(collection.dp_cp, torch.bfloat16)
    return collection


def _ranks(group: Any) -> Ranks:
    """Return the ranks of a group, or of all groups in a list; empty if there is none."""
    found = group if isinstance(group, (list, tuple)) else [group]
    return tuple(sorted({r for one in found if one is not None for r in ranks_of(one)}))


def _inside(ranks: Ranks, island: Ranks) -> Ranks:
    return tuple(rank for rank in ranks if rank in island)


def _cut_groups(islands: Islands, every: list[dict[str, Ranks]]) -> list[Ranks]:
    """Return the groups to be made, in equal order on all ranks, without those of whole islands."""
    found: set[Ranks] = set()
    for row in islands.rows:
        found |= {_inside(every[rank][name], row) for rank in row for name in CUT}
    return sorted(found - {()} - set(islands.rows))


def _check(islands: Islands, every: list[dict[str, Ranks]]) -> None:
    """Raise ConfigError, alike on all ranks, where a model replica lies in several islands."""
    for row in islands.rows:
        for rank in row:
            for name, words in WHOLE.items():
                if not set(every[rank][name]) <= set(row):
                    shown = Shown(f"the {words} group of ranks {list(every[rank][name])}")
                    todo = (
                        f"an island, here {list(row)}, holds whole copies of the model; make it "
                        'larger, or initialize_model_parallel(order="tp-cp-ep-pp-dp"), which is '
                        "--use-tp-pp-dp-mapping of Megatron-LM"
                    )
                    raise ConfigError(f"{KEY}.islands", shown, todo)


def follow(session: EngineSession, wrapper: Any) -> None:
    """Make islands meet after the steps of the job that owns the model chunk of ``wrapper``.

    Raises ConfigError if its gradients are summed over other ranks than the island's.
    """
    config = session.channels.config
    if not config.sync.acts:
        return
    _refuse_tied(wrapper)
    islands = island_steps.islands_in(config)
    island = tuple(range(dist.get_world_size())) if islands is None else islands.ranks
    ranks, source = ranks_of(wrapper.dp_cp_group), _source()
    right = ranks if source is None else _inside(ranks_of(source), island)
    spread = island if ranks == right and set(ranks) <= set(island) else ranks
    job = _jobs.setdefault(session, _Job())
    # a further chunk, or a model that was built again
    if job.wrapper is not None and spread == island:
        gc.collect()  # a deleted model may remain in a reference cycle, on some ranks
        if job.wrapper() is None:
            job.wrapper = weakref.ref(wrapper)
        return
    make = functools.partial(_masters, job, island)
    island_steps.start(session, make, spread, TODO)
    job.wrapper = weakref.ref(wrapper)


def _refuse_tied(wrapper: Any) -> None:
    """Refuse weights held by two pipeline stages: meetings would make the copies differ."""
    name = "share_embeddings_and_output_weights"
    tied = any(getattr(module, name, False) for module in wrapper.module.modules())
    if tied and wrapper.pp_group.size() > 1:
        todo = (
            "first and last stage have a copy of the embedding each, which meetings would part; "
            "set it to False (Megatron-LM: --untie-embeddings-and-output-weights)"
        )
        raise ConfigError(KEY, Shown(f"{name} over pipeline stages"), todo)


def stepping(session: EngineSession, optimizer: Any) -> bool:
    """Record the optimizer whose step begins; return whether islands meet after it.

    Raises ConfigError if a job steps two optimizers in turns.
    """
    job = _jobs.get(session)
    if job is None or job.wrapper is None:
        return False
    if job.optimizer is None:
        job.optimizer = optimizer
    elif job.optimizer is not optimizer:
        todo = "islands meet after the steps of one; put both into a ChainedOptimizer"
        raise ConfigError(KEY, Shown(f"a second {type(optimizer).__name__} that steps"), todo)
    return True


def _masters(job: _Job, island: Ranks) -> Masters:
    """Return the weights that the job's optimizer changes on this rank."""
    wrapper = None if job.wrapper is None else job.wrapper()
    assert job.optimizer is not None and wrapper is not None, "before a step"
    return masters_of(job.optimizer, wrapper, island, TODO)
