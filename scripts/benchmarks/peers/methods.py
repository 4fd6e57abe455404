"""The peers by name; each updates a model after its backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.peers import gathers, hooks, onebit, reductions
from benchmarks.peers.flat import Flat
from benchmarks.peers.torchft_fp8 import DiLoCoFp8
from benchmarks.peers.wire import Nodes, Wire


@dataclass(frozen=True)
class Settings:
    """Settings of the run that methods use."""

    steps: int
    per_node: int
    clip: float  # limit of the global gradient norm, 0: none
    adam: dict[str, Any]  # lr, betas, eps, weight_decay
    start: int | None = None  # native steps before; None: as each method's authors advise


class Method(Protocol):
    """A model and its update."""

    #: module to call with tokens
    model: Any
    #: optimizer whose learning rate the schedule sets
    optimizer: torch.optim.Optimizer

    def accumulate(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for backward passes that do not end a step."""

    def step(self) -> None:
        """Communicate what the backward pass did not, update the model and clear gradients."""


class Replicated:
    """DDP with a hook, AdamW on every rank."""

    def __init__(
        self, model: nn.Module, wire: Wire, settings: Settings, hook: Callable[[Any], Any] | None
    ) -> None:
        self.model = hooks.distributed(model)
        if hook is not None:
            hook(self.model)
        # bf16 parameters have fp32 masters, as in DeepSpeed's BF16_Optimizer
        self._flat = Flat(model.parameters(), 1)
        self._weights = nn.Parameter(self._flat.weights())
        self._exact = all(p.dtype == torch.float32 for p in model.parameters())
        updated = list(model.parameters()) if self._exact else [self._weights]
        self._updated, self._clip = updated, settings.clip
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(updated, **settings.adam)

    def accumulate(self) -> contextlib.AbstractContextManager[Any]:
        """Suppress communication during the backward pass."""
        context: contextlib.AbstractContextManager[Any] = self.model.no_sync()
        return context

    def step(self) -> None:
        """Step the optimizer; the backward pass has reduced the gradients."""
        if not self._exact:
            self._weights.grad = self._flat.gradients()
        if self._clip:
            nn.utils.clip_grad_norm_(self._updated, self._clip)
        self.optimizer.step()
        if not self._exact:
            self._flat.write(self._weights.detach())
        self.model.zero_grad(set_to_none=False)


class Sharded:
    """ZeRO-like sharded optimizer: reduce gradients to shards, update, gather weights."""

    def __init__(
        self, model: nn.Module, settings: Settings, reduction: reductions.TwoLevel,
        gather: Callable[[Tensor], gathers.Gather],
    ) -> None:  # fmt: skip
        self.model, self._clip, self._reduction = model, settings.clip, reduction
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self._flat = Flat(model.parameters(), ranks)
        weights = self._flat.weights()
        share = weights[rank * self._flat.share : (rank + 1) * self._flat.share]
        self._share = nn.Parameter(share.clone())
        self._gather = gather(weights)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW([self._share], **settings.adam)

    def accumulate(self) -> contextlib.AbstractContextManager[Any]:
        """Do nothing: the backward pass sends nothing."""
        return contextlib.nullcontext()

    def step(self) -> None:
        """Reduce, clip by the norm over all shards, update, gather."""
        gradient = self._reduction.reduce(self._flat.gradients())
        if self._clip:
            squares = gradient.square().sum()
            dist.all_reduce(squares)
            gradient *= min(1.0, self._clip / (float(squares.sqrt()) + 1e-6))
        self._share.grad = gradient
        self.optimizer.step()
        self._flat.write(self._gather.gather(self._share.detach()))
        self.model.zero_grad(set_to_none=False)


class OneBit:
    """1-bit Adam: after the freeze it sends momenta instead of gradients."""

    def __init__(
        self, model: nn.Module, wire: Wire, settings: Settings, exact: bool = False
    ) -> None:
        self.model = model
        self._flat = Flat(model.parameters(), dist.get_world_size())
        self._weights = nn.Parameter(self._flat.weights())
        freeze = settings.start or onebit.warm_up_steps(settings.steps, 0.2)
        self.optimizer: torch.optim.Optimizer = onebit.OneBitAdam(
            self._weights, self._flat.owners(), wire, freeze, clip=settings.clip, exact=exact,
            **{key: value for key, value in settings.adam.items() if key != "fused"},
        )  # fmt: skip

    def accumulate(self) -> contextlib.AbstractContextManager[Any]:
        """Do nothing: the backward pass sends nothing."""
        return contextlib.nullcontext()

    def step(self) -> None:
        """Pass the gradients to the optimizer and copy the weights back."""
        self._weights.grad = self._flat.gradients()
        self.optimizer.step()
        self._flat.write(self._weights.detach())
        self.model.zero_grad(set_to_none=False)


