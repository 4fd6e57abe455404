"""State which weights megatron-core's optimizers change on this rank, for ``sync``.

The distributed optimizer keeps fp32 shards; other optimizers keep all weights of the rank, equal on
all ranks of the data-parallel group. Vectors that all tensor ranks hold, such as norms, are
sent by the first tensor rank alone, which then copies the result to the other tensor ranks: with a
lossy codec these would decode different values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import NAME
from hybridcomp.collectives.topology import Ranks, ranks_of
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.job import small_messages
from hybridcomp.sync import Masters
from hybridcomp.sync.exact_sends import broadcast
from hybridcomp.sync.kept_gradients import KeptGradients, before_output

KEY = "compression.sync"
DISTRIBUTED = "DistributedOptimizer"
#: groups of an optimizer's parameters and, in the same order, of the fp32 tensors that it changes
_KEPT = {
    DISTRIBUTED: (
        ("model_float16_groups", "shard_fp32_from_float16_groups"),
        ("model_fp32_groups", "shard_fp32_groups"),
    ),
    "Float16OptimizerWithFloat16Params": (
        ("float16_groups", "fp32_from_float16_groups"),
        ("fp32_from_fp32_groups", "fp32_from_fp32_groups"),
    ),
    "FP32Optimizer": (),  # its param_groups hold the fp32 tensors
}
#: settings by which an optimizer keeps weights elsewhere, or gathers weights inside its step
_ELSEWHERE = (
    "optimizer_cpu_offload",
    "use_precision_aware_optimizer",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "overlap_param_gather_with_optimizer_step",
    "optimizer_cuda_graph",
)


@dataclass(frozen=True, eq=False)
class MasterPiece:
    """An fp32 tensor of an optimizer: a whole weight, or this rank's shard of one.

    Attributes:
        parameter: the model's parameter of which ``values`` are the fp32 weights.
        values: the tensor that the optimizer changes.
        start: where the shard begins in the parameter.
    """

    parameter: Any
    values: Tensor
    start: int

    @property
    def name(self) -> str:
        """Return the parameter's name in the job, and where the shard begins."""
        return f"{getattr(self.parameter, NAME, '')} at {self.start}"

    @property
    def is_expert(self) -> bool:
        """Return whether the parameter belongs to an expert; experts have separate groups."""
        return not getattr(self.parameter, "allreduce", True)

    @property
    def is_cut(self) -> bool:
        """Return whether the parameter is sharded over the tensor ranks."""
        return bool(getattr(self.parameter, "tensor_model_parallel", False))


@dataclass(frozen=True, eq=False)
class CommonPieces:
    """Pieces that the ranks of a tensor group have in common."""

    group: dist.ProcessGroup
    pieces: Sequence[MasterPiece]

    def check(self) -> None:
        """Raise ConfigError, on every rank of the group, if the ranks hold different shards."""
        own = [(piece.name.partition(".chunk")[2], piece.values.numel()) for piece in self.pieces]
        if any(other != own for other in small_messages.gather_objects(own, self.group)):
            shown = Shown(f"other shards on each of the tensor ranks {list(ranks_of(self.group))}")
            raise ConfigError(KEY, shown, "they have weights in common; make their buffers alike")

    def level(self) -> None:
        """Copy the first rank's values to all ranks of the group; a collective."""
        if not self.pieces:
            return
        whole = torch.cat([piece.values.detach().view(-1) for piece in self.pieces])
        broadcast(whole, dist.get_global_rank(self.group, 0), self.group)
        if dist.get_rank(self.group):
            parts = torch.split(whole, [piece.values.numel() for piece in self.pieces])
            for piece, part in zip(self.pieces, parts, strict=True):
                piece.values.detach().view(-1).copy_(part)


def masters_of(optimizer: Any, wrapper: Any, island: Ranks, todo: str) -> Masters:
    """Return the weights that ``optimizer`` changes on this rank; a collective of tensor groups.

    Args:
        optimizer: the outermost one of the job.
        wrapper: a DistributedDataParallel of its model.
        island: global ranks of this rank's island.
        todo: advice for the user if the optimizer's groups extend beyond the island.

    Raises ConfigError for an optimizer whose weights are not where Megatron's usual ones are.
    """
    leaves = list(_leaves(optimizer))
    for leaf in leaves:
        _check(leaf, island, todo)
    pieces = [piece for leaf in leaves for piece in _pieces(leaf)]
    sharded = any(type(leaf).__name__ == DISTRIBUTED for leaf in leaves)
    _check_experts(pieces, wrapper, sharded)
    common, left = _common(pieces)
    sent = [piece for piece in pieces if id(piece) not in left]
    nothing = torch.empty(0, dtype=torch.float32, device=_device(wrapper))
    return Masters(
        [(piece.name, piece.values.numel()) for piece in sent] or [("nothing", 0)],
        lambda: [piece.values.detach() for piece in sent] or [nothing],
        functools.partial(_written, leaves, common),
        replicated=not sharded,
        replicas=wrapper.dp_cp_group,
        kept=KeptGradients(
            lambda: [getattr(p, "main_grad", None) for p in wrapper.module.parameters()],
            functools.partial(before_output, wrapper),
        ),
    )


