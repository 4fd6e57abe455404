"""The planner's request (batch, limits) and the form of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from hybridcomp.codecs.words import DTYPES
from hybridcomp.errors import ConfigError
from hybridcomp.tools.plan import decided
from hybridcomp.tools.plan.engines import OWN_CUTS
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.plan import Plan

Engine = Literal["deepspeed", "megatron", "neox", "fsdp2"]


#: most samples of a step and tokens of a sample: a search over more does not end
MOST = 1 << 24


@dataclass(frozen=True)
class Batch:
    """One optimizer step of the whole job: its samples, and the tokens of each."""

    samples: int
    length: int

    def __post_init__(self) -> None:
        """Refuse a step without samples or tokens. Raises ConfigError."""
        for name in ("samples", "length"):
            if not 1 <= getattr(self, name) <= MOST:
                todo = f"expected 1 or more, up to {MOST}"
                raise ConfigError(f"batch.{name}", getattr(self, name), todo)


@dataclass(frozen=True)
class SearchLimits:
    """Limits of the search: the engine, its options, and the fields that are fixed.

    engine: the one that runs the plan; only its layouts are searched. dtype: of weights, messages.
    fixed: fields of ``Layout`` that the user has decided, for example ``{"tensor": 2}``.
    memory_share: fraction of device memory that a plan may fill; the rest is for the allocator.
    optimizer_nbytes: bytes of optimizer states and master weight per parameter; None: Adam's.
    bucket_numel: values of one bucket of gradients or parameters (``reduce_bucket_size``).
    own: cuts that only hybridcomp.nn has and that the script can build, out of "ring", "tp2d" and
    "slices"; those that ``fixed`` names count as well.
    ranks: how many to use; None: all of the cluster. most_micro_batch: samples, at most.
    recompute, offload: whether the search may switch them on.
    keep: number of plans to return. each: whether to find the best plan of each way to shard
    parameters (``search.kind_of``) as well.
    """

    engine: Engine = "deepspeed"
    dtype: str = "bf16"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    memory_share: float = 0.92
    optimizer_nbytes: float | None = None
    bucket_numel: float = 5e8
    ranks: int | None = None
    most_micro_batch: int = 64
    recompute: bool = True
    offload: bool = False
    own: tuple[str, ...] = ()
    keep: int = 10
    each: bool = False

    def __post_init__(self) -> None:
        """Refuse unknown names and values out of range. Raises ConfigError."""
        for name, value in self.fixed.items():
            decided.check(name, value)
        for name, least in (("ranks", 1), ("most_micro_batch", 1), ("keep", 1)):
            found = getattr(self, name)
            if found is not None and not least <= found <= MOST:
                raise ConfigError(name, found, f"expected {least} or more, up to {MOST}")
        for name in self.own:
            if name not in OWN_CUTS:
                raise ConfigError("own", name, f"expected some of {', '.join(OWN_CUTS)}")
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", self.dtype, f"expected one of {', '.join(DTYPES)}")
        if not 0 < self.memory_share <= 1:
            raise ConfigError("memory_share", self.memory_share, "expected above 0, at most 1")

    def owns(self, name: str) -> bool:
        """Return whether the search may propose the cut ``name`` of ``OWN_CUTS`` (DeepSpeed)."""
        return self.engine == "deepspeed" and (name in self.own or OWN_CUTS[name] in self.fixed)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of weights and messages."""
        return DTYPES[self.dtype]

    @property
    def states_nbytes(self) -> float:
        """Bytes of optimizer states a parameter.

        By default Adam's two moments and, for 16-bit weights, a master copy, all in fp32.
        """
        if self.optimizer_nbytes is not None:
            return self.optimizer_nbytes
        return 8.0 if self.dtype == "fp32" else 12.0


@dataclass(frozen=True)
class Nearest:
    """The plan that comes nearest to being feasible, with what it needs and what there is.

    what: "memory" or "ranks". needed, available: bytes of a device, or ranks.
    """

    layout: Layout
    what: str
    needed: float
    available: float


@dataclass(frozen=True)
class Found:
    """The answer of a search.

    plans: ranked, the fastest first; empty where nothing is feasible, and then ``reason`` says why
    in one sentence and ``nearest`` what would be needed.
    considered: number of layouts that were placed. simulated: number of combinations of choices
    that were simulated. refused: how many layouts each reason ruled out. unpriced: codecs of the
    budget without a figure in the cluster, which no plan uses. native: the first plan's layout
    without compression. best: the fastest plan of each way to shard the parameters
    (``search.kind_of``); a search for DeepSpeed adds FSDP2's HSDP. parameters: the whole model's.
    """

    plans: tuple[Plan, ...]
    considered: int = 0
    simulated: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""
    nearest: Nearest | None = None
    unpriced: tuple[str, ...] = ()
    native: Plan | None = None
    best: tuple[Plan, ...] = ()
    parameters: float = 0.0