@dataclass(frozen=True)
class Peer:
    """One row of the table."""

    what: str  # shown in logs and tables
    source: str
    make: Callable[[nn.Module, Wire, Settings], Method]
    clean_room: bool = False


def _native(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _replicated(hook: Callable[[Any, Wire, Settings], Any] | None) -> Any:
    def make(model: nn.Module, wire: Wire, settings: Settings) -> Method:
        bound = None if hook is None else lambda ddp: hook(ddp, wire, settings)
        return Replicated(model, wire, settings, bound)

    return make


def _power_sgd(rank: int) -> Peer:
    def hook(ddp: Any, _: Wire, settings: Settings) -> Any:
        return hooks.power_sgd(ddp, rank, settings.start or hooks.start_iteration(settings.steps))

    return Peer(
        f"PowerSGD rank {rank}, one bucket, native for the first 10% of steps",
        "torch powerSGD_hook; arXiv 1905.13727",
        _replicated(hook),
    )


def _sharded(reduction: Any, gather: Callable[[Wire, nn.Module, Tensor], gathers.Gather]) -> Any:
    def make(model: nn.Module, wire: Wire, settings: Settings) -> Method:
        reduce = reduction(wire, Nodes(settings.per_node))
        return Sharded(model, settings, reduce, lambda weights: gather(wire, model, weights))

    return make


def _plain(wire: Wire, model: nn.Module, _: Tensor) -> gathers.Gather:
    return gathers.Native(wire, _native(model))


def _torchft(every: int) -> Peer:
    def make(model: nn.Module, wire: Wire, settings: Settings) -> Method:
        return DiLoCoFp8(model, wire, settings.adam, settings.clip, every)

    return Peer(
        f"DiLoCo every {every} steps, torchft's FP8 all-reduce: e4m3, a scale a row",
        "torchft 0.2.0, local_sgd.py and quantization.py; arXiv 2311.08105",
        make,
        clean_room=True,
    )


PEERS: dict[str, Peer] = {
    "ddp": Peer(
        "torch DDP, gradients in the parameters' width",
        "torch allreduce_hook",
        _replicated(lambda ddp, *_: hooks.native(ddp)),
    ),
    "ddp-fp16": Peer(
        "torch DDP, fp16 hook",
        "torch fp16_compress_hook",
        _replicated(lambda ddp, *_: hooks.fp16(ddp)),
    ),
    "ddp-bf16": Peer(
        "torch DDP, bf16 hook for gloo",
        "as torch bf16_compress_hook",
        _replicated(lambda ddp, *_: hooks.bf16(ddp)),
    ),
    **{f"powersgd-{rank}": _power_sgd(rank) for rank in (4, 16, 32)},
    **{f"torchft-fp8-{every}": _torchft(every) for every in (1, 10, 30, 100)},
    "qgz": Peer(
        "qgZ: 4-bit gradients in two levels, weights native",
        "arXiv 2306.10209, section 3.3",
        _sharded(reductions.qgz, _plain),
        clean_room=True,
    ),
    "qgz-qwz": Peer(
        "qgZ and qwZ: 4-bit gradients, 8-bit weights",
        "arXiv 2306.10209, sections 3.1 and 3.3",
        _sharded(reductions.qgz, lambda wire, *_: gathers.QwZ(wire)),
        clean_room=True,
    ),
    "loco": Peer(
        "LoCo: 4-bit gradients, moving average of the error, weights native",
        "arXiv 2407.04480, algorithm 1",
        _sharded(reductions.LoCo, _plain),
        clean_room=True,
    ),
    "onebit-adam": Peer(
        "1-bit Adam: native for the first 20% of steps, then signs of momenta",
        "arXiv 2102.02888, algorithm 1",
        OneBit,
        clean_room=True,
    ),
    "onebit-adam-exact": Peer(
        "1-bit Adam's optimizer, momenta averaged natively: what it does without compression",
        "arXiv 2102.02888, algorithm 1",
        lambda model, wire, settings: OneBit(model, wire, settings, exact=True),
        clean_room=True,
    ),
    "sdp4bit": Peer(
        "SDP4Bit: 4-bit weight differences, gradients 8 bits in a node, 4 rotated between",
        "arXiv 2410.15526, sections 3.1 and 3.2",
        _sharded(reductions.sdp4bit, lambda wire, _, weights: gathers.Differences(wire, weights)),
        clean_room=True,
    ),
}  # fmt: skip
