"""Tensor-parallel collectives of Transformer Engine's layers, in megatron-core.

The seam is the global ``torch`` of ``transformer_engine.pytorch.distributed``. Its functions
``allreduce``, ``gather_along_first_dim`` and ``reduce_scatter_along_first_dim``, which layers
import by name, all look ``torch`` up there. Only calls from these three are encoded. Other
functions of the module gather quantized tensors (FP8, NVFP4) with their scales, which must arrive
exactly; their messages are counted as native.

Messages are encoded only while ``Linear``, ``LayerNormLinear`` or ``LayerNormMLP`` runs: their
autograd functions are marked with the direction. Gathered tensors are inputs (also where the
backward pass gathers one a second time, which must give the same values), except in
``grad_output_preprocess``. Operations of ``transformer_engine.pytorch.ops`` stay native, and
``check`` says so.

Inside torch's ``_coalescing_manager`` (``external_coalescing``, from 2.19 on) a collective only
joins a batch that is sent when the manager closes, so its values cannot be encoded and decoded in
between: such messages stay native, are counted, and a line says so.

Signatures were read from the sources of 2.0 to 2.20; Transformer Engine needs a GPU, so the tests
use stand-ins. With other versions nothing is patched and ``check`` says why.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hybridcomp.channels import native_nbytes
from hybridcomp.dimensions import Dimension, Direction
from hybridcomp.errors import SeamError
from hybridcomp.log import say_once
from hybridcomp.patches.common.collective_wrappers import (
    Collective,
    Maker,
    make_all_gather_into_tensor,
    make_all_reduce,
    make_reduce_scatter_tensor,
)
from hybridcomp.patches.common.routes import Layers, make_torch
from hybridcomp.patches.common.scope import Scope
from hybridcomp.patches.mcore.groups import dimension_of
from hybridcomp.patches.mcore.requirement import TRANSFORMER_ENGINE as REQUIREMENT
from hybridcomp.seams.around import around
from hybridcomp.seams.patching import Seam

PACKAGE = "transformer_engine.pytorch"
DISTRIBUTED = f"{PACKAGE}.distributed"
#: the functions of DISTRIBUTED that send unquantized values -> their parameters, by release
FUNCTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "allreduce": (("input_", "tp_group", "async_op"), ("inp", "tp_group", "async_op")),
    "gather_along_first_dim": (
        ("input_", "process_group", "async_op", "quantizer"),
        ("inp", "process_group", "async_op", "quantizer"),
        (
            "inp", "process_group", "async_op", "quantizer", "output_tensor",
            "external_coalescing",
        ),
    ),
    "reduce_scatter_along_first_dim": (
        ("input_", "tp_group", "async_op"),
        ("inp", "tp_group", "async_op"),
        ("inp", "tp_group", "async_op", "output"),
    ),
}  # fmt: skip
#: autograd functions of layers: module, class, parameters of ``backward``
LAYERS: tuple[tuple[str, str, tuple[tuple[str, ...], ...]], ...] = (
    (
        "linear",
        "_Linear",
        (("ctx", "grad_output"), ("ctx", "grad_output", "_grad_weight_workspace")),
    ),
    ("layernorm_linear", "_LayerNormLinear", (("ctx", "grad_outputs"),)),
    ("layernorm_mlp", "_LayerNormMLP", (("ctx", "grad_outputs"),)),
)

BATCHED = (
    "messages inside a coalescing manager of torch's leave when it closes, too late to be decoded "
    "where Transformer Engine asks for them"
)

#: direction of the running layer; None outside of one
_WAY: Scope[Direction | None] = Scope("te_layer", None)
#: whether the tensors being gathered are gradients
_GRADIENT: Scope[bool] = Scope("te_gradient", False)


def _dimension(group: dist.ProcessGroup | None) -> Dimension | None:
    if _WAY.get() is None:
        return None
    return dimension_of(group, "tp") if "megatron.core" in sys.modules else "tp"


def _reduced() -> Direction:
    return _WAY.get() or "forward"


def _gathered() -> Direction:
    return "backward" if _GRADIENT.get() else "forward"


REDUCED, GATHERED = Layers(_dimension, _reduced), Layers(_dimension, _gathered)


def _marked(way: Direction) -> Maker:
    """Return a maker that marks a layer's method with its direction, forward or backward."""

    @around
    def make(original: Any, *args: Any, **kwargs: Any) -> Any:
        with _WAY.inside(way), _GRADIENT.inside(False):
            return original(*args, **kwargs)

    return make


