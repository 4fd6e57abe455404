"""Tensor-parallel collectives of megatron-core's local layers.

The seams are the globals through which ``mappings`` and ``layers`` call torch.distributed; the
overlap, the buffers and the autograd functions stay upstream's. ``_reduce`` and its neighbours are
no seams: half of the bytes are the input gradients of
``LinearWithGradAccumulationAndAsyncCommunication.backward``, which calls
``torch.distributed.all_reduce`` itself and overlaps it with the weight gradient. Nor are the public
wrappers, which modules bind early.

In ``layers``, gathered tensors are inputs (``forward``, also where the backward pass gathers one a
second time, which must give the same values), and reduced tensors are gradients (``backward``). In
``mappings``, the ``backward`` methods are marked.

Exact, because in other modules: cross-entropy, norms, clipping, reductions of embedding gradients.
Exact, because of other groups: token counts and losses of MoE.
"""

from __future__ import annotations

import torch.distributed as dist

from hybridcomp.dimensions import Dimension, Direction
from hybridcomp.patches.common.collective_wrappers import (
    make_all_gather_into_tensor,
    make_all_reduce,
    make_all_to_all_single,
    make_reduce_scatter_tensor,
)
from hybridcomp.patches.common.list_wrappers import make_all_gather_list, make_reduce_scatter_list
from hybridcomp.patches.common.routes import Layers, make_backward, make_torch, torch_seam
from hybridcomp.patches.mcore.experts import TOKENS
from hybridcomp.patches.mcore.groups import dimension_of
from hybridcomp.patches.mcore.requirement import REQUIREMENT
from hybridcomp.seams.patching import Seam

MAPPINGS = "megatron.core.tensor_parallel.mappings"
LAYERS = "megatron.core.tensor_parallel.layers"

GATHER_PARAMETERS = ("output_tensor", "input_tensor", "group", "async_op")
SCATTER_PARAMETERS = ("output", "input", "op", "group", "async_op")


def _dimension(group: dist.ProcessGroup | None) -> Dimension | None:
    return dimension_of(group, "tp")


def _forward() -> Direction:
    return "forward"


def _backward() -> Direction:
    return "backward"


#: Layers of ``mappings`` (direction by the running method), and of gathers and reductions in
#: ``layers``
MARKED, INPUTS, GRADIENTS = (
    Layers(_dimension),
    Layers(_dimension, _forward),
    Layers(_dimension, _backward),
)


def _function(module: str, name: str, parameters: tuple[str, ...]) -> Seam:
    return Seam(requirement=REQUIREMENT, module=module, qualname=name, parameters=parameters)


#: autograd functions of ``mappings`` whose backward pass communicates
FUNCTIONS = (
    "_CopyToModelParallelRegion",
    "_ScatterToModelParallelRegion",
    "_ScatterToSequenceParallelRegion",
    "_GatherFromSequenceParallelRegion",
    "_ReduceScatterToSequenceParallelRegion",
    "_AllGatherFromTensorParallelRegion",
    "_ReduceScatterToTensorParallelRegion",
)

COVERS = ("tp",)
PATCHES = (
    (
        torch_seam(MAPPINGS, REQUIREMENT),
        make_torch(
            {
                "all_reduce": make_all_reduce(MARKED),
                "all_gather": make_all_gather_list(MARKED),
                "reduce_scatter": make_reduce_scatter_list(MARKED),
                "all_to_all_single": make_all_to_all_single(TOKENS),
            }
        ),
    ),
    (
        _function(MAPPINGS, "dist_all_gather_func", GATHER_PARAMETERS),
        make_all_gather_into_tensor(MARKED),
    ),
    (
        _function(MAPPINGS, "dist_reduce_scatter_func", SCATTER_PARAMETERS),
        make_reduce_scatter_tensor(MARKED),
    ),
    *(
        (_function(MAPPINGS, f"{name}.backward", ("ctx", "grad_output")), make_backward)
        for name in FUNCTIONS
    ),
    (torch_seam(LAYERS, REQUIREMENT), make_torch({"all_reduce": make_all_reduce(GRADIENTS)})),
    (
        _function(LAYERS, "dist_all_gather_func", GATHER_PARAMETERS),
        make_all_gather_into_tensor(INPUTS),
    ),
    (
        _function(LAYERS, "dist_reduce_scatter_func", SCATTER_PARAMETERS),
        make_reduce_scatter_tensor(GRADIENTS),
    ),
)
