"""Give a DeepSpeed engine the ranks of an island as its data-parallel group, for ``sync``.

It uses ``mpu``, the argument of ``deepspeed.initialize`` by which Megatron passes its own groups:
DeepSpeed asks it everywhere for the data-parallel group, and for a model-parallel group, which here
consists of this rank alone.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from hybridcomp.collectives.topology import ranks_of
from hybridcomp.config import CompressionConfig
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.job import peer_liveness
from hybridcomp.job.member_groups import shared_member_group
from hybridcomp.job.parameter_names import named_once
from hybridcomp.patches.common import island_steps
from hybridcomp.patches.ds.zero import partitions
from hybridcomp.sync import Islands, Masters, checkpoint_state
from hybridcomp.sync.master_weights import in_memory, piece_of

KEY = "compression.sync"
#: attribute of an engine: its unit, with the islands of its job
ATTRIBUTE = "_hybridcomp_island_unit"
#: attributes in which DeepSpeed's optimizers keep fp32 weights, and whether these are replicated
_KEPT = (
    ("single_partition_of_fp32_groups", False),  # stages 1 and 2
    ("fp32_groups_flat_partition", False),  # BF16_Optimizer
    ("fp32_partitioned_groups_flat", False),  # stage 3
    ("fp32_groups_flat", True),  # FP16_Optimizer
)


class IslandUnit:
    """An ``mpu`` whose data-parallel group is an island."""

    def __init__(self, islands: Islands) -> None:
        """Take the group of this rank alone, too."""
        self.islands = islands
        self._alone: dist.ProcessGroup = shared_member_group(
            [dist.get_rank()], timeout=peer_liveness.time_limit()
        )

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Return the ranks of the island."""
        return self.islands.inside

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the global ranks of the island."""
        return list(self.islands.ranks)

    def get_data_parallel_world_size(self) -> int:
        """Return the number of ranks of the island."""
        return self.islands.width

    def get_data_parallel_rank(self) -> int:
        """Return the index of this rank in the island."""
        return self.islands.place

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the group of this rank alone."""
        return self._alone

    def get_model_parallel_world_size(self) -> int:
        """Return 1."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """Return 0."""
        return 0


def give(
    arguments: MutableMapping[str, Any], block: CompressionConfig | None
) -> tuple[Islands, Any] | None:
    """Put an ``IslandUnit`` into an engine's ``arguments``, if the block has islands.

    Returns the input of ``finish`` for when the engine is built: the islands, and the training
    data, which DeepSpeed would otherwise distribute only among the ranks of an island. None without
    islands. Raises ConfigError if the engine has its own groups, or if an earlier engine's islands
    would split it.
    """
    islands = None if block is None else island_steps.islands_in(block)
    if islands is None:
        from deepspeed.utils import groups

        if arguments.get("mpu") is None and isinstance(groups.mpu, IslandUnit):
            todo = (
                "DeepSpeed has one layout for all engines of a process, and an earlier one has "
                "islands; destroy that one first, or give this one the same sync"
            )
            raise ConfigError(KEY, Shown("an engine without islands"), todo)
        return None
    for name in ("mpu", "mesh_device"):
        if arguments.get(name) is not None:
            todo = "the engine then has groups of its own; leave it out, or leave sync out"
            raise ConfigError(KEY, Shown(f"deepspeed.initialize(..., {name}=...)"), todo)
    arguments["mpu"] = IslandUnit(islands)
    data, arguments["training_data"] = arguments.get("training_data"), None
    return islands, data


def finish(engine: Any, given: tuple[Islands, Any] | None) -> None:
    """Distribute training data to all ranks of the job, and remove the unit from the engine.

    DeepSpeed's modules keep the unit. It is removed from the engine because scripts ask the
    engine's ``mpu`` for this rank's part of the data, and two islands have the same ranks there.
    """
    if given is None:
        return
    _, data = given
    unit, engine.mpu = engine.mpu, None
    setattr(engine, ATTRIBUTE, unit)
    if data is not None:
        sampler: Any = DistributedSampler(data) if hasattr(data, "__len__") else None
        engine.training_dataloader = engine.deepspeed_io(data, data_sampler=sampler)


def release(engine: Any) -> None:
    """Give DeepSpeed's later engines the whole job again, once ``engine`` is destroyed.

    Python may destroy an engine a second time on collecting it, when a later engine's unit is set.
    """
    from deepspeed.utils import groups

    if groups.mpu is not None and groups.mpu is getattr(engine, ATTRIBUTE, None):
        groups.mpu = None


def masters_of(engine: Any) -> Masters:
    """Return the fp32 weights that this rank's optimizer changes. Raises ConfigError."""
    _check(engine)
    optimizer = engine.optimizer
    for name, replicated in _KEPT:
        tensors = getattr(optimizer, name, None)
        if tensors:
            ranges, without = _ranges(optimizer, tensors), _without(engine)
            return Masters(
                [(f"group {index} at {low}{without}", high - low) for index, low, high in ranges],
                functools.partial(_data, tensors, ranges),
                functools.partial(_written, optimizer),
                replicated,
            )
    held = getattr(optimizer, "optimizer", optimizer)
    if engine.zero_optimization_stage() or type(held).__module__.startswith("deepspeed.runtime"):
        todo = "it keeps its weights in a way that sync does not know; use Adam, AdamW or SGD"
        raise ConfigError(KEY, Shown(type(optimizer).__name__), todo)
    found = {n: p for n, p in named_once(engine.module)[0].items() if p.requires_grad}
    return Masters(
        [piece_of(name, parameter.data) for name, parameter in found.items()],
        lambda: [in_memory(parameter.data) for parameter in found.values()],
        lambda: None,
        replicated=True,
    )