#: marks tensors gathered inside ``grad_output_preprocess`` as gradients
make_grad_output_preprocess = _GRADIENT.marks(True)


def plain(make: Maker, layers: Layers, nbytes: Callable[..., int]) -> Maker:
    """Route calls from FUNCTIONS through ``make``; count all others and pass them to upstream.

    ``nbytes``: returns the native bytes of a message; takes the arguments of ``native_nbytes``.
    """

    def make_plain(original: Collective) -> Collective:
        encoded = make(original)

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group")
            joins = _joins_batch(group)
            if sys._getframe(1).f_code.co_name in FUNCTIONS and not joins:
                return encoded(*args, **kwargs)
            channel = layers.channel(group)
            if channel is not None:
                values, world_size = args[-1], dist.get_world_size(group)
                raw = nbytes(values.numel(), values.dtype, world_size)
                channel.count_native(raw, layers.way())
                if joins:
                    say_once(f"{channel.dimension} native: {BATCHED}")
            return original(*args, **kwargs)

        return collective

    return make_plain


def _joins_batch(group: dist.ProcessGroup | None) -> bool:
    """Return whether a ``_coalescing_manager`` of torch is open for ``group``."""
    group = dist.group.WORLD if group is None else group
    return group in distributed_c10d._world.pg_coalesce_state


def make_distributed(original: Any) -> Any:
    """Make the stand-in for ``torch``; raises SeamError if FUNCTIONS have other parameters."""
    module = importlib.import_module(DISTRIBUTED)
    for name, known in FUNCTIONS.items():
        function = getattr(module, name, None)
        found = () if function is None else tuple(inspect.signature(function).parameters)
        if found not in known:
            raise SeamError(
                f"{DISTRIBUTED}:{name}: needs {REQUIREMENT}, whose parameters are {known[-1]}; "
                f"found {found}"
            )
    return make_torch(
        {
            "all_reduce": plain(make_all_reduce(REDUCED), REDUCED, native_nbytes.all_reduce_nbytes),
            "all_gather_into_tensor": plain(
                make_all_gather_into_tensor(GATHERED), GATHERED, native_nbytes.all_gather_nbytes
            ),
            "reduce_scatter_tensor": plain(
                make_reduce_scatter_tensor(REDUCED), REDUCED, native_nbytes.reduce_scatter_nbytes
            ),
        }
    )(original)


def _seam(module: str, qualname: str, parameters: tuple[tuple[str, ...], ...] | None) -> Seam:
    return Seam(REQUIREMENT, f"{PACKAGE}.{module}", qualname, parameters)


Entry = tuple[Seam, Callable[[Any], Any]]
COVERS = ("tp",)
PATCHES: tuple[Entry, ...] = (
    (_seam("distributed", "torch", None), make_distributed),
    (
        _seam(
            "module.base",
            "TransformerEngineBaseModule.grad_output_preprocess",
            (("ctx", "grad_output", "row_parallel_mode", "quantizer"),),
        ),
        make_grad_output_preprocess,
    ),
    # not checked: forward has up to 40 parameters, different in every release; the mark reads none
    *((_seam(f"module.{m}", f"{c}.forward", None), _marked("forward")) for m, c, _ in LAYERS),
    *(
        (_seam(f"module.{m}", f"{c}.backward", names), _marked("backward"))
        for m, c, names in LAYERS
    ),
)
