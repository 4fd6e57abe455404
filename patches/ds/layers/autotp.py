"""Tensor-parallel layers of DeepSpeed AutoTP in training, dimension ``tp``.

Seams: the autograd functions of ``module_inject.layers`` and the global ``dist`` through which they
communicate; replacements for the layers would copy upstream code that every release changes.
Forward: the all-reduce after row-parallel layers and vocabulary-parallel embeddings, the all-gather
of ``gather_output``. Backward: the all-reduce of input gradients of column-parallel layers,
asynchronous with ``tp_overlap_comm``, and of replicated inputs of a row-parallel head.

Exact: gathers of parameters (checkpoints), gradients of replicated parameters, the vocabulary-
parallel loss, norms, clipping. Native: inference. Refused: Domino, whose layers communicate in
another module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hybridcomp.channels import Channels
from hybridcomp.patches.common.collective_wrappers import (
    make_all_gather_into_tensor,
    make_all_reduce,
)
from hybridcomp.patches.common.engine_packages import comes_from
from hybridcomp.patches.common.routes import make_backward, make_stand_in
from hybridcomp.patches.ds.job_facts import DOMINO
from hybridcomp.patches.ds.layers.layer_scope import (
    TENSOR,
    make_call,
    make_forward,
    make_layer_forward,
    refuse,
    tag,
    upstream_has,
    whose,
)
from hybridcomp.patches.ds.requirement import REQUIREMENT
from hybridcomp.seams.patching import Seam

LAYERS = "deepspeed.module_inject.layers"

#: autograd function -> parameters of its ``forward`` after ``ctx``; True if its ``backward`` sends
FUNCTIONS: dict[str, tuple[tuple[str, ...], bool]] = {
    "RowParallel": (("group", "input", "is_inference_mode"), False),
    "ColumnParallel": (("group", "input"), True),
    "AsyncColumnParallel": (("group", "input", "weight", "bias"), True),
}
#: functions of releases after 0.19.0
LATER: dict[str, tuple[tuple[str, ...], bool]] = {
    "ScatterToTensorParallelRegion": (
        ("group", "input", "partition_sizes", "tp_index"),
        True,
    ),
    "GatherFromTensorParallelRegion": (("group", "input", "partition_sizes"), False),
}
#: function -> parameters of its ``forward`` in older releases. Up to 0.19.5 this function gathers
#: lists of tensors, which stay native
OLDER = {"GatherFromTensorParallelRegion": ("ctx", "group", "input")}


def _in_training() -> Channels | None:
    """Return the channels of the running layer's engine; None if layers run for inference."""
    training: bool = sys.modules[LAYERS].is_autotp_training_mode()
    return whose() if training else None


def _seam(qualname: str, parameters: tuple[str, ...] | None) -> Seam:
    return Seam(REQUIREMENT, LAYERS, qualname, parameters)


def _forward(name: str, parameters: tuple[str, ...]) -> Seam:
    newest = ("ctx", *parameters)
    ways = (OLDER[name], newest) if name in OLDER else (newest,)
    return Seam(REQUIREMENT, LAYERS, f"{name}.forward", ways)


def attached(engine: Any, channels: Channels) -> None:
    """Tag the layers of an engine. Raises ConfigError if Domino would bypass ``tp``."""
    tag(engine, channels)
    domino = {
        type(module).__name__ for module in engine.module.modules() if comes_from(module, DOMINO)
    }
    if domino:
        reason = "Domino's layers reduce in a module of their own"
        refuse(channels, "tp", ", ".join(sorted(domino)), reason, "use tensor_parallel.autotp_size")


def _patches() -> tuple[tuple[Seam, Callable[..., Any]], ...]:
    later = {name: found for name, found in LATER.items() if upstream_has(LAYERS, name)}
    functions = {**FUNCTIONS, **later}
    return (
        (
            _seam("dist", None),
            make_stand_in(
                {
                    "all_reduce": make_all_reduce(TENSOR),
                    # a row-parallel LM head of 0.19.0 reduces with this function, even in training
                    "inference_all_reduce": make_all_reduce(replace(TENSOR, whose=_in_training)),
                    "all_gather_into_tensor": make_all_gather_into_tensor(TENSOR),
                }
            ),
        ),
        (_seam("TensorParallel_Layer.__call__", ("self", "args", "kwargs")), make_call),
        (_seam("LmHeadLinearAllreduce.forward", ("self", "input")), make_layer_forward),
        *(
            (_forward(name, parameters), make_forward)
            for name, (parameters, _) in functions.items()
        ),
        *(
            (_seam(f"{name}.backward", ("ctx", "grad_output")), make_backward)
            for name, (_, sends) in functions.items()
            if sends
        ),
    )


COVERS = ("tp",)
ATTACHED = attached
PATCHES = _patches()
