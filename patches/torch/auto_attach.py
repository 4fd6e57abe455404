"""Attach models of an unmodified script, under ``hybridcomp.run`` with ``HYBRIDCOMP_CONFIG``.

All uses of ``fully_shard`` and DDP, imported by any name, call one of two functions:
``FSDPState._lazy_init``, at every forward pass of a root, and the constructor of
DistributedDataParallel, whose model is attached at its next forward pass: until then a script may
register another hook, which is then refused by name instead of failing in torch.

So a model that was built, or trained, before ``hybridcomp.install`` is attached in its next forward
pass like any other: FSDP2 calls ``_lazy_init`` again, and models under DDP are looked up among the
garbage collector's objects.

Where Megatron uses the channels of the process, its check refuses or announces torch's FSDP.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from wrapt import register_post_import_hook

from hybridcomp.config import BLOCK
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError, SeamError
from hybridcomp.log import say_once
from hybridcomp.patches.torch import steps, torch_versions
from hybridcomp.patches.torch.attach import ATTRIBUTE, attach, detached, is_served, look_again
from hybridcomp.patching import Patch, Seam, apply_all, revert_all
from hybridcomp.session import process

DDP_INIT = Seam(
    torch_versions.DDP,
    "torch.nn.parallel.distributed",
    "DistributedDataParallel.__init__",
    None,
    torch_versions.checked("ddp", torch_versions.DDP),
)
DDP_LAZY_INIT = Seam(
    torch_versions.DDP,
    "torch.nn.parallel.distributed",
    "DistributedDataParallel._lazy_init",
    ("self",),
    torch_versions.checked("ddp", torch_versions.DDP),
)
LAZY_INIT = Seam(
    torch_versions.FSDP2,
    "torch.distributed.fsdp._fully_shard._fsdp_state",
    "FSDPState._lazy_init",
    ("self",),
    torch_versions.checked("fsdp2", torch_versions.FSDP2),
)
FSDP1_INIT = Seam(
    torch_versions.DDP,
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "FullyShardedDataParallel.__init__",
    None,
    torch_versions.checked("ddp", torch_versions.DDP),
)

_armed = False
_hooked = False
_applied: dict[str, list[Patch]] = {}


def arm(new: bool = False) -> None:
    """Attach models of this process from now on, where it has a block.

    ``new``: the block is new: models that were left native without one may be attached now.
    """
    global _armed, _hooked
    _armed = True
    if new:
        look_again()
    for seam, _ in SEAMS:
        if seam.module in sys.modules:
            _apply(seam.module)
        elif not _hooked:
            register_post_import_hook(_on_import, seam.module)
    _hooked = True
    if DDP_INIT.module in _applied and dist.is_initialized():  # before there is no DDP
        for model in [one for one in gc.get_objects() if issubclass(type(one), DDP)]:
            _attach_in_next_pass(model)


def disarm() -> None:
    """Detach all models, and revert the patches of torch and its optimizers."""
    global _armed
    _armed = False
    for module in list(_applied):
        revert_all(_applied.pop(module))
    for attached in steps.living():
        attached.detach()
    detached.clear()  # a later ``arm`` may attach them
    steps.forget_all()


def _on_import(module: ModuleType) -> None:
    if _armed:
        _apply(module.__name__)


def _apply(module: str) -> None:
    if module in _applied:
        return
    try:
        _applied[module] = apply_all(Patch(s, make) for s, make in SEAMS if s.module == module)
    except SeamError as error:
        # a message and no error: DeepSpeed and Megatron may still be compressed
        say_once(f"models under torch's own engines stay native: {error}")


def _attach(model: Any) -> None:
    """Attach ``model`` in a forward pass, unless it was, or Megatron has the channels."""
    if ATTRIBUTE in vars(model) or model in detached or process.has_begun() or is_served(model):
        return
    attached = attach(model)
    if attached is not None and attached.channels["dp"].error_feedback:
        say_once(
            "dp: a checkpoint holds residuals where the script adds hybridcomp.stateful(model) to "
            "what torch.distributed.checkpoint saves, or calls hybridcomp.save_state(folder)"
        )
    if attached is not None and model.training and torch.is_grad_enabled():
        attached.entered()  # its forward hook was added during this pass and runs in the next one


def _attach_in_next_pass(model: Any) -> None:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def next_forward(model: Any, _: Any) -> None:
        handle.remove()
        if _armed:
            _attach(model)

    handle = model.register_forward_pre_hook(next_forward)


def make_ddp_init(original: Callable[..., None]) -> Callable[..., None]:
    """Attach a model under DDP in its first forward pass."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _attach_in_next_pass(self)

    return __init__


def make_ddp_lazy_init(original: Callable[..., None]) -> Callable[..., None]:
    """Attach a model under DDP that runs no forward hooks: that of the composable ``replicate``."""

    @functools.wraps(original)
    def _lazy_init(self: Any) -> None:
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
        if block is not None and not process.has_begun():
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
