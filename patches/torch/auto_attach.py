"""Attach models of an unmodified script, under ``hybridcomp.run`` with ``HYBRIDCOMP_CONFIG``.

All uses of ``fully_shard`` and DDP, imported by any name, call one of two functions:
``FSDPState._lazy_init``, at every forward pass of a root, and the constructor of
DistributedDataParallel. A model under DDP is attached at its next forward pass with gradients: one
rank may validate it alone before, and until then a script may register a communication hook, which
``attach`` refuses with a clear message.

So a model that was built, or trained, before ``hybridcomp.install`` is attached in its next forward
pass like any other: FSDP2 calls ``_lazy_init`` again, and models under DDP are looked up among the
garbage collector's objects.

Where Megatron uses the channels of the process, its check refuses or announces torch's FSDP.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import ParameterList
from torch.nn.parallel import DistributedDataParallel as DDP

from hybridcomp.config import BLOCK
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError, SeamError
from hybridcomp.log import say_once
from hybridcomp.patches.torch import steps, torch_versions
from hybridcomp.patches.torch.attach import ATTRIBUTE, attach, detached, is_served, retry_pending
from hybridcomp.seams.arming import ArmedPatches
from hybridcomp.seams.patching import Patch, Seam, apply_all
from hybridcomp.session import process


def _seam(requirement: str, module: str, name: str, *parameters: str) -> Seam:
    engine = "fsdp2" if requirement == torch_versions.FSDP2 else "ddp"
    found = torch_versions.checked(engine, requirement)
    return Seam(requirement, module, name, parameters or None, found)


_DDP_MODULE = "torch.nn.parallel.distributed"
DDP_INIT = _seam(torch_versions.DDP, _DDP_MODULE, "DistributedDataParallel.__init__")
DDP_LAZY_INIT = _seam(torch_versions.DDP, _DDP_MODULE, "DistributedDataParallel._lazy_init", "self")
LAZY_INIT = _seam(
    torch_versions.FSDP2, "torch.distributed.fsdp._fully_shard._fsdp_state",
    "FSDPState._lazy_init", "self",
)  # fmt: skip
FSDP1_INIT = _seam(
    torch_versions.DDP, "torch.distributed.fsdp.fully_sharded_data_parallel",
    "FullyShardedDataParallel.__init__",
)  # fmt: skip


def arm(new: bool = False) -> None:
    """Attach the models of this process from now on, if the process has a block.

    ``new``: whether the block is new, so that models left native without one may be attached.
    """
    if new:
        retry_pending()
    ARMED.arm(seam.module for seam, _ in SEAMS)
    if DDP_INIT.module in ARMED.in_place and dist.is_initialized():  # else no DDP exists
        for model in [held for held in gc.get_objects() if issubclass(type(held), DDP)]:
            _attach_in_next_pass(model)


def disarm() -> None:
    """Detach all models, and revert the patches of torch and its optimizers."""
    ARMED.disarm()
    for attached in steps.living():
        attached.detach()
    detached.clear()  # a later ``arm`` may attach them
    steps.forget_all()


def _apply(module: str) -> list[Patch] | None:
    try:
        return apply_all(Patch(s, make) for s, make in SEAMS if s.module == module)
    except SeamError as error:
        # a message and no error: DeepSpeed and Megatron may still be compressed
        say_once(f"models under torch's own engines stay native: {error}")
        return None


#: armed by ``hybridcomp.install``
ARMED = ArmedPatches(_apply, {})


def _attach(model: Any) -> None:
    """Attach ``model`` in a forward pass, unless it was attached or Megatron has the channels."""
    if ATTRIBUTE in vars(model) or model in detached or _is_megatron() or is_served(model):
        return
    attached = attach(model)
    if attached is not None and attached.channels["dp"].error_feedback:
        say_once(
            "dp: a checkpoint holds residuals where the script adds hybridcomp.stateful(model) to "
            "what torch.distributed.checkpoint saves, or calls hybridcomp.save_state(folder)"
        )
    if attached is not None and torch.is_grad_enabled():
        # its forward hook was added during this pass and runs in the next one
        attached.entered(model.training)


def _is_megatron() -> bool:
    """Return whether Megatron has begun this process's session; tables and ring attention do so
    as well if they send before a model is attached.
    """
    return process.has_begun() and process.serves_megatron()


def _attach_in_next_pass(model: Any) -> None:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def next_forward(model: Any, _: Any) -> None:
        if not torch.is_grad_enabled():
            return  # other ranks may not take part in this pass, as natively
        handle.remove()
        if ARMED.armed:
            _attach(model)

    handle = model.register_forward_pre_hook(next_forward)


def make_ddp_init(original: Callable[..., None]) -> Callable[..., None]:
    """Attach a model under DDP in its first forward pass with gradients."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _attach_in_next_pass(self)

    return __init__


def make_ddp_lazy_init(original: Callable[..., None]) -> Callable[..., None]:
    """Attach a model under the composable ``replicate``, whose DDP runs no forward hooks."""

    @functools.wraps(original)
    def _lazy_init(self: Any) -> None:
        if isinstance(self.module, ParameterList):  # only ``replicate`` passes one
            _attach(self)
        original(self)

    return _lazy_init


def make_lazy_init(original: Callable[..., None]) -> Callable[..., None]:
    """Attach a model under ``fully_shard`` in a forward pass of its root."""

    @functools.wraps(original)
    def _lazy_init(self: Any) -> None:
        original(self)
        if self._is_root:
            _attach(self._modules[0])

    return _lazy_init


def make_fsdp1_init(original: Callable[..., None]) -> Callable[..., None]:
    """Refuse FSDP1 where there is a block, or print that it stays native."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        block = process.configured()
        if block is not None and not _is_megatron():
            todo = "FSDP1 has no slots for communication; use fully_shard (FSDP2)"
            if block.on_unsupported != "native":
                raise ConfigError(BLOCK, Shown("FullyShardedDataParallel (FSDP1)"), todo)
            say_once(f"FullyShardedDataParallel stays native: {todo}")
        original(self, *args, **kwargs)

    return __init__


SEAMS = (
    (DDP_INIT, make_ddp_init),
    (DDP_LAZY_INIT, make_ddp_lazy_init),
    (LAZY_INIT, make_lazy_init),
    (FSDP1_INIT, make_fsdp1_init),
)
