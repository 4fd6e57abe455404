"""Make an optimizer step only parts of the flat tensors that DeepSpeed gives it.

DeepSpeed's optimizers hold flat copies of the parameters and step all of them: frozen ones get zero
gradients, but momentum and weight decay still change them. Around each step the flat tensor is
replaced by views of its trained parts; the rest is neither read nor written, so its moments do not
change either. This works for optimizers with elementwise state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

#: key of the count of steps in an optimizer's state
STEP = "step"


class FlatFragment(NamedTuple):
    """Elements ``[start, start + numel)`` of ``flat``, which belong to the parameter ``name``."""

    flat: Tensor
    name: str
    start: int
    numel: int


class SteppedParts:
    """The trained parts of the flat tensors of some optimizers; only these are stepped.

    Attributes:
        frozen: names of parameters that no step touches.
        missed: by name, the steps that a parameter missed before it was thawed: it steps with the
            step count of its flat tensor minus these.
    """

    def __init__(self, optimizers: Iterable[Optimizer], fragments: Iterable[FlatFragment]) -> None:
        """Register hooks around the steps of the optimizers, which ``close`` removes."""
        self.frozen: set[str] = set()
        self.missed: dict[str, int] = {}
        self._flats: dict[int, list[FlatFragment]] = {}
        for fragment in fragments:
            self._flats.setdefault(id(fragment.flat), []).append(fragment)
        for held in self._flats.values():
            held.sort(key=lambda one: one.start)
        # parameter groups whose tensors are replaced for a step, and their own tensors
        self._lent: list[tuple[dict[str, Any], list[Any]]] = []
        self._parts: list[tuple[Tensor, list[Tensor]]] = []
        self._kept: list[tuple[Tensor, Tensor]] = []  # views used in a first step, and their values
        self._hooks: list[Any] = []
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before))
            self._hooks.append(optimizer.register_step_post_hook(self._after))

    def close(self) -> None:
        """Remove the hooks from the optimizers."""
        while self._hooks:
            self._hooks.pop().remove()

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._put_back(optimizer)  # left by a step that raised an error
        for group in optimizer.param_groups:
            params = group["params"]
            parts = [part for flat in params for part in self._parts_of(optimizer, flat)]
            if len(parts) != len(params) or any(a is not b for a, b in zip(parts, params)):  # noqa: B905
                self._lent.append((group, params))
                group["params"] = parts

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for flat, _ in self._parts:
            state = optimizer.state[flat]
            if STEP in state:
                state[STEP] = state[STEP] + 1
        for view, values in self._kept:
            view.copy_(values)
        self._put_back(optimizer)

    def _put_back(self, optimizer: Optimizer) -> None:
        for group, params in self._lent:
            group["params"] = params
        for _, parts in self._parts:
            for part in parts:
                optimizer.state.pop(part, None)
        for left in (self._lent, self._parts, self._kept):
            left.clear()

    def _parts_of(self, optimizer: Optimizer, flat: Tensor) -> list[Tensor]:
        """Return the views to step in place of ``flat``; ``flat`` itself if all of it trains."""
        held = self._flats.get(id(flat), [])
        touched = any(one.name in self.frozen or one.name in self.missed for one in held)
        if not touched or flat.grad is None:
            return [flat]
        values, gradients = flat.data.view(-1), flat.grad.view(-1)
        state = optimizer.state.get(flat)
        if not state:  # the first step creates the state of all elements
            for one in held:
                if one.name in self.frozen:
                    view = values[one.start : one.start + one.numel]
                    self._kept.append((view, view.clone()))
            return [flat]
        parts: list[Tensor] = []
        for start, stop, missed in self._runs(held):
            part = nn.Parameter(values[start:stop])
            part.grad = gradients[start:stop]
            optimizer.state[part] = {
                name: _cut(value, flat.numel(), start, stop, missed if name == STEP else 0)
                for name, value in state.items()
            }
            parts.append(part)
        self._parts.append((flat, parts))
        return parts

    def _runs(self, held: list[FlatFragment]) -> Iterator[tuple[int, int, int]]:
        """Yield ranges of trained elements that missed equally many steps, and how many."""

        def missed_by(one: FlatFragment) -> int | None:
            return None if one.name in self.frozen else self.missed.get(one.name, 0)

        for missed, run in groupby(held, missed_by):
            ones = list(run)
            if missed is not None:
                yield ones[0].start, ones[-1].start + ones[-1].numel, missed


def _cut(value: Any, numel: int, start: int, stop: int, missed: int) -> Any:
    """Return the values of an optimizer's state for a range of elements."""
    if isinstance(value, Tensor) and value.numel() == numel and value.dim():
        return value.view(-1)[start:stop]
    if isinstance(value, Tensor):
        return (value - missed).clamp(min=0) if missed else value.clone()
    return max(0, value - missed) if missed else value


def unfit(optimizer: Optimizer, flats: Iterable[Tensor]) -> str:
    """Return the key of a state that is neither a scalar nor one value per element, else ""."""
    for flat in flats:
        for name, value in optimizer.state.get(flat, {}).items():
            if isinstance(value, Tensor) and value.numel() not in (1, flat.numel()):
                return str(name)
    return ""
