"""Rules for models under FSDP2: which messages can be compressed, and why others cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hybridcomp import dimensions
from hybridcomp.collectives.topology import Ranks
from hybridcomp.config import BLOCK, CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.patches.common.sparse_tables import tables_of
from hybridcomp.patches.rules import engine
from hybridcomp.patches.rules.engine import Rule, lossy
from hybridcomp.patches.torch.fsdp2.kept import keeps
from hybridcomp.patches.torch.rules import elsewhere, has_ring

#: classes of comms that ``fill`` may replace; they still send the messages that stay native
OWN_COMMS = (
    "DefaultAllGather", "DefaultReduceScatter",
    "ProcessGroupAllocAllGather", "ProcessGroupAllocReduceScatter",
)  # fmt: skip


@dataclass(frozen=True)
class ShardedJob:
    """One model under FSDP2."""

    ranks: Ranks  # ranks of its largest mesh
    shards: int  # number of shards of a parameter, in the group with most ranks
    replicas: int  # replicas of an HSDP mesh, else 1
    shard_group: dist.ProcessGroup | None
    replica_group: dist.ProcessGroup | None
    process_groups: tuple[dist.ProcessGroup, ...]
    dtypes: frozenset[torch.dtype]  # dtypes of messages, so far as known before the first pass
    tensor_parallel: bool
    comms: frozenset[str]  # classes in the slots
    ring: bool = False  # whether the model's layers split sequences over ranks
    meshes: frozenset[tuple[int, int]] = frozenset()  # shards and replicas of every group
    keeps: bool = False  # whether torch keeps gathered parameters
    ignores_tables: bool = False  # whether ``fully_shard`` ignores tables with sparse gradients

    @property
    def layout(self) -> dict[str, Any]:
        """Return how residuals are split over ranks; lists meshes only if there are several."""
        found: dict[str, Any] = {"shards": self.shards, "replicas": self.replicas}
        if len(self.meshes) > 1:
            found["meshes"] = sorted(map(list, self.meshes))
        return found


def job_of(model: nn.Module, groups: list[Any]) -> ShardedJob:
    """Collect the facts of a model; no collective."""
    sizes = [(_size(group, "shard"), _size(group, "replicate")) for group in groups]
    first = max(range(len(groups)), key=lambda place: sizes[place][0] * sizes[place][1])
    shard, replicas = _group(groups[first], "shard"), _group(groups[first], "replicate")
    every: dict[int, dist.ProcessGroup] = {}
    ranks: set[int] = set()
    for group in groups:
        for role in ("shard", "replicate"):
            found = _group(group, role)
            if found is not None:
                every[id(found)] = found
        ranks |= set(_ranks(group))
    parameters = [p for group in groups for p in group.fsdp_params]
    return ShardedJob(
        ranks=tuple(sorted(ranks)),
        shards=sizes[first][0],
        replicas=sizes[first][1],
        shard_group=shard,
        replica_group=replicas,
        process_groups=tuple(every.values()),
        dtypes=frozenset(map(dtype_of, parameters)),
        tensor_parallel=any(p.is_dtensor for p in parameters),
        comms=frozenset(
            type(comm).__name__
            for group in groups
            for comm in (group._all_gather_comm, group._reduce_scatter_comm)
        ),
        ring=has_ring(model),
        meshes=frozenset(sizes),
        keeps=all(map(keeps, parameters)),
        ignores_tables=any(not isinstance(table.weight, DTensor) for _, table in tables_of(model)),
    )


def dtype_of(parameter: Any) -> torch.dtype:
    """Return the dtype in which an ``FSDPParam`` is gathered."""
    found: torch.dtype = parameter.mp_policy.param_dtype or parameter.sharded_param.dtype
    return found


def _ranks(group: Any) -> list[int]:
    found: list[int] = group.mesh_info.mesh.mesh.flatten().tolist()
    return found


def whereabouts(group: Any, job: ShardedJob) -> str:
    """Return a suffix for names of ``group``'s parameters: its ranks, "" on the whole mesh."""
    ranks = sorted(_ranks(group))
    return "" if tuple(ranks) == job.ranks else f" on ranks {', '.join(map(str, ranks))}"


def _group(group: Any, role: str) -> dist.ProcessGroup | None:
    """Return the process group over which a parameter group shards or replicates."""
    found: dist.ProcessGroup | None = getattr(group.mesh_info, f"{role}_process_group", None)
    return found


def _size(group: Any, role: str) -> int:
    found = _group(group, role)
    return 1 if found is None else found.size()


def _foreign(job: ShardedJob) -> bool:
    return bool(job.comms - set(OWN_COMMS))


def _keeps_copy(block: CompressionConfig) -> bool:
    return block.zero.keeps_copy


