"""Freeze parameters of a DeepSpeed engine, at every stage of ZeRO and in pipelines.

1. The optimizer only steps trained parameters (``stepped_parts``), as torch's own does at stage 0
   anyway.
2. BF16_Optimizer reduces one flat buffer of gradients: the trained parts are cut out of it.
3. At stages 1 and 2 the gather after a step leaves out frozen parameters (``trained_gathers``).
   Stage 3 gathers before each use, or with ``zero.frozen`` once (``frozen``).
4. A pipeline runs no backward passes of frozen stages at its front (``frozen_stages``).
5. Checkpoints are written and read with ``requires_grad`` as it was when the engine was built:
   DeepSpeed takes the layout of the optimizer's flat tensors from it.

All of this is set on the engine and its optimizer, and undone when everything has thawed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hybridcomp.channels import channels_of
from hybridcomp.job.parameter_names import plain_name
from hybridcomp.patches.common import trained_set
from hybridcomp.patches.common.engine_packages import is_a
from hybridcomp.patches.common.frozen_layers import Frozen, frozen_of
from hybridcomp.patches.common.stepped_parts import FlatFragment, SteppedParts, unfit
from hybridcomp.patches.ds.job_facts import SLICED_STAGE
from hybridcomp.patches.ds.pipeline import frozen_stages
from hybridcomp.patches.ds.pipeline.pipe import PIPE
from hybridcomp.patches.ds.pipeline.pipeline import is_dualpipev
from hybridcomp.patches.ds.zero import frozen as kept_weights
from hybridcomp.patches.ds.zero import trained_gathers
from hybridcomp.session.engine_session import session_of

#: attribute of an engine: its ``SteppedParts``
STEPPED = "_hybridcomp_stepped_parts"
#: method of BF16_Optimizer that returns the gradients to reduce
REDUCED = "get_grads_for_reduction"
#: methods of an engine that read or write checkpoints
CHECKPOINTS = ("save_checkpoint", "load_checkpoint", "save_16bit_model")
ANEW = "save a checkpoint, build the engine anew with these parameters frozen, and load it"
#: optimizers whose step is more than an elementwise rule
_WHOLE = ("Muon", "Onebit", "ZeroOne", "ZenFlow", "SuperOffload")


class EngineLayers:
    """A DeepSpeed engine for ``patches/frozen`` (``Adapter``)."""

    ranks: Sequence[int] | None = None

    def __init__(self, engine: Any) -> None:
        self._engine, self._optimizer = engine, engine.optimizer
        self.named: Mapping[str, Tensor] = {
            plain_name(name): p for name, p in engine.module.named_parameters()
        }
        self.part = int(getattr(engine, "stage_id", 0))
        self.channels = channels_of(engine)

    def steps(self) -> int:
        """Return the number of steps taken."""
        return int(self._engine.global_steps) - int(self._engine.skipped_steps)

    def refused(self) -> tuple[str, str] | None:
        """Return the features of this engine that prevent freezing."""
        engine, optimizer = self._engine, self._optimizer
        pipe = getattr(engine, PIPE, None)
        if engine.zero_optimization_stage() and getattr(optimizer, "swap_optimizer", False):
            return "optimizer states on NVMe", ANEW
        names = {cls.__name__ for one in _inner(optimizer) for cls in type(one).__mro__}
        names.update(cls.__name__ for cls in type(optimizer).__mro__)
        if odd := next((n for n in names if n.startswith(_WHOLE)), None):
            return odd, f"it steps tensors as a whole; {ANEW}"
        if not isinstance(optimizer, Optimizer) and not _fragments(optimizer, self.named):
            return type(optimizer).__name__, f"its layout is not known; {ANEW}"
        for one in _inner(optimizer):
            if key := unfit(one, {f.flat for f in _fragments(optimizer, self.named)}):
                return f"{type(one).__name__}, whose {key!r} is of several elements", ANEW
        if is_dualpipev(engine) or (pipe is not None and pipe.waitless is not None):
            return "a pipeline with a schedule of its own", ANEW
        if any(name.startswith("tied_modules.") for name in self.named):
            return "layers that stages share (TiedLayerSpec)", ANEW
        if any(is_a(module, SLICED_STAGE) for module in engine.module.modules()):
            return "token slices", ANEW
        if self.channels is not None and self.channels.config.sync.acts:
            return "islands", "they meet with the parameters that trained when they began"
        return None

    def is_open(self) -> bool:
        """Return whether some but not all micro-batches of a step have run."""
        engine = self._engine
        if hasattr(engine, "stage_id"):  # train_batch is a whole step
            return False
        return bool(engine.micro_steps % engine.gradient_accumulation_steps())

    def apply(self, frozen: Frozen) -> None:
        """Apply the five changes listed at the top of this module."""
        engine, optimizer = self._engine, self._optimizer
        names = [name for name in self.named if name in frozen.everywhere]
        # 1
        stepped = vars(engine).get(STEPPED)
        if stepped is None and not isinstance(optimizer, Optimizer):
            stepped = SteppedParts(_inner(optimizer), _fragments(optimizer, self.named))
            setattr(engine, STEPPED, stepped)
        if stepped is not None:
            stepped.frozen, stepped.missed = set(names), dict(frozen.missed)
            self._forget_norms(names)
        # 2
        vars(optimizer).pop(REDUCED, None)
        if names and hasattr(optimizer, "fp32_groups_gradients_flat"):
            reduced = functools.partial(_trained_gradients, optimizer)
            setattr(optimizer, REDUCED, reduced)
        # 3
        trained_gathers.follow(optimizer)
        if self.channels is not None:
            kept_weights.keep(engine, self.channels)
        # 4
        frozen_stages.set_front(engine, frozen.wholly)
        # 5
        for name in CHECKPOINTS:
            vars(engine).pop(name, None)
            if names:
                setattr(engine, name, functools.partial(_as_built, engine, name))
        session = session_of(engine)
        if session is not None:
            trained_set.accept(session.followers)

    def _forget_norms(self, names: Sequence[str]) -> None:
        """Leave the last gradients out of the norm, which offload computes from these entries."""
        norms = getattr(self._optimizer, "norm_for_param_grads", {})
        for name in names:
            norms.pop(self._optimizer.get_param_id(self.named[name]), None) if norms else None


def _inner(optimizer: Any) -> list[Optimizer]:
    """Return torch's optimizers that step the flat tensors, or else the engine's own."""
    if isinstance(optimizer, Optimizer):
        return [optimizer]
    both = (getattr(optimizer, name, None) for name in ("optimizer", "backup_optimizer"))
    return [one for one in both if isinstance(one, Optimizer)]


def _fragments(optimizer: Any, named: Mapping[str, Tensor]) -> list[FlatFragment]:
    """Return where the parameters lie in the flat tensors that this rank steps."""
    names = {id(parameter): name for name, parameter in named.items()}
    found: list[FlatFragment] = []
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):  # stage 3
        flats = optimizer.fp32_partitioned_groups_flat
        for flat, params in zip(flats, optimizer.fp16_groups, strict=True):
            found += _in_order(flat, params, names, lambda p: p.partition_numel())
    elif hasattr(optimizer, "fp32_groups_flat"):  # FP16_Optimizer
        for flat, params in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
            found += _in_order(flat, params, names, Tensor.numel)
    elif hasattr(optimizer, "fp32_groups"):  # FP16_UnfusedOptimizer
        for flats, params in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
            found += [FlatFragment(flat, names[id(p)], 0, flat.numel())
                      for flat, p in zip(flats, params, strict=True)]  # fmt: skip
    else:  # stages 1 and 2, BF16_Optimizer
        flats = getattr(optimizer, "single_partition_of_fp32_groups", None)
        flats = getattr(optimizer, "fp32_groups_flat_partition", ()) if flats is None else flats
        groups = getattr(optimizer, "bit16_groups", getattr(optimizer, "bf16_groups", ()))
        for flat, params in zip(flats, groups, strict=True):
            for p in params:
                if p._hp_mapping is not None:
                    place = p._hp_mapping.get_hp_fragment_address()
                    found.append(FlatFragment(flat, names[id(p)], place.start, place.numel))
    return found


def _in_order(
    flat: Tensor, params: Sequence[Any], names: Mapping[int, str], size: Callable[[Any], int]
) -> list[FlatFragment]:
    found, start = [], 0
    for p in params:
        found.append(FlatFragment(flat, names[id(p)], start, size(p)))
        start += size(p)
    return found


def _trained_gradients(optimizer: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """Return BF16_Optimizer's gradients to reduce, as views of the trained parts of its buffers."""
    plain_ones, experts = getattr(type(optimizer), REDUCED)(optimizer)
    flats = zip(optimizer.fp32_groups_gradients_flat, optimizer.bf16_groups, strict=True)
    views: list[Tensor] = []
    for (buffer, params), flat in zip(flats, optimizer.bf16_groups_flat, strict=True):
        if any(buffer is plain for plain in plain_ones):
            stretches = trained_gathers.stretches(flat, params, trains=True)
            views += [buffer[start:stop] for start, stop in stretches]
    return views, experts


def _as_built(engine: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    with _requiring_gradients(engine):
        return getattr(type(engine), name)(engine, *args, **kwargs)


@contextmanager
def _requiring_gradients(engine: Any) -> Iterator[None]:
    """Let frozen parameters require gradients inside this context, as when the engine was built."""

    def set_all(requires: bool) -> None:
        frozen = frozen_of(engine)
        for name, parameter in engine.module.named_parameters():
            if frozen is not None and plain_name(name) in frozen.everywhere:
                parameter.requires_grad_(requires)

    set_all(True)
    try:
        yield
    finally:
        set_all(False)
