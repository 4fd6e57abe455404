"""Tensor-parallel collectives of GPT-NeoX, sequence parallelism and dropless MoE included.

The seam is the global ``torch`` of ``mpu.mappings``, in which ``_reduce`` and five other functions
look torch.distributed up: casts (``fp32_allreduce``), bookkeeping and buffers stay upstream's, and
no upstream code is copied. The public wrappers are no seam: ``transformer.py`` binds them when a
layer is built. The sources of the six are still checked before anything is replaced (``checkout``).

Direction: the ``backward`` methods of the autograd functions are marked. Activation checkpointing
runs ``forward`` methods again in the backward pass; those are not marked, so they use the same
codec as the first time and, as codecs are functions of the values only, give the same activations.
Tensor parallelism has no error feedback, so no residual changes.

Exact, because in other modules: the cross-entropy of ``mpu.cross_entropy``, gradients of norms
under sequence parallelism (``model.utils``), token broadcasts, routing tables of MoE.
"""

from __future__ import annotations

from hybridcomp.patches.common.collective_wrappers import (
    make_all_gather_into_tensor,
    make_all_reduce,
    make_reduce_scatter_tensor,
)
from hybridcomp.patches.common.list_wrappers import make_all_gather_list, make_reduce_scatter_list
from hybridcomp.patches.common.routes import Layers, make_backward, make_torch
from hybridcomp.patches.neox.checkout import MAPPINGS, REQUIREMENT, source
from hybridcomp.seams.patching import Seam

#: autograd functions whose backward pass communicates
FUNCTIONS = (
    "_CopyToModelParallelRegion",
    "_CopyToExpertModelParallelRegion",
    "_ScatterToModelParallelRegion",
    "_ReduceScatterToSequenceParallelRegion",
    "_GatherFromSequenceParallelRegion",
    "_ScatterToSequenceParallelRegion",
)


#: the six functions use groups of tensor-parallel ranks alone
LAYERS = Layers(lambda group: "tp")

COVERS = ("tp",)
PATCHES = (
    (
        Seam(REQUIREMENT, MAPPINGS, "torch", None, source),
        make_torch(
            {
                "all_reduce": make_all_reduce(LAYERS),
                "all_gather": make_all_gather_list(LAYERS),
                "all_gather_into_tensor": make_all_gather_into_tensor(LAYERS),
                "reduce_scatter": make_reduce_scatter_list(LAYERS),
                "reduce_scatter_tensor": make_reduce_scatter_tensor(LAYERS),
            }
        ),
    ),
    *(
        (
            Seam(REQUIREMENT, MAPPINGS, f"{name}.backward", ("ctx", "grad_output"), source),
            make_backward,
        )
        for name in FUNCTIONS
    ),
)
