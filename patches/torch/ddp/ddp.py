"""DistributedDataParallel: gradient buckets by ``register_comm_hook``, dimension ``dp``.

DDP holds a slot (``slot``), which references the reducer (``reducer``) weakly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hybridcomp.autotune.trials import StepTraffic, main_dtype
from hybridcomp.channels.checkpoint.resharing import Sends
from hybridcomp.channels.memory_use import note_tables
from hybridcomp.collectives.topology import ranks_of
from hybridcomp.dimensions import Dimension
from hybridcomp.job.parameter_names import plain_name
from hybridcomp.log import say_once as say
from hybridcomp.patches.torch import rules, steps, torch_versions, trained_set
from hybridcomp.patches.torch.attached import Attached
from hybridcomp.patches.torch.ddp import slot as ddp_slot
from hybridcomp.patches.torch.ddp.layout import chunk_of
from hybridcomp.patches.torch.ddp.reducer import Reducer, real_numel
from hybridcomp.patches.torch.session import Source, agree_on, read, session_of
from hybridcomp.patches.torch.state.identity import identity_of

REQUIREMENT = torch_versions.DDP
COVERS = ("dp", "sync", "embed")


def attach(
    model: DistributedDataParallel, source: Source | None, undo: ExitStack
) -> Attached | None:
    """Register the hook; return None if there is no block. Raises ConfigError, AgreementError.

    ``undo`` receives callbacks that detach the model.
    """
    block, group = read(source), model.process_group
    ranks = ranks_of(group)
    agree_on(block, "ddp", ranks)
    if block is None:
        return None
    torch_versions.check("ddp", REQUIREMENT)
    absent = rules.check(block, rules.DDP, model, "every rank has all weights under DDP")
    every = list(model._module_parameters)
    parameters = [p for p in every if p.requires_grad] or every  # all may be frozen by now
    session = session_of(block, parameters[0].device, absent, ranks, undo)
    named = {plain_name(name): one for name, one in model.module.named_parameters()}
    session.name_parameters(named.items())
    session.place([group], of_user=True)
    size = dist.get_world_size(group)
    numels = _buckets(parameters, model)
    sent: dict[Dimension, StepTraffic] = {"dp": StepTraffic(numels, "sum", together=True)}
    dtypes = [parameter.dtype.to_real() for parameter in parameters]  # the dtypes of the buckets
    encoded = main_dtype(zip(dtypes, map(real_numel, parameters), strict=True), dtypes[0])
    session.measure(group, encoded, sum(numels), sent)
    tables = _buckets(parameters, model, lambda numel: size * chunk_of(numel, size))
    note_tables(session.channels, tables)
    session.warn(set(dtypes))
    layout = {"ranks": size}
    divisors = dict.fromkeys(named, 1.0)
    sends = {name: Sends(((0, real_numel(one)),), ranks) for name, one in named.items()}
    attached = Attached(
        "ddp", identity_of(model.module), session, model.parameters, lambda: divisors, layout,
        lambda: sends,
        uneven=lambda: bool(model._join_config.enable),
    )  # fmt: skip
    undo.callback(attached.detach)
    reducer = Reducer(model, attached)
    attached.on_detach(reducer.tables.leave)
    slot = ddp_slot.occupy(model, reducer)
    attached.on_detach(functools.partial(slot.leave, reducer))
    hook = model.register_forward_pre_hook(_Entered(attached))
    attached.on_detach(hook.remove)
    steps.follow(attached)
    if dist.get_rank(group) == 0:
        trained_set.watch(attached, named.items(), averages_all=False)
    return attached


@dataclass
class _Entered:
    """Forward pre-hook: notes a pass with gradients; a copy of the model has nothing to note."""

    attached: Attached | None

    def __deepcopy__(self, memo: object) -> _Entered:
        return _Entered(None)

    def __reduce__(self) -> tuple[Callable[[], _Entered], tuple[()]]:
        return _unpickled, ()

    def __call__(self, model: Any, arguments: Any) -> None:
        if self.attached is not None and torch.is_grad_enabled():
            self.attached.entered(model.training)


def _unpickled() -> _Entered:
    """Return the hook of an unpickled model, and tell the user that it sends natively."""
    say("an unpickled model sends natively; if it is trained, call hybridcomp.attach on it")
    return _Entered(None)


def _buckets(
    parameters: list[Any], model: Any, padded: Callable[[int], int] = int
) -> tuple[int, ...]:
    """Return the elements of each bucket; DDP fills buckets in reverse order of parameters.

    ``padded``: returns the number of elements sent for a parameter, given its number of elements.
    """
    most = int(model.bucket_bytes_cap)
    filled: list[int] = []
    nbytes = 0
    for parameter in reversed(parameters):
        if not filled or nbytes + parameter.nbytes > most:
            filled.append(0)
            nbytes = 0
        filled[-1] += padded(real_numel(parameter))
        nbytes += parameter.nbytes
    return tuple(filled)
