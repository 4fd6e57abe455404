"""Detect gradients kept across a meeting; gradients of the new weights would be added to them.

A meeting follows an optimizer step, when scripts are about to clear gradients. A script may clear
them until the next backward pass begins, even after the forward pass, so this module looks only
then. DeepSpeed clears gradients in its step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Look = Callable[[], None]


class KeptGradients:
    """Watch for the first backward pass after a meeting, on one rank."""

    def __init__(
        self,
        gradients: Callable[[], Iterable[Tensor | None]],
        before: Callable[[Look], list[RemovableHandle]],
    ) -> None:
        """Set up without watching yet.

        Args:
            gradients: returns the present gradients, to which a backward pass would add.
            before: registers a function that is called at the beginning of each backward pass,
                before any gradient is added, until the returned hooks are removed.
        """
        self._gradients, self._before = gradients, before
        self._hooks: list[RemovableHandle] = []
        self._found: Callable[[], object] = lambda: None

    def watch(self, found: Callable[[], object]) -> None:
        """Call ``found`` if the next backward pass begins with gradients that are not zero."""
        self.stop()
        self._found = found
        # a weak method, so that hooks of a dropped model do nothing
        known = weakref.WeakMethod(self._look)

        def look() -> None:
            if (method := known()) is not None:
                method()

        self._hooks = self._before(look)

    def stop(self) -> None:
        """Stop watching."""
        while self._hooks:
            self._hooks.pop().remove()

    def _look(self) -> None:
        if self._hooks:
            self.stop()
            if _any(self._gradients()):
                self._found()


def before_leaves(leaves: Callable[[], Iterable[Tensor]], look: Look) -> list[RemovableHandle]:
    """Call ``look`` before any gradient of ``leaves`` is accumulated."""
    return [_of(leaf, look) for leaf in leaves() if leaf.requires_grad]


def before_output(module: nn.Module, look: Look) -> list[RemovableHandle]:
    """Call ``look`` when the gradient of an output of ``module`` is available.

    For engines whose kernels add weight gradients before autograd calls the weights' hooks.
    """

    def passed(_: nn.Module, __: object, output: Any) -> None:
        for tensor in output if isinstance(output, (list, tuple)) else [output]:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                _of(tensor, look)

    return [module.register_forward_hook(passed)]


def _any(gradients: Iterable[Tensor | None]) -> bool:
    """Return whether any value is nonzero; waits for the device, if there are any gradients."""
    local = [
        getattr(gradient, "_local_tensor", gradient)
        for gradient in gradients
        if gradient is not None
    ]
    dense = [one._values() if one.is_sparse else one for one in local]
    return bool(dense) and bool(torch.stack([one.detach().any() for one in dense]).any())


def _of(tensor: Any, look: Look) -> RemovableHandle:
    hook: RemovableHandle = tensor.register_hook(lambda _: look())
    return hook
