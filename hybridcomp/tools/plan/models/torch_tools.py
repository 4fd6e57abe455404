"""Trace modules with torch's private tools: fake tensors and the counter of FLOPs.

These tools are in ``torch._subclasses`` and ``torch.utils.flop_counter`` and may move; then only
this file has to change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hybridcomp.errors import HybridcompError


def _missing(what: str, error: Exception) -> HybridcompError:
    return HybridcompError(
        f"torch {torch.__version__} has no {what} where hybridcomp looks for it ({error}); "
        "describe the model by its sizes (config.json), which needs no tracing"
    )


def fake_mode() -> Any:
    """Return a context whose tensors have a shape and no storage. Raises HybridcompError."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError as error:
        raise _missing("FakeTensorMode", error) from None
    return FakeTensorMode(allow_non_fake_inputs=True)


def flop_counter() -> Any:
    """Return a context that counts FLOPs, CPU attention included. Raises HybridcompError."""
    try:
        from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count
    except ImportError as error:
        raise _missing("FlopCounterMode", error) from None
    from torch.utils.flop_counter import sdpa_flop_count

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]

    def backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        count = sdpa_backward_flop_count(grad, query, key, value)  # type: ignore[no-untyped-call]
        return int(count)

    aten = torch.ops.aten
    extra = {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    return FlopCounterMode(display=False, custom_mapping=extra)


@dataclass
class Traced:
    """Trace of one unit: a submodule that stays whole.

    flops, backward_flops: FLOPs of forward and backward. kept_nbytes: bytes that autograd kept for
    the unit, without weights; widest_nbytes: bytes of the largest kept storage. output: number of
    output values. inputs: units whose outputs this one reads. tensors: values of each parameter.
    """

    name: str
    tensors: tuple[int, ...]
    flops: float = 0.0
    backward_flops: float = 0.0
    kept_nbytes: int = 0
    widest_nbytes: int = 0
    input_nbytes: int = 0
    output: int = 0
    inputs: tuple[int, ...] = ()

    @property
    def parameters(self) -> int:
        """Values of all parameters of the unit."""
        return sum(self.tensors)


@dataclass
class _Watch:
    """State of one traced pass."""

    units: list[tuple[str, nn.Module]]
    traced: list[Traced] = field(default_factory=list)
    weights: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    # references that keep storages and nodes alive: a freed one's address would be reused
    alive: list[Any] = field(default_factory=list)
    current: int | None = None
    producer: dict[Any, int] = field(default_factory=dict)

    def pack(self, tensor: Tensor) -> Tensor:
        """Add a tensor that autograd saves to the kept bytes of the running unit; return it."""
        storage = tensor.untyped_storage()
        if self.current is not None and storage._cdata not in self.weights | self.kept:
            self.kept.add(storage._cdata)
            self.alive.append(storage)
            unit = self.traced[self.current]
            unit.kept_nbytes += storage.nbytes()
            unit.widest_nbytes = max(unit.widest_nbytes, storage.nbytes())
        return tensor


def trace(
    units: Sequence[tuple[str, nn.Module]], run: Callable[[], Any], owner: nn.Module
) -> list[Traced]:
    """Trace one forward and backward pass of ``owner``, unit by unit.

    ``run`` runs the forward pass and returns its outputs; this function runs the backward pass of
    their sum. Call it inside ``fake_mode()``. The first unit also counts parameters outside units.
    """
    watch = _Watch(list(units))
    own: set[int] = set()
    for name, unit in units:
        fresh = {id(p): p for p in unit.parameters() if id(p) not in own}
        own |= set(fresh)
        watch.traced.append(Traced(name, tuple(p.numel() for p in fresh.values())))
    rest = tuple(p.numel() for p in owner.parameters() if id(p) not in own)
    watch.traced[0].tensors = rest + watch.traced[0].tensors
    watch.weights = {p.untyped_storage()._cdata for p in owner.parameters()}
    counter = flop_counter()
    with contextlib.ExitStack() as stack:
        for index, (_, unit) in enumerate(units):
            for handle in _hooks(watch, index, unit, counter):
                stack.callback(handle.remove)
        with counter:
            with torch.autograd.graph.saved_tensors_hooks(watch.pack, lambda tensor: tensor):
                outputs = list(_tensors(run()))
            forward = counter.get_total_flops()
            grown = [out.float().sum() for out in outputs if out.requires_grad]
            if not grown:
                raise HybridcompError("the model's outputs have no gradient: it cannot be planned")
            torch.autograd.backward(torch.stack(grown).sum())
        spent = counter.get_total_flops() - forward
    for one in watch.traced:  # in proportion to their FLOPs of forward
        one.backward_flops = one.flops * spent / forward if forward else 0.0
    return watch.traced


def _hooks(watch: _Watch, index: int, unit: nn.Module, counter: Any) -> Iterator[Any]:
    """Register and yield the hooks of ``unit``, which record its inputs, FLOPs and outputs."""
    started: list[float] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = list(_tensors((args, kwargs)))
        seen = watch.traced[index]
        nodes = [tensor.grad_fn for tensor in tensors]
        seen.inputs = tuple(sorted({*seen.inputs, *_makers(nodes, watch.producer)} - {index}))
        seen.input_nbytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        watch.current = index
        started.append(counter.get_total_flops())

    def behind(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        watch.current = None
        seen = watch.traced[index]
        seen.flops += counter.get_total_flops() - started.pop()
        for tensor in _tensors(output):
            seen.output += tensor.numel()
            if tensor.grad_fn is not None:
                watch.producer[tensor.grad_fn] = index

    yield unit.register_forward_pre_hook(before, with_kwargs=True)
    yield unit.register_forward_hook(behind, with_kwargs=True)


def _makers(nodes: Sequence[Any], producer: dict[Any, int]) -> set[int]:
    """Return the units whose outputs are the nearest ancestors of ``nodes`` in autograd's graph."""
    found: set[int] = set()
    waiting, seen = [node for node in nodes if node is not None], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in producer:
            found.add(producer[node])
            continue
        waiting += [before for before, _ in node.next_functions if before is not None]
    return found


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, dict):
        for value in found.values():
            yield from _tensors(value)
    elif isinstance(found, (list, tuple)):
        for value in found:
            yield from _tensors(value)
