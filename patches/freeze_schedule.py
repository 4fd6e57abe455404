"""Freeze a model's first blocks during training: by PipeTransformer's rule, or at given steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hybridcomp.config.error_messages import Shown
from hybridcomp.elastic.freezing import ELSEWHERE, What, asked, chosen, target
from hybridcomp.errors import ConfigError
from hybridcomp.job import small_messages
from hybridcomp.job.devices import default_device
from hybridcomp.patches import frozen
from hybridcomp.patches.common.engine_packages import packages_of
from hybridcomp.patches.common.frozen_layers import frozen_of

KEY = "hybridcomp.FreezeSchedule"


class FreezeSchedule:
    """Freeze the front blocks of a model, more of them as training proceeds.

    Every rank calls ``step()`` after every optimizer step. PipeTransformer's rule: every
    ``every``-th step freezes at most ``alpha`` of the trained blocks, and none after the block
    whose gradients have the smallest norm.
    """

    def __init__(
        self,
        engine: Any,
        blocks: Sequence[What],
        *,
        alpha: float = 1 / 3,
        every: int | None = None,
        norms: bool = True,
        most: int | None = None,
        steps: Mapping[int, int] | None = None,
    ) -> None:
        """Begin at step 0 with nothing frozen.

        Args:
            engine: as for ``hybridcomp.freeze``.
            blocks: the first one first; each is a ``what`` of ``freeze``: a name, a module, or
                several of them. In a pipeline they are names, of blocks on all stages.
            alpha: largest fraction of the trained blocks that a decision freezes, in (0, 1).
            every: optimizer steps from one decision to the next.
            norms: whether gradient norms limit a decision; False: only ``alpha`` does, as in the
                authors' code.
            most: largest number of frozen blocks; None: all but one.
            steps: in place of ``every``: number of frozen blocks, by optimizer step.

        Raises ConfigError if an argument is out of range, or contradicts another one.
        """
        self._engine, self._blocks = frozen.unwrapped(engine), list(blocks)
        self._most = len(self._blocks) - 1 if most is None else most
        self.alpha, self.every, self.norms = alpha, every, norms
        self._steps = None if steps is None else dict(sorted(steps.items()))
        self.taken = 0  # optimizer steps
        self._squares: list[Tensor] = []
        self._hooks: list[Any] = []
        self._check()
        self._listen_if_due()

    def _check(self) -> None:
        count = len(self._blocks)
        if (self.every is None) is (self._steps is None):
            raise ConfigError(KEY, Shown("every and steps"), "expected one of the two")
        if not 0 < self.alpha < 1:
            raise ConfigError(f"{KEY}.alpha", self.alpha, "expected a share, above 0 and below 1")
        if self.every is not None and self.every < 1:
            raise ConfigError(f"{KEY}.every", self.every, "expected a number of steps")
        if not 0 <= self._most < count:
            todo = f"expected fewer than the {count} blocks, or nothing would train"
            raise ConfigError(f"{KEY}.most", self._most, todo)
        counts = list((self._steps or {}).values())
        if counts != sorted(counts) or any(n > self._most for n in counts):
            todo = f"expected numbers of blocks that grow with the steps, at most {self._most}"
            raise ConfigError(f"{KEY}.steps", Shown(str(counts)), todo)

    @property
    def frozen(self) -> int:
        """Return how many blocks at the front are frozen."""
        known = frozen_of(self._engine)
        everywhere = {} if known is None else known.everywhere
        held = frozen.adapter_of(self._engine, KEY).named
        for count, block in enumerate(self._blocks):
            given = asked(block, held, KEY)
            own = chosen(given, held)[0]
            inside = (n == one or n.startswith(f"{one}.") for one in given for n in everywhere)
            if any(held[name].requires_grad for name in own):
                return count
            # the block belongs to another stage
            if not own and given != [ELSEWHERE] and not any(inside):
                return count
        return len(self._blocks)

    def step(self) -> int:
        """Count an optimizer step, and freeze what is due; every rank calls it.

        Returns how many blocks are frozen. Raises as ``hybridcomp.freeze``.
        """
        self.taken += 1
        before = self.frozen
        if hasattr(self._engine, "stage_id"):
            # a stage does not see which blocks of other stages never trained
            counted = torch.tensor(before, device=default_device())
            before = int(small_messages.most(counted))
        wanted = min(self._most, self._wanted(before))
        if wanted > before:
            frozen.freeze(self._engine, [one for n in range(before, wanted)
                                         for one in _each(self._blocks[n])])  # fmt: skip
        self._listen_if_due()
        return max(before, wanted)

    def _wanted(self, before: int) -> int:
        if self._steps is not None:
            return max((n for at, n in self._steps.items() if at <= self.taken), default=0)
        assert self.every is not None, "checked"
        if self.taken % self.every or before >= self._most:
            return before
        norms = self._norms() if self.norms and self._squares else None
        return target(len(self._blocks), before, self.alpha, norms)

    def _listen_if_due(self) -> None:
        """Sum the squared gradients of the next step, by block, if a decision follows it."""
        if self.every and self.norms and (self.taken + 1) % self.every == 0:
            self._listen()

    def _listen(self) -> None:
        self._squares = [
            torch.zeros((), device=default_device(), dtype=torch.float32) for _ in self._blocks
        ]
        held = frozen.adapter_of(self._engine, KEY).named
        owner = {
            id(held[name]): n
            for n, block in enumerate(self._blocks)
            for name in chosen(asked(block, held, KEY), held)[0]
        }

        def add(gradient: Tensor, block: int) -> None:
            local: Any = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            squared = local.detach().float().square().sum()
            self._squares[block] += squared.to(self._squares[block].device)

        if "deepspeed" in packages_of(self._engine):
            for parameter in held.values():  # DeepSpeed frees gradients as they arrive
                block = owner.get(id(parameter))
                if block is not None and parameter.requires_grad:
                    hook: Any = parameter.register_hook
                    self._hooks.append(hook(lambda grad, block=block: add(grad, block)))
            return

        def before_step(optimizer: Any, *_: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in owner and parameter.grad is not None:
                        add(parameter.grad, owner[id(parameter)])

        self._hooks.append(register_optimizer_step_pre_hook(before_step))

    def _norms(self) -> list[float]:
        """Return the norms of the blocks' gradients, equal on all ranks; a collective."""
        while self._hooks:
            self._hooks.pop().remove()
        total = torch.stack(self._squares)
        self._squares = []
        if dist.is_initialized():
            small_messages.total(total)
        return [float(value) ** 0.5 for value in total.tolist()]

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps so far; the engine's checkpoint holds the set of frozen
        parameters.
        """
        return {"taken": self.taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from what ``state_dict`` returned."""
        self.taken = int(state["taken"])
        self._listen_if_due()


def _each(block: What) -> list[Any]:
    return list(block) if isinstance(block, (list, tuple)) else [block]
