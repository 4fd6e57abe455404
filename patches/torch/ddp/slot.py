"""Keep the communication hook of a DistributedDataParallel for as long as the model lives.

DDP's reducer keeps its hook in C++, where Python's garbage collector does not look: a hook that
held its model would keep it alive for ever. So the slot references our reducer weakly, and the
``Attached`` of the model keeps it alive. Torch takes no second hook and cannot remove one: after
detach the hook averages natively, with the same values as DDP without a hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hybridcomp.errors import ConfigError

Bucket = torch.futures.Future[Tensor]
Reduce = Callable[[Any], Bucket]


class Slot:
    """State of the communication hook of one model.

    Attributes:
        reducer: averages the model's buckets; if it is dead or None, torch.distributed does.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.reducer: weakref.ref[Reduce] | None = None
        self._model = weakref.ref(model)

    def __reduce__(self) -> tuple[type[_SlotOfNone], tuple[()]]:
        """Pickle as a slot of no model: a pickled model gets a reducer without a hook."""
        return _SlotOfNone, ()

    def serves(self, model: object) -> bool:
        """Return whether this is the slot of ``model``, not one that was copied along with it."""
        return self._model() is model

    def leave(self, reducer: Reduce) -> None:
        """Let torch.distributed sum from now on, if ``reducer`` is the current reducer."""
        if self.reducer is not None and self.reducer() is reducer:
            self.reducer = None

    def reduce(self, bucket: Any) -> Bucket:
        """Average a bucket over the ranks: with the reducer, or natively if there is none.

        Raises ConfigError with ``join(divide_by_initial_world_size=False)``: a hook does not know
        that divisor.
        """
        model: Any = self._model()
        assert model is not None, "its reducer calls"
        _check_join(model)
        reducer = None if self.reducer is None else self.reducer()
        if reducer is not None:
            return reducer(bucket)
        return average(bucket.buffer(), model.process_group)


def average(gradients: Tensor, group: dist.ProcessGroup) -> Bucket:
    """Average ``gradients`` natively, in place: multiply, then sum, as DDP does."""
    gradients.mul_(1.0 / dist.get_world_size(group))
    work = dist.all_reduce(gradients, group=group, async_op=True)
    assert work is not None
    future: Bucket = work.get_future().then(lambda done: done.value()[0])
    return future


def occupy(model: DistributedDataParallel, reducer: Reduce) -> Slot:
    """Let ``reducer`` average the buckets of ``model``; the caller keeps it alive.

    Raises ConfigError where the model has another communication hook.
    """
    slot = slot_of(model) or _register(model)
    slot.reducer = weakref.ref(reducer)
    return slot


def slot_of(model: Any) -> Slot | None:
    """Return the slot of a model, None if it was never attached."""
    slots = (state for _, state in model._comm_hooks if isinstance(state, Slot))
    return next((slot for slot in slots if slot.serves(model)), None)


class _SlotOfNone(Slot):
    """Slot in a copied model's list of hooks; nothing calls it."""

    def __init__(self) -> None:
        self.reducer = None

    def serves(self, model: object) -> bool:
        return False


def hybridcomp_hook(state: Slot, bucket: Any) -> Any:
    """Call the slot of the model; a function of the module, so that models can be pickled."""
    return state.reduce(bucket)


# torch compares these with types, and finds strings under "from __future__ import annotations"
hybridcomp_hook.__annotations__ = {
    "bucket": dist.GradBucket,  # type: ignore[attr-defined]
    "return": Bucket,
}


def _register(model: DistributedDataParallel) -> Slot:
    slot = Slot(model)
    try:
        type(model).register_comm_hook(model, slot, hybridcomp_hook)  # a copy has ``_refuse``, too
    except RuntimeError as error:
        todo = (
            f"DDP takes one communication hook and this model has one ({error}); remove that one, "
            'or set "dp": "none" and do not attach'
        )
        raise ConfigError("compression.dp", "another communication hook", todo) from None
    vars(model)["register_comm_hook"] = _refuse
    return slot


def _refuse(state: object, hook: Callable[..., object]) -> None:
    """Raise ConfigError in place of ``register_comm_hook``: the model has hybridcomp's hook."""
    todo = (
        "DDP takes one communication hook and hybridcomp's is in the slot, also after detach; "
        "register yours before and do not attach, or wrap the model in a new "
        "DistributedDataParallel"
    )
    name = getattr(hook, "__qualname__", type(hook).__name__)
    raise ConfigError("register_comm_hook", name, todo)


def _check_join(model: Any) -> None:
    """Refuse ``join(divide_by_initial_world_size=False)``: a hook cannot know the divisor."""
    if model._join_config.enable and not model._divide_by_initial_world_size:
        todo = "a hook is not told how many ranks have inputs left; leave it at True"
        raise ConfigError("join(divide_by_initial_world_size)", False, todo)
