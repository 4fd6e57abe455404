"""Stand-in for Transformer Engine: its modules and the functions they call.

``install()`` puts the package, laid out as upstream's, into ``sys.modules``; the layers are minimal
and run on a CPU.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

NAMES = "allreduce, gather_along_first_dim, reduce_scatter_along_first_dim"
DISTRIBUTED = """
import torch
def _gather_quantized(inp, process_group):
    out = inp.new_empty(inp.shape[0] * process_group.size(), *inp.shape[1:])
    torch.distributed.all_gather_into_tensor(out, inp, group=process_group)
    return out, None
def allreduce(inp, tp_group=None, async_op=False):
    handle = torch.distributed.all_reduce(inp, group=tp_group, async_op=async_op)
    return inp, handle
def gather_along_first_dim(inp, process_group, async_op=False, quantizer=None):
    if quantizer is not None:
        return _gather_quantized(inp, process_group)
    out = inp.new_empty(inp.shape[0] * process_group.size(), *inp.shape[1:])
    handle = torch.distributed.all_gather_into_tensor(
        out, inp.contiguous(), group=process_group, async_op=async_op)
    return out, handle
def reduce_scatter_along_first_dim(inp, tp_group, async_op=False):
    out = inp.new_empty(inp.shape[0] // tp_group.size(), *inp.shape[1:])
    handle = torch.distributed.reduce_scatter_tensor(
        out, inp.contiguous(), group=tp_group, async_op=async_op)
    return out, handle
"""
#: source of 2.19 and 2.20: two functions have an output argument
LATER = (
    DISTRIBUTED.replace(
        """quantizer=None):
    if quantizer is not None:
        return _gather_quantized(inp, process_group)
    out = inp""",
        """quantizer=None, output_tensor=None,
                           external_coalescing=False):
    if quantizer is not None:
        return _gather_quantized(inp, process_group)
    out = output_tensor if output_tensor is not None else inp""",
    )
    .replace("tp_group, async_op=False):", "tp_group, async_op=False, output=None):")
    .replace(
        "out = inp.new_empty(inp.shape[0] // ",
        "out = output if output is not None else inp.new_empty(inp.shape[0] // ",
    )
)
#: a version of each range of releases that the seams support, and its module
RELEASES = {"2.8.0": DISTRIBUTED, "2.18.0": DISTRIBUTED, "2.19.0": LATER, "2.20.2": LATER}
BASE = f"""
import torch
from ..distributed import {NAMES}
class TransformerEngineBaseModule(torch.nn.Module):
    @staticmethod
    def grad_output_preprocess(ctx, grad_output, row_parallel_mode, quantizer):
        if row_parallel_mode and ctx.sequence_parallel:
            grad_output, _ = gather_along_first_dim(grad_output, ctx.group)
        return grad_output
"""
#: a layer: column or row parallel, with or without sequence parallelism
LAYER = f"""
import torch
from ..distributed import {NAMES}
from .base import TransformerEngineBaseModule
class CLASS(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inp, weight, group, row, sequence_parallel, quantizer):
        ctx.group, ctx.row, ctx.sequence_parallel = group, row, sequence_parallel
        ctx.save_for_backward(inp, weight)
        total = inp
        if sequence_parallel and not row:
            total, _ = gather_along_first_dim(inp, group, quantizer=quantizer)
        out = total @ weight.t()
        if row:
            collective = reduce_scatter_along_first_dim if sequence_parallel else allreduce
            out, _ = collective(out, group)
        return out
    @staticmethod
    def backward(ctx, GRADS):
        grad = TransformerEngineBaseModule.grad_output_preprocess(ctx, FIRST, ctx.row, None)
        inp, weight = ctx.saved_tensors
        if ctx.sequence_parallel and not ctx.row:
            inp, waiting = gather_along_first_dim(inp, ctx.group, async_op=True)
            waiting.wait()
        dgrad, handle = grad @ weight, None
        if not ctx.row:
            collective = reduce_scatter_along_first_dim if ctx.sequence_parallel else allreduce
            dgrad, handle = collective(dgrad, ctx.group, async_op=True)
        wgrad = grad.t() @ inp
        if handle is not None:
            handle.wait()
        return dgrad, wgrad, None, None, None, None
"""


def install(distributed: str = DISTRIBUTED) -> Any:
    """Install a new package ``transformer_engine.pytorch``."""
    remove()
    sources = {"distributed": distributed, "module.base": BASE}
    for module, name, grads in (
        ("linear", "_Linear", "grad_output"),
        ("layernorm_linear", "_LayerNormLinear", "*grad_outputs"),
        ("layernorm_mlp", "_LayerNormMLP", "*grad_outputs"),
    ):
        first = "grad_outputs[0]" if grads.startswith("*") else grads
        text = LAYER.replace("CLASS", name).replace("GRADS", grads).replace("FIRST", first)
        sources[f"module.{module}"] = text
    for package in ("transformer_engine", "transformer_engine.pytorch"):
        _module(package, "", is_package=True)
    _module("transformer_engine.pytorch.module", "", is_package=True)
    for name, text in sources.items():
        _module(f"transformer_engine.pytorch.{name}", text)
    return sys.modules["transformer_engine.pytorch"]


def remove() -> None:
    """Uninstall it."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def _module(name: str, text: str, is_package: bool = False) -> None:
    module = types.ModuleType(name)
    module.__package__ = name if is_package else name.rpartition(".")[0]
    if is_package:
        module.__path__ = [str(Path(__file__).parent)]
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    exec(text, module.__dict__)
