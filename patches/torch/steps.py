"""Follow optimizer steps and loss scales of attached models.

Steps are followed by the public hooks of torch's optimizers (``optimizer_steps``). A loss scaler
has no hook, and residuals are in units of the scaled loss, so ``GradScaler.step`` and ``update``
are replaced once a model with error feedback or ``when: auto`` is attached. A step that the scaler
skips runs no optimizer, hence no hook. For optimizers that are no ``torch.optim.Optimizer`` see
``step_detection``.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.optim.optimizer import Optimizer

from hybridcomp.config import BLOCK
from hybridcomp.errors import ConfigError
from hybridcomp.patches.common import optimizer_steps
from hybridcomp.patches.torch import torch_versions
from hybridcomp.patches.torch.attached import Attached
from hybridcomp.seams.patching import Patch, Seam, apply_all, revert_all

MODULE = "torch.amp.grad_scaler"
FITS = torch_versions.checked("GradScaler", torch_versions.DDP)
STEP = Seam(
    torch_versions.DDP, MODULE, "GradScaler.step", ("self", "optimizer", "args", "kwargs"), FITS
)
UPDATE = Seam(torch_versions.DDP, MODULE, "GradScaler.update", ("self", "new_scale"), FITS)

_attached: weakref.WeakSet[Attached] = weakref.WeakSet()
_handles: list[Any] = []
_patches: list[Patch] = []
#: loss scaler -> the models whose optimizers the scaler has stepped
_followers: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Attached]] = weakref.WeakKeyDictionary()


def follow(attached: Attached) -> None:
    """Follow the optimizer steps of ``attached`` from now on."""
    _attached.add(attached)
    attached.on_detach(functools.partial(_attached.discard, attached))
    if not _handles:
        _handles.extend(optimizer_steps.register(_before_step, _after_step))
    if _heeds_overflows(attached) and not _patches:
        _patches.extend(apply_all([Patch(STEP, make_step), Patch(UPDATE, make_update)]))


def models() -> list[Attached]:
    """Return this process's attached models in order of attaching, also unreachable ones."""
    return sorted(_attached, key=lambda attached: attached.number)


def living() -> list[Attached]:
    """Return ``models`` after freeing unreachable ones (cycles): equal on all ranks."""
    if _attached:
        gc.collect()
    return models()


def _heeds_overflows(attached: Attached) -> bool:
    """Return whether steps skipped by a loss scaler affect the model's residuals, step timing or
    meetings of islands."""
    config = attached.channels.config
    return config.error_feedback("dp") or config.sync.acts or bool(config.measured())


def forget_all() -> None:
    """Remove the hooks and revert the replacements."""
    while _handles:
        _handles.pop().remove()
    revert_all(_patches)
    _patches.clear()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Average ignored tables' gradients; raise ConfigError if sums were not sent between nodes."""
    for attached in models():
        if attached.average_ignored is not None:
            attached.average_ignored(optimizer)
        if attached.channels.node_sums.left and attached.owns(optimizer):
            todo = (
                "the micro-batches before this optimizer step were summed inside the nodes and "
                "none has crossed; call model.set_requires_all_reduce(True) before the last one"
            )
            raise ConfigError(f"{BLOCK}.dp.accumulate", "node", todo)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Count the step of every model whose optimizers have stepped, even if counting one fails."""
    for attached in _owners(optimizer):
        attached.called(optimizer)
    if optimizer_steps.is_inside_another():
        return
    with ExitStack() as steps:
        for attached in reversed(models()):
            if attached.is_due:
                steps.callback(attached.stepped)


def _owners(optimizer: Any) -> list[Attached]:
    """Return the models with parameters in ``optimizer``, in equal order on all ranks."""
    return [attached for attached in models() if attached.owns(optimizer)]


def make_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Drop the residuals and restart the step if the scaler skips it."""

    @functools.wraps(original)
    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        owners = [attached for attached in _owners(optimizer) if _heeds_overflows(attached)]
        before = [attached.optimizer_calls for attached in owners]
        result = original(self, optimizer, *args, **kwargs)
        for attached, calls in zip(owners, before, strict=True):
            _followers.setdefault(self, weakref.WeakSet()).add(attached)
            attached.loss_scale.follow(self)
            if attached.optimizer_calls == calls or _found_inf(self, optimizer):
                attached.overflowed()
        return result

    return step


def _found_inf(scaler: Any, optimizer: Any) -> bool:
    """Return whether an optimizer that unscales in its kernel has met an overflow there."""
    if not scaler.is_enabled() or not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return any(bool(value.item()) for value in found.values())


def make_update(original: Callable[..., Any]) -> Callable[..., Any]:
    """Multiply residuals by the ratio of the new loss scale to the old one."""

    @functools.wraps(original)
    def update(self: Any, new_scale: Any = None) -> Any:
        followers = _followers.get(self, ())
        before = self.get_scale() if followers else 1.0
        result = original(self, new_scale)
        after = self.get_scale() if followers else 1.0
        for attached in followers:
            attached.loss_scale.change(before, after)
        return result

    return update