_FSDP2: tuple[Rule[ShardedJob], ...] = (
    *elsewhere("fully_shard", lambda job: job.ring, lambda job: job.ignores_tables),
    Rule(
        "refuse", ("embed",), "tables that fully_shard ignores, on a part of the ranks",
        "they are averaged over all ranks of the job", "leave embed out",
        lambda job: job.ignores_tables and len(job.ranks) != dist.get_world_size(),
    ),
    Rule(
        "refuse", ("dp", "zero"), "set_symm_mem_for_comm",
        "symmetric memory sends from buffers of its own, and takes no other collective",
        "do not call it",
        lambda job: any(name.startswith("SymmMem") for name in job.comms),
    ),
    Rule(
        "refuse", ("dp", "zero"), "set_custom_all_gather or set_custom_reduce_scatter",
        "somebody else's communication is in the slot", "do not call it", _foreign,
    ),
    Rule(
        "bypass", ("tp",), "layers that DTensor cuts (tensor parallel)",
        "DTensor communicates by functional collectives, which have no slot",
        "leave tp out", lambda job: job.tensor_parallel,
    ),
    Rule(
        "absent", ("tp",), "a model whose layers are not cut", "nothing is sent", "leave tp out",
        lambda job: not job.tensor_parallel,
    ),
    Rule(
        "refuse", ("zero",), "a lossy codec with layers that DTensor cuts (tensor parallel)",
        "norms that tensor ranks have in common would be decoded differently on each",
        "use a lossless codec",
        lambda job: job.tensor_parallel, lambda block: "zero" in lossy(block),
    ),
    Rule(
        "refuse", ("dp",), "a lossy codec with layers that DTensor cuts (tensor parallel)",
        "norms that tensor ranks have in common would be updated differently on each",
        "use a lossless codec",
        lambda job: job.tensor_parallel, lambda block: "dp" in lossy(block),
    ),
    Rule(
        "refuse", ("zero",), '"delta": true under fully_shard',
        "unsharded parameters are freed after use, and keeping what deltas are added to would take "
        "the memory that sharding saves", "remove delta",
        lambda job: True, lambda block: block.zero.delta and not block.zero.steps,
    ),
    Rule(
        "refuse", ("zero",), "stepcode without set_keep_unsharded_storage",
        "unsharded parameters are freed after use, so that nothing is left that steps could be "
        "taken from",
        "call set_keep_unsharded_storage(True), of torch 2.15, before attaching, or use expcode",
        lambda job: not job.keeps, lambda block: block.zero.steps,
    ),
    Rule(
        "refuse", ("zero",), "stepcode with fp32 parameters", "it encodes bf16 and fp16",
        "gather in bf16 or fp16 (MixedPrecisionPolicy), or use expcode",
        lambda job: job.dtypes == {torch.float32}, lambda block: block.zero.steps,
    ),
    Rule(
        "refuse", ("zero",), '"secondary" with an HSDP mesh',
        "it shards inside of a node, so that nothing is gathered between nodes",
        "remove secondary", lambda job: job.replicas > 1, _keeps_copy,
    ),
    Rule(
        "refuse", ("zero",), '"secondary" on a part of the ranks, or with tensor parallel layers',
        "copies are cut over all ranks of the job, node by node", "remove secondary",
        lambda job: job.replicas == 1 and (job.shards != dist.get_world_size()
        or job.tensor_parallel or len(job.meshes) > 1), _keeps_copy,
    ),
    Rule(
        "refuse", ("zero",), '"secondary" with fp32 parameters',
        "steps are those of bf16 and fp16",
        "gather in bf16 or fp16 (MixedPrecisionPolicy), or remove secondary",
        lambda job: job.dtypes == {torch.float32}, _keeps_copy,
    ),
    Rule(
        "refuse", ("zero",), '"frozen" beside "secondary" under fully_shard',
        "weights that do not change send no steps to a node's copy", "remove frozen",
        lambda job: True, lambda block: _keeps_copy(block) and block.zero.keeps_frozen is not None,
    ),
    Rule(
        "refuse", ("dp",), '"accumulate": "node" with an HSDP mesh',
        "torch itself sums micro-batches inside a shard group then, between calls of "
        "set_requires_all_reduce(False) and (True)", "remove accumulate",
        lambda job: job.replicas > 1, lambda block: block.dp.accumulate == "node",
    ),
    Rule(
        "refuse", ("dp",), "powersgd under fully_shard",
        "gradients are cut for their owners before they are reduced, and each cut would have "
        "factors of its own", "use DistributedDataParallel, or another codec",
        lambda job: True, lambda block: "dp" in block.policy().low_rank,
    ),
    Rule(
        "absent", ("zero",), "one rank in each shard group", "nothing is gathered",
        "leave zero out", lambda job: max((job.shards, *(n for n, _ in job.meshes))) < 2,
    ),
    Rule(
        "absent", ("dp",), "one rank in the mesh", "nothing is sent", "leave dp out",
        lambda job: job.shards * job.replicas < 2,
    ),
)  # fmt: skip
#: rules over a ``ShardedJob``
FSDP2: tuple[Rule[ShardedJob], ...] = (*_FSDP2, *engine.without_seam(dimensions.FSDP2, _FSDP2))


def check_hierarchy(block: CompressionConfig, job: ShardedJob) -> None:
    """Raise ConfigError where ``hierarchy`` and an HSDP mesh disagree about the nodes."""
    found = block.hierarchy
    of_node = found[0] if isinstance(found, list) else found
    if job.replicas > 1 and isinstance(of_node, int) and of_node != job.shards:
        todo = (
            f"the HSDP mesh shards over {job.shards} ranks and says by that which share a node; "
            f"write {job.shards}{' first' if isinstance(found, list) else ''}, "
            '"auto" (native inside a shard group, encoded between replicas) '
            'or "none" (both encoded)'
        )
        raise ConfigError(f"{BLOCK}.hierarchy", block.hierarchy, todo)