def _without(engine: Any) -> str:
    """Return which parameters flat groups lack, as a digest; two islands may train other layers."""
    frozen = [n for n, p in named_once(engine.module)[0].items() if not p.requires_grad]
    digest = hashlib.sha256(repr(sorted(frozen)).encode()).hexdigest()[:16]
    return f" without {digest}" if frozen else ""


def _ranges(optimizer: Any, tensors: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Return the ranges that hold weights: index of a flat tensor, start and end.

    The padding of stage 3 is left out: it may be NaN, and a meeting that finds NaN is skipped.
    """
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        groups = [partitions.stretches(group) for group in optimizer.fp16_groups]
    else:
        groups = [[(0, tensor.numel())] for tensor in tensors]
    return [(index, low, high) for index, group in enumerate(groups) for low, high in group]


def _data(tensors: Sequence[Tensor], ranges: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    return [tensors[index].data[low:high] for index, low, high in ranges]


def _written(optimizer: Any) -> None:
    """Update the 16-bit weights from the fp32 ones, as the optimizer does after its step."""
    if hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp32_partitioned_groups_flat"):
        for index in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        persistent = optimizer.persistent_parameters
        if persistent:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)
    else:
        for wide, group in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
            parts = wide.data.split([parameter.numel() for parameter in group])
            for parameter, values in zip(group, parts, strict=True):
                parameter.data.copy_(values.view_as(parameter))


def _check(engine: Any) -> None:
    """Raise ConfigError if weights are sharded over other ranks than the island's."""
    own = ranks_of(engine.data_parallel_group)
    for parameter in engine.module.parameters():
        group = getattr(parameter, "ds_process_group", None)
        if group is not None and ranks_of(group) != own:
            todo = (
                "deepspeed.zero.Init has cut the weights over other ranks than the island's, "
                f"{list(own)}; build the model without it"
            )
            raise ConfigError(KEY, Shown(f"weights cut over {list(ranks_of(group))}"), todo)


def folder_of(engine: Any, folder: str) -> str:
    """Return where this rank's island saves DeepSpeed's checkpoints, below ``folder``.

    The first island uses ``folder`` itself, as its optimizer states are as good as any. Other
    islands have their own states under the same names, so they use subfolders.
    """
    islands = islands_of_engine(engine)
    return folder if islands is None else island_folder(folder, islands.index)


def island_folder(folder: str, index: int) -> str:
    """Return the folder of island ``index``."""
    return f"{folder}/island_{index}" if index else folder


def saved_folder(engine: Any, folder: str, tag: str) -> str:
    """Return where this rank's island finds a checkpoint below ``folder``.

    If there are more islands than at saving, several use the same one. Folders of further islands
    are of an earlier save of the same tag: its ranks are more than the files of this one.
    """
    islands = islands_of_engine(engine)
    if islands is None:
        return folder
    count = 1
    while Path(island_folder(folder, count), tag).is_dir():
        count += 1
    if ranks := len(list(Path(folder, tag).glob(checkpoint_state.FILES))):
        count = min(count, max(1, ranks // islands.width))
    return island_folder(folder, islands.index % count)


def islands_of_engine(engine: Any) -> Islands | None:
    """Return the islands of an engine; None if it has none."""
    unit: IslandUnit | None = getattr(engine, ATTRIBUTE, None)
    return None if unit is None else unit.islands
