"""Steps of parts of a flat tensor, beside torch's own steps of two parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from hybridcomp.patches.common.frozen_layers import Frozen
from hybridcomp.patches.common.stepped_parts import FlatFragment, SteppedParts


class Both:
    """A flat tensor of ``a`` and ``b``, and the same as two parameters."""

    def __init__(self) -> None:
        self.flat = nn.Parameter(torch.ones(4))
        self.apart: list[Tensor] = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
        self.optimizer, self.other = (AdamW(p, lr=0.1) for p in ([self.flat], self.apart))
        fragments = [FlatFragment(self.flat, "a", 0, 2), FlatFragment(self.flat, "b", 2, 2)]
        self.parts = SteppedParts([self.optimizer], fragments)

    def step(self, gradient: float) -> None:
        self.flat.grad = torch.full((4,), gradient)
        for name, p in zip("ab", self.apart, strict=True):
            p.grad = None if name in self.parts.frozen else torch.full((2,), gradient)
        self.optimizer.step()
        self.other.step()

    def are_equal(self) -> bool:
        held: Sequence[Any] = self.optimizer.param_groups[0]["params"]
        assert len(held) == 1 and held[0] is self.flat and list(self.optimizer.state) == [self.flat]
        return torch.equal(self.flat, torch.cat(self.apart))


def test_a_thawed_part_steps_with_its_own_count() -> None:
    both = Both()
    for step, frozen in enumerate([set(), {"a"}, {"a"}, set(), {"b"}]):
        both.parts.frozen = frozen
        both.parts.missed = {"a": 2} if step > 2 else {}
        both.step(1.0 + step)
        assert both.are_equal(), step


def test_what_is_frozen_from_the_first_step_on_stays() -> None:
    both = Both()
    both.parts.frozen = {"a"}
    both.step(1.0)
    assert both.are_equal() and both.flat[:2].tolist() == [1.0, 1.0]


def test_a_step_that_raises_leaves_nothing_to_the_next() -> None:
    both = Both()
    both.step(1.0)
    both.parts.frozen = {"a"}

    def fails(*_: Any) -> None:
        raise OSError("full")

    hook = both.optimizer.register_step_pre_hook(fails)
    with pytest.raises(OSError, match="full"):
        both.step(5.0)
    hook.remove()
    both.step(-1.0)
    assert both.are_equal()


def test_missed_steps_add_up() -> None:
    frozen = Frozen()
    for trains, now in ((False, 2), (True, 5), (False, 7), (True, 8)):
        frozen.change(["a"], trains, now)
    assert frozen.missed == {"a": 4} and not frozen.everywhere
