"""Rules for models under torch's engines: dimensions that are refused, absent, or announced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.tensor import DTensor

from hybridcomp import dimensions, nn
from hybridcomp.config import CompressionConfig
from hybridcomp.config.error_messages import Shown
from hybridcomp.dimensions import Dimension
from hybridcomp.log import say_once as say
from hybridcomp.patches.common.engine_packages import is_a
from hybridcomp.patches.common.sparse_tables import tables_of
from hybridcomp.patches.rules import engine
from hybridcomp.patches.rules.engine import Rule


def elsewhere(
    name: str, has_ring: Callable[[Any], bool], has_sparse: Callable[[Any], bool]
) -> tuple[Rule[Any], ...]:
    """Return rules for dimensions that neither FSDP2 nor DDP has.

    ``has_ring``, ``has_sparse``: return whether a job has ring attention of ``hybridcomp.nn``, and
    tables of torch whose sparse gradients ``embed`` sums.
    """
    return (
        Rule(
            "absent", ("pp", "ep", "offload"), f"a model under {name}",
            "messages of pipelines and of routed tokens, and copies to the host, are encoded under "
            "DeepSpeed and Megatron only", "leave it out", lambda job: True,
        ),
        Rule(
            "absent", ("cp",), f"a model under {name}", "no layer of it cuts a sequence",
            "use hybridcomp.nn.RingAttention", lambda job: not has_ring(job),
        ),
        Rule(
            "absent", ("tp2d",), f"a model under {name}",
            "layers of hybridcomp.nn.tp2d send through the channels of their mesh",
            "give the mesh a session with tp2d in its block (docs/tp2d.md)", lambda job: True,
        ),
        Rule(
            "absent", ("embed",), engine.NO_TABLES, engine.NO_ROWS, engine.TABLES_TODO,
            lambda job: not nn.has_tables() and not has_sparse(job),
        ),
    )  # fmt: skip


def has_ring(model: Any) -> bool:
    """Return whether layers of ``model`` split sequences over ranks."""
    return any(is_a(layer, "RingAttention") for layer in model.modules())


def _has_tensor_parallel(model: Any) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _is_sparse(model: Any) -> bool:
    return any(True for _ in tables_of(model))


def _has_old_complex(model: Any) -> bool:
    old = Version(torch.__version__) < Version("2.13")
    return old and any(parameter.is_complex() for parameter in model.parameters())


_DDP: tuple[Rule[Any], ...] = (
    *elsewhere("DistributedDataParallel", has_ring, _is_sparse),
    Rule(
        "bypass", ("tp",), "layers that DTensor cuts (tensor parallel)",
        "DTensor communicates by functional collectives, which have no slot",
        "leave tp out", _has_tensor_parallel,
    ),
    Rule(
        "absent", ("tp",), "a model under DistributedDataParallel",
        "its layers are not cut", "leave tp out", lambda model: not _has_tensor_parallel(model),
    ),
    Rule(
        "absent", ("zero",), "a model under DistributedDataParallel",
        "every rank holds all parameters, and none are gathered",
        "leave zero out, or use fully_shard", lambda model: True,
    ),
    Rule(
        "bypass", ("dp",), "Embedding(sparse=True)",
        "sparse gradients are gathered row by row and come in buckets of their own",
        'name embed ("none": as torch sends them), or set sparse to False', _is_sparse,
        lambda block: "embed" not in block.explicit, is_part=True,
    ),
    Rule(
        "refuse", ("dp",), "complex parameters with a torch before 2.13",
        "their sums differ from native ones there", "install torch 2.13, or leave dp out",
        _has_old_complex,
    ),
    Rule(
        "bypass", ("dp",), "delay_all_reduce_named_params",
        "DDP sums the gradients of these parameters outside its buckets", "remove it",
        lambda model: bool(model._delay_all_reduce_params), is_part=True,
    ),
    Rule(
        "refuse", ("dp",), 'torch._dynamo.config.optimize_ddp = "python_reducer"',
        "gradients are then reduced one by one in compiled code, without buckets", "set it to True",
        lambda model: bool(model._use_python_reducer),
    ),
    Rule(
        "refuse", ("dp",), "_apply_optimizer_in_backward",
        "DDP takes its one communication hook for optimizers that run in the backward pass",
        "run them after it",
        lambda model: any(hasattr(p, "_in_backward_optimizers") for p in model.parameters()),
    ),
    Rule(
        "refuse", ("dp",), '"accumulate": "node" under DistributedDataParallel',
        "each rank adds up the micro-batches inside of no_sync() itself, and the last one crosses",
        "remove accumulate", lambda model: True, lambda block: block.dp.accumulate == "node",
    ),
    Rule(
        "absent", ("dp",), "one rank", "nothing is sent", "leave dp out, or add ranks",
        lambda model: dist.get_world_size(model.process_group) < 2,
    ),
)  # fmt: skip
#: rules over a DistributedDataParallel
DDP: tuple[Rule[Any], ...] = (*_DDP, *engine.without_seam(dimensions.DDP, _DDP))


def check(
    block: CompressionConfig, table: Sequence[Rule[Any]], job: Any, ungathered: str = ""
) -> frozenset[Dimension]:
    """Check the block against a model; return the dimensions without messages.

    ``ungathered``: why the key ``gathered`` cannot act; empty where it can.

    Raises ConfigError for the first dimension that cannot act. With ``"on_unsupported": "native"``
    rank 0 instead prints once which messages stay native, and why.
    """
    rules = [(rule, job) for rule in table]
    if block.generate is not None:
        say(engine.no_generation(block, Shown(f"a model under {type(job).__name__}")))
    for sentence in engine.hold(block, rules):
        say(sentence)
    for sentence in engine.ungathered(block, ungathered) if ungathered else ():
        say(sentence)
    return engine.absent(rules)
