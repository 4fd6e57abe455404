"""Collect facts about a DeepSpeed job from its model and process groups."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybridcomp import nn
from hybridcomp.channels import NAME
from hybridcomp.patches.common.engine_packages import comes_from, is_a
from hybridcomp.patches.common.sparse_tables import tables_of
from hybridcomp.patches.mcore.groups import sizes
from hybridcomp.patches.neox.checkout import is_neox

#: module whose layers reduce over tensor-parallel ranks by themselves
DOMINO = "deepspeed.runtime.domino"
#: classes of attention layers that exchange heads for sequence, or pass keys round a ring
SEQUENCE_LAYERS = frozenset({"DistributedAttention", "FPDT_Attention", "RingAttention"})
#: class of hybridcomp's ring attention
RING = "RingAttention"
#: attribute of an engine: torch's loss scaler, used at stage 0 with fp16 by torch.autocast
Z0_SCALER = "torch_autocast_z0_gradscaler"
#: attribute of an engine: its ``WeightGather``, of a module that few jobs import
GATHERED = "_hybridcomp_gathered"
#: package of hybridcomp's layers that are sharded over a mesh
MESH_LAYERS = "hybridcomp.nn.tp2d"
#: class of hybridcomp's pipeline stages over token slices
SLICED_STAGE = "SlicedStage"


def facts(model: Any, mpu: Any, mesh_device: Any) -> dict[str, Any]:
    """Return the keyword arguments of ``ds_check.check`` before an engine is built."""
    from deepspeed.runtime.pipe.module import PipelineModule

    kinds = {cls for module in model.modules() for cls in type(module).__mro__}
    names = {cls.__name__ for cls in kinds}
    layout = model.mpu() if isinstance(model, PipelineModule) else mpu
    replicas = getattr(layout, "get_data_parallel_world_size", None)
    domino = any(cls.__module__.startswith(DOMINO) for cls in kinds)
    return {
        "pipeline": isinstance(model, PipelineModule),
        "moe": not names.isdisjoint({"MoE", "MOELayer"}),
        "world_size": dist.get_world_size(),
        "tensor": domino or "TensorParallel_Layer" in names or tensor_ranks() > 1,
        "replicas": None if replicas is None else replicas(),
        "slices": SLICED_STAGE in names,
        "mesh": any(cls.__module__.startswith(MESH_LAYERS) for cls in kinds),
        "tables": nn.has_tables(),
        "sparse": any(True for _ in tables_of(model)),
        "sequence": not names.isdisjoint(SEQUENCE_LAYERS) or sequence_size(mpu, mesh_device) > 1,
    }


def compile_locks() -> Iterator[str]:
    """Yield a notice for each lock of a compilation of DeepSpeed's operations by torch.

    Starts wait for a lock silently and without a limit, also for one that a killed start has left.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    root = Path(named) if named else Path(cache) / "torch_extensions"
    for lock in sorted({*root.glob("*/lock"), *root.glob("*/*/lock")}):
        yield f"{lock}: DeepSpeed waits until it is gone; if nothing compiles, delete it"


def layout(engine: Any) -> dict[str, int | None]:
    """Return the layout of an engine, by a plan's names (``config.planned``); None: unknown."""
    stages = getattr(engine, "num_stages", None)  # only PipelineEngine has it
    if stages is None:
        stages = next((module.count for module in engine.module.modules()
                       if is_a(module, SLICED_STAGE)), None)  # fmt: skip
    experts = getattr(engine, "expert_data_parallel_group", None) or {}
    ring, mesh = _own_cuts(engine.module)
    return {
        "ranks": dist.get_world_size(),
        # to the engine, ranks that share a sequence in a ring are replicas
        "data": dist.get_world_size(engine.data_parallel_group) // ring,
        "context": ring if ring > 1 else None,
        "mesh": mesh,
        "tensor": max(tensor_ranks(), engine.autotp_size() or 1),
        "stages": 1 if stages is None else int(stages),
        "expert": None if experts else 1,
        "zero_stage": int(engine.zero_optimization_stage()),
        "micro_batch": int(engine.train_micro_batch_size_per_gpu()),
        "accumulation": int(engine.gradient_accumulation_steps()),
        "offload": int(engine.zero_use_cpu_optimizer()),
    }