def _device(wrapper: Any) -> torch.device:
    found: torch.device = next(wrapper.module.parameters()).device
    return found


def _leaves(optimizer: Any) -> Iterator[Any]:
    """Yield those optimizers of a chain that have parameters on this rank."""
    if type(optimizer).__name__ == "ChainedOptimizer":
        for one in optimizer.chained_optimizers:
            yield from _leaves(one)
    elif not getattr(optimizer, "is_stub_optimizer", False):
        yield optimizer


def _check(leaf: Any, island: Ranks, todo: str) -> None:
    name, config = type(leaf).__name__, leaf.config
    if name not in _KEPT:
        way = "it keeps its weights in a way that sync does not know; use Adam or SGD"
        raise ConfigError(KEY, Shown(name), way)
    for setting in _ELSEWHERE:
        if getattr(config, setting, False):
            way = "the weights are not where islands could set them after a step; set it to False"
            raise ConfigError(KEY, Shown(setting), way)
    found = {"gradient norms": leaf.get_grad_stats_parallel_group()}
    if name == DISTRIBUTED:
        found["shards"] = leaf.data_parallel_group
    for words, group in found.items():
        if not set(ranks_of(group)) <= set(island):
            shown = Shown(f"an optimizer with {words} over ranks {list(ranks_of(group))}")
            raise ConfigError(f"{KEY}.islands", shown, f"the island is {list(island)}; {todo}")


def _pieces(leaf: Any) -> Iterator[MasterPiece]:
    kinds = _KEPT[type(leaf).__name__]
    if not kinds:
        for parameter in (p for group in leaf.param_groups for p in group["params"]):
            yield MasterPiece(parameter, parameter, 0)
    for of_model, of_optimizer in kinds:
        parameters = [p for group in getattr(leaf, of_model) for p in group]
        masters = [p for group in getattr(leaf, of_optimizer) for p in group]
        for parameter, values in zip(parameters, masters, strict=True):
            shard = type(leaf).__name__ == DISTRIBUTED
            start = leaf._get_model_param_range_map(parameter)["param"].start if shard else 0
            yield MasterPiece(parameter, values, start)


def _check_experts(pieces: Sequence[MasterPiece], wrapper: Any, sharded: bool) -> None:
    """Refuse experts without a distributed optimizer, if they are replicated over other ranks."""
    if sharded or ranks_of(wrapper.expt_dp_group) == ranks_of(wrapper.dp_cp_group):
        return
    if any(piece.is_expert for piece in pieces):
        todo = "other ranks hold the experts than the other weights; set use_distributed_optimizer"
        raise ConfigError(KEY, Shown("experts without the distributed optimizer"), todo)


def _common(pieces: Sequence[MasterPiece]) -> tuple[list[CommonPieces], frozenset[int]]:
    """Return the pieces equal on all tensor ranks; and the ids of those that another rank sends."""
    found, left = [], set()
    for expert, group in enumerate(_tensor_groups()):
        if group is None or dist.get_world_size(group) < 2:
            continue
        shared = [p for p in pieces if p.is_expert == bool(expert) and not p.is_cut]
        found.append(CommonPieces(group, shared))
        found[-1].check()
        if dist.get_rank(group):
            left |= {id(piece) for piece in shared}
    return found, frozenset(left)


def _tensor_groups() -> list[dist.ProcessGroup | None]:
    """Return the tensor-parallel groups of dense layers and of experts."""
    from megatron.core import parallel_state

    getters = ("get_tensor_model_parallel_group", "get_expert_tensor_parallel_group")
    return [getattr(parallel_state, name)(check_initialized=False) for name in getters]


@torch.no_grad()
def _written(leaves: Sequence[Any], common: Sequence[CommonPieces]) -> None:
    """Copy the optimizers' weights into the model, as the optimizers do in their steps.

    If gathers overlap the forward pass, the next forward pass gathers the weights.
    """
    for pieces in common:
        pieces.level()
    chunks: dict[int, Any] = {}
    for leaf in leaves:
        if hasattr(leaf, "_copy_main_params_to_model_params"):
            leaf._copy_main_params_to_model_params()
        if type(leaf).__name__ == DISTRIBUTED and not leaf.ddp_config.overlap_param_gather:
            chunks |= {id(chunk): chunk for chunk in leaf.model_chunks}
    for chunk in chunks.values():
        chunk.start_param_sync()
