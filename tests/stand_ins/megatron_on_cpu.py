"""Stand-ins for the GPU functions of megatron-core, so that it runs on a CPU over gloo.

For tests only: upstream has no CPU path.

Call ``install()`` before ``import megatron.core``, ``patch()`` after. Each stand-in names the code
that needs it (lines of 0.19.2). No collective is changed.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class Event:
    """torch.cuda.Event that is always complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


class Stream:
    """torch.cuda.Stream that runs everything at once."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *args: Any) -> Event:
        return Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: object) -> None: ...


class CudaToCpu(TorchFunctionMode):
    """Maps device="cuda": optimizer.py FP32Optimizer._scale, clip_grads.py, moe_utils.py."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and str(kwargs.get("device")).startswith("cuda"):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            args = (args[0], CPU, *args[2:])
        return func(*args, **(kwargs or {}))


@functools.cache
def install() -> None:
    """Replace the functions of torch.cuda that megatron-core calls."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.device_count = lambda: 1
    cuda.set_device = lambda *args, **kwargs: None
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.Stream, cuda.Event = Stream, Event
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    mode: Any = CudaToCpu()
    mode.__enter__()
    _pretend_types()
    _without_triton()


def _typed(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    def make(*values: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(values[0], dtype=dtype) if values else torch.empty(0, dtype=dtype)

    return make


def _pretend_types() -> None:
    """clip_grads.py:174 and optimizer.py:758 compare ``type()`` with torch.cuda.FloatTensor."""
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        if not isinstance(found, str) or found.startswith("torch.cuda."):  # modes call it twice
            return found
        return found.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_  # type: ignore[method-assign,assignment]


class _NoTriton:
    """Stands for triton and its submodules; decorators return their function unchanged."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self


class _PagedStash(importlib.abc.MetaPathFinder):
    """Stub for a module that 0.18 imports with an unguarded triton, used by no test."""

    name = "megatron.core.transformer.moe.paged_stash"

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Importer(fullname, str(spec.origin))
        return spec


class _Importer(importlib.machinery.SourceFileLoader):
    """Runs a module whose ``import triton`` gets stubs."""

    def exec_module(self, module: types.ModuleType) -> None:
        def import_(name: str, *args: Any) -> Any:
            return _NoTriton() if name.partition(".")[0] == "triton" else __import__(name, *args)

        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": import_}
        super().exec_module(module)


def _without_triton() -> None:
    """Stub triton, which 0.18 and 0.19 import unguarded (Megatron-LM PR #6891), in one module."""
    if importlib.util.find_spec("triton") is None:
        sys.meta_path.insert(0, _PagedStash())
        name = "megatron.core.transformer.moe.ops.paged_stash"
        module: Any = types.ModuleType(name)
        module.GLOBAL_BLOCK_SIZE = 1024
        module.paged_stash_copy_kernel = module.paged_stash_pop_kernel = None
        sys.modules[name] = module


@functools.cache
def patch() -> None:
    """Replace parts of megatron-core that cannot run on a CPU."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    # only now: module.py takes the classes when it is imported
    cuda: Any = torch.cuda
    cuda.FloatTensor, cuda.IntTensor = _typed(torch.float32), _typed(torch.int32)
    cuda.LongTensor = _typed(torch.int64)
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    patch_without_engine()
    if hasattr(token_dispatcher, "maybe_move_tensor_to_cpu"):  # moves numbers off CUDA tensors only
        token_dispatcher.maybe_move_tensor_to_cpu = _as_numbers


@functools.cache
def patch_without_engine() -> None:
    """Let megatron-core run without Transformer Engine and apex, also on a GPU."""
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils

    torch_norm.WrappedTorchNorm.__new__ = staticmethod(_norm(torch_norm.WrappedTorchNorm.__new__))
    if not getattr(distrib_optimizer, "HAVE_APEX_OR_TE", True):
        _load_into_torchs_adam(distrib_optimizer.DistributedOptimizer)
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 without Transformer Engine: NameError
        moe_utils.te_general_gemm = None


def _load_into_torchs_adam(optimizer: Any) -> None:
    """Support torch's Adam, whose ``step`` is a tensor per parameter, in the distributed optimizer.

    Upstream reads it before it exists (``state_dict``), expects it in loaded state, and shares a
    single counter among all parameters.
    """
    state_dict, write = optimizer.state_dict, optimizer._set_main_param_and_optimizer_states

    def with_states(self: Any) -> Any:
        inner = self.optimizer
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            if not inner.state[parameter]:
                zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                inner.state[parameter] = {"step": torch.zeros(()), **zeros}
        return state_dict(self)

    def with_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        group, place = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        state["step"] = state["step"].clone()  # upstream loads a single tensor for all parameters
        write(self, parameter, {**tensors, "step": state["step"]})

    optimizer.state_dict = with_states
    optimizer._set_main_param_and_optimizer_states = with_step


def _norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Allow torch's norm with sequence parallelism, which upstream's assertion forbids."""

    def __new__(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        sequence_parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            module = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for parameter in module.parameters():
            parameter.sequence_parallel = sequence_parallel  # finalize_model_grads reads it
        return module

    return __new__


def _as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