def _own_cuts(model: Any) -> tuple[int, int]:
    """Return the ranks of a model's rings, and the ranks on a side of its meshes; 1 if none."""
    ring = mesh = 1
    for module in model.modules():
        if is_a(module, RING):
            ring = max(ring, dist.get_world_size(module.group))
        elif comes_from(module, MESH_LAYERS):
            mesh = int(module.mesh.q)
    return ring, mesh


def sequence_size(mpu: Any, mesh_device: Any) -> int:
    """Return the number of ranks over which the sequence is split."""
    size = getattr(mpu, "get_sequence_parallel_world_size", None)
    if size is not None:
        return int(size())
    if mesh_device is not None:
        return dist.get_world_size(mesh_device.get_group(mesh_dim="sequence_parallel"))
    return 1


def unique_name(engine: Any, name: str, parameter: Any) -> str:
    """Return a parameter's name, with a rank if ranks have different parameters of that name.

    Residuals are summed by name when the number of ranks changes, so names must be unique. Ranks
    that share a sequence hold the same parameters and reduce their gradients in one group.
    """
    from deepspeed.moe.utils import is_moe_param
    from deepspeed.utils import groups

    if is_moe_param(parameter):
        name += f"#ep{groups._get_expert_parallel_rank(parameter.group_name)}"
    if name.startswith("tied_modules."):  # several stages each reduce a copy
        stage = engine.mpu.get_pipe_parallel_rank()
        name += f"#pp{stage}" if stage else ""
    rank = tensor_rank(engine.mpu)
    return f"{name}#tp{rank}" if rank else name


def tensor_rank(mpu: Any) -> int:
    """Return the rank in the tensor-parallel group; 0 without one."""
    rank: Callable[[], int] | None = getattr(mpu, "get_tensor_model_parallel_rank", None)
    if rank is None:
        rank = getattr(mpu, "get_model_parallel_rank", None)
        if rank is getattr(mpu, "get_sequence_parallel_rank", None):
            # ALST's mpu uses this name for sequence groups; if both are None there is no such group
            return 0
    return 0 if rank is None else rank()


def common_names(engine: Any) -> frozenset[str]:
    """Return the names of vectors (norms, biases) that tensor-parallel ranks have in common.

    It relies on upstream's marks, on which upstream's gradient norm depends too. A sharded vector
    without the mark is sent exactly, which is harmless; common matrices, such as experts, are too
    large for that.
    """
    from deepspeed.runtime.utils import is_model_parallel_parameter

    size = getattr(engine.mpu, "get_tensor_model_parallel_world_size", tensor_ranks)
    if size() < 2:
        return frozenset()
    return frozenset(
        getattr(parameter, NAME)
        for parameter in engine.module.parameters()
        if len(getattr(parameter, "ds_shape", parameter.shape)) < 2
        and not is_model_parallel_parameter(parameter)
    )


def tensor_ranks() -> int:
    """Return the size of tensor-parallel groups of GPT-NeoX or megatron-core; 1 without any.

    DeepSpeed does not know these groups: with a pipeline GPT-NeoX does not even pass its ``mpu``.
    """
    if "megatron.mpu" in sys.modules and is_neox():
        mpu = importlib.import_module("megatron.mpu")
        if mpu.model_parallel_is_initialized():
            return int(mpu.get_model_parallel_world_size())
    if "megatron.core.parallel_state" in sys.modules:
        return sizes().get("tp", 1)
    return 1


def loss_scale(engine: Any) -> float:
    """Return the current factor on the gradients.

    It is 1.0 if ``engine.backward`` does not scale: the fp16 optimizers of stage 0 have a loss
    scale, but 0.19 multiplies the loss only for a ZeROOptimizer or an autocast scaler.
    """
    from deepspeed.runtime.base_optimizer import ZeROOptimizer

    scaler = getattr(engine, Z0_SCALER, None)
    if scaler is not None:
        return float(scaler.get_scale())
    if isinstance(engine.optimizer, ZeROOptimizer):
        return float(getattr(engine.optimizer, "loss_scale", 1.0) or 1.0)
    return 1.0
