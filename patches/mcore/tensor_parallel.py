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

from hybridcomp.dimensions import Dimension
from hybridcomp.patches.common.collective_wrappers import (
    make_all_gather_into_tensor,
    make_all_reduce,
    make_all_to_all_single,
    make_reduce_scatter_tensor,
)
from hybridcomp.patches.common.list_wrappers import make_all_gather_list, make_reduce_scatter_list
from hybridcomp.patches.common.routes import Layers, make_backward, make_torch
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


#: of ``mappings``: the running method has the direction
MARKED = Layers(_dimension)
#: of gathers and of reductions in ``layers``
INPUTS = Layers(_dimension, lambda: "forward")
GRADIENTS = Layers(_dimension, lambda: "backward")


def _seam(module: str, name: str, parameters: tuple[str, ...] | None) -> Seam:
    return Seam(REQUIREMENT, module, name, parameters)


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
        _seam(MAPPINGS, "torch", None),
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
        _seam(MAPPINGS, "dist_all_gather_func", GATHER_PARAMETERS),
        make_all_gather_into_tensor(MARKED),
    ),
    (
        _seam(MAPPINGS, "dist_reduce_scatter_func", SCATTER_PARAMETERS),
        make_reduce_scatter_tensor(MARKED),
    ),
    *(
        (_seam(MAPPINGS, f"{name}.backward", ("ctx", "grad_output")), make_backward)
        for name in FUNCTIONS
    ),
    (_seam(LAYERS, "torch", None), make_torch({"all_reduce": make_all_reduce(GRADIENTS)})),
    (
        _seam(LAYERS, "dist_all_gather_func", GATHER_PARAMETERS),
        make_all_gather_into_tensor(INPUTS),
    ),
    (
        _seam(LAYERS, "dist_reduce_scatter_func", SCATTER_PARAMETERS),
        make_reduce_scatter_tensor(GRADIENTS),
    ),
)
