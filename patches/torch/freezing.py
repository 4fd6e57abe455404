"""Freeze parameters of models under FSDP2 and DDP.

Optimizers of torch skip parameters without a gradient, and FSDP2 checks which parameters require
gradients. DistributedDataParallel waits for gradients of all parameters that required them when it
was constructed: so its reducer is built again inside the same module, as ``copy.deepcopy`` of such
a model does, with the same communication hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hybridcomp.channels import Channels
from hybridcomp.collectives.topology import ranks_of
from hybridcomp.job.parameter_names import plain_name
from hybridcomp.patches.common import trained_set
from hybridcomp.patches.common.frozen_layers import Frozen
from hybridcomp.patches.torch.attach import ATTRIBUTE
from hybridcomp.patches.torch.attached import Attached
from hybridcomp.patches.torch.ddp import slot as ddp_slot


class ModelLayers:
    """A model as an ``Adapter`` of ``patches/frozen``."""

    part = 0

    def __init__(self, model: Any) -> None:
        self._model = model
        self._is_ddp = isinstance(model, DistributedDataParallel)
        inner = model.module if self._is_ddp else model
        self.named: Mapping[str, Tensor] = {plain_name(n): p for n, p in inner.named_parameters()}
        found = vars(model).get(ATTRIBUTE)
        self._attached: Attached | None = found if isinstance(found, Attached) else None
        self.channels: Channels | None = None
        self.ranks: Sequence[int] | None = None
        if self._attached is not None:
            self.channels = self._attached.channels
        if self._is_ddp and len(ranks_of(model.process_group)) < dist.get_world_size():
            self.ranks = ranks_of(model.process_group)

    def steps(self) -> int:
        """Return 0: torch's optimizers count the steps of each parameter."""
        return 0

    def refused(self) -> tuple[str, str] | None:
        """Return why this model cannot be frozen; None if it can."""
        if self.channels is not None and self.channels.config.sync.acts:
            return "islands", "they meet with the parameters that trained when they began"
        if not self._is_ddp:
            return None
        todo = "freeze before the model is wrapped in DistributedDataParallel"
        if self._model._use_python_reducer:
            return "torch.compile's reducer in Python", todo
        if self._model.mixed_precision is not None:
            return "DistributedDataParallel(mixed_precision=...)", todo
        if any(hasattr(p, "_in_backward_optimizers") for p in self.named.values()):
            return "optimizers that step in the backward pass", todo
        return None

    def is_open(self) -> bool:
        """Return whether a pass with gradients has run whose optimizer step has not."""
        return self._attached is not None and self._attached.is_open

    def apply(self, frozen: Frozen) -> None:
        """Make DDP's reducer anew, and tell the check of trained parameters about the change."""
        if self._is_ddp:
            _renew(self._model)
        if self._attached is not None:
            trained_set.accept(self._attached.session.followers)


def _renew(model: Any) -> None:
    """Make the reducer of a DistributedDataParallel for the parameters that train now."""
    parameters, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model.reducer._remove_autograd_hooks()
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    if model.static_graph:
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
    model._has_rebuilt_buckets = False
    for hook, state in model._comm_hooks:
        dist._register_comm_hook(model.reducer, state, hook)  # type: ignore[attr-defined]
    slot = ddp_slot.slot_of(model)
    reducer: Any = None if slot is None or slot.reducer is None else slot.reducer()
    if reducer is not None:
        reducer.renew()
