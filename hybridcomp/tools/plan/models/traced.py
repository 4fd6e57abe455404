"""Trace any ``nn.Module`` without storage, and scale the trace to other micro-batches.

The units of the module are the members of its ``ModuleList``s and ``Sequential``s, and the
submodules outside of these. A module whose units read more than the unit before (encoder-decoder,
several towers) is a graph, which ``algorithms.dag_partition`` splits.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hybridcomp.errors import HybridcompError
from hybridcomp.tools.plan.models.model import BatchShape, ModelLayer
from hybridcomp.tools.plan.models.torch_tools import Traced, fake_mode, trace

#: builds the module's arguments of one micro-batch from (samples, tokens of a sample)
Inputs = Callable[[int, int], Sequence[Any]]
WIDTHS = {2: torch.bfloat16, 4: torch.float32}


def tokens(samples: int, length: int) -> Sequence[Any]:
    """Return the inputs of a language model: one int64 tensor (samples, length) of zeros."""
    return (torch.zeros(samples, length, dtype=torch.int64),)


@dataclass
class TracedModel:
    """A ``Model`` from the trace of a module.

    make: builds the module, called in a mode without tensor storage. inputs: builds the arguments
    of one micro-batch.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Inputs = tokens
    _seen: dict[tuple[int, int, int], list[Traced]] = field(default_factory=dict, repr=False)

    def traced(self, samples: int, length: int, width: int = 4) -> list[Traced]:
        """Trace one micro-batch, once. Raises HybridcompError where the module cannot be traced."""
        key = samples, length, width
        if key not in self._seen:
            self._seen[key] = self._trace(*key)
        return self._seen[key]

    def _trace(self, samples: int, length: int, width: int) -> list[Traced]:
        try:
            with fake_mode(), torch.device("cpu"):
                module = self.make()
                if not isinstance(module, nn.Module):
                    raise TypeError(f"expected an nn.Module, found {type(module).__name__}")
                _cast(module, WIDTHS[width])
                cut = list(units(module))
                if not cut:
                    raise TypeError("the module is empty")
                arguments = [
                    one.to(WIDTHS[width])
                    if isinstance(one, Tensor) and one.is_floating_point() else one
                    for one in self.inputs(samples, length)
                ]  # fmt: skip
                return trace(cut, lambda: module(*arguments), module)
        except HybridcompError:
            raise
        except Exception as error:
            raise HybridcompError(
                f"{self.name} cannot be traced: {_said(error)}; expected a module that runs "
                "forward and backward on its inputs without looking at their values"
            ) from error

    @property
    def depth(self) -> int:
        return len(self._any())

    @property
    def repeated(self) -> range:
        """The members of the longest list of layers; all units where there is no list."""
        runs: list[tuple[str, int, int]] = []
        for index, unit in enumerate(self._any()):
            name, _, number = unit.name.rpartition(".")
            if not number.isdigit():
                continue
            if runs and runs[-1][0] == name and runs[-1][2] == index:
                runs[-1] = (name, runs[-1][1], index + 1)
            else:
                runs.append((name, index, index + 1))
        _, start, stop = max(runs, key=lambda run: run[2] - run[1], default=("", 0, self.depth))
        return range(start, stop)

    @property
    def parameters(self) -> float:
        return sum(unit.parameters for unit in self._any())

    @property
    def is_chain(self) -> bool:
        return all(set(unit.inputs) <= {index - 1} for index, unit in enumerate(self._any()))

    def shared(self, shape: BatchShape) -> float:
        """Return 0.0: a shared weight counts for the first unit that has it."""
        return 0.0

    def refuses(self, shape: BatchShape) -> str | None:
        """Say why ``shape`` cuts layers, which traced layers do not allow; None if it does not."""
        for name in ("tensor", "context", "expert", "mesh", "slices"):
            if getattr(shape, name) > 1:
                return f"{name} {getattr(shape, name)}: only models of known layers are cut so"
        return None

    def layers(self, shape: BatchShape) -> tuple[ModelLayer, ...]:
        """Return the units for any micro-batch, extrapolated from traces of 1 and 2 samples."""
        one, two = (self.traced(n, shape.length, shape.width) for n in (1, 2))
        return tuple(
            _layer(a, b, index, shape) for index, (a, b) in enumerate(zip(one, two, strict=True))
        )

    def _any(self) -> list[Traced]:
        return next(iter(self._seen.values())) if self._seen else self.traced(1, 128)


def _said(error: Exception) -> str:
    """Return the type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _layer(one: Traced, two: Traced, index: int, shape: BatchShape) -> ModelLayer:
    def at(name: str) -> float:
        first, second = getattr(one, name), getattr(two, name)
        return float(first + (shape.micro_batch - 1) * (second - first))

    kept = at("kept_nbytes")
    return ModelLayer(
        one.name, "module", at("flops"), at("backward_flops"), moved_nbytes=2 * kept,
        parameters=one.parameters, expert_parameters=0.0, kept_nbytes=kept,
        input_nbytes=at("input_nbytes"), work_nbytes=2 * at("widest_nbytes"),
        output=at("output"), inputs=one.inputs, tensors=one.tensors,
    )  # fmt: skip


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast every parameter to ``dtype``; ``Module.to`` cannot cast tensors without storage."""
    cast: dict[int, nn.Parameter] = {}
    for inner in module.modules():
        for name, parameter in inner.named_parameters(recurse=False):
            if id(parameter) not in cast:
                cast[id(parameter)] = nn.Parameter(parameter.detach().to(dtype))
            setattr(inner, name, cast[id(parameter)])


def units(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the submodules that stay whole, in the order in which they were registered."""
    if isinstance(module, nn.ModuleList | nn.Sequential) or _has_list(module):
        for child_name, child in module.named_children():
            yield from units(child, f"{name}.{child_name}".lstrip("."))
    else:
        yield name or type(module).__name__, module


def _has_list(module: nn.Module) -> bool:
    """Return whether ``module`` contains a list of two layers or more."""
    return any(isinstance(inner, nn.ModuleList) and len(inner) > 1 for inner in module.modules())


def named(path: str) -> TracedModel:
    """Import ``package:callable`` and trace the model that it builds. Raises HybridcompError.

    The callable takes nothing and returns a module, whose inputs are tokens, or a module and a
    callable that builds its inputs from the number of samples and the length.
    """
    package, _, name = path.partition(":")
    try:
        found = importlib.import_module(package)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing runs the user's module
        raise HybridcompError(
            f"{path}: {_said(error)}; expected package:callable that can be imported from here"
        ) from error
    if not callable(found):
        raise HybridcompError(f"{path}: expected a callable, found {type(found).__name__}")
    make = found
    inputs: Inputs = tokens
    try:
        with fake_mode(), torch.device("cpu"):
            made = make()
    except Exception as error:
        raise HybridcompError(
            f"{path} builds no model: {_said(error)}; expected a callable that takes nothing"
        ) from error
    if isinstance(made, tuple):
        if len(made) != 2 or not callable(made[1]):
            raise HybridcompError(f"{path}: expected a module and a callable for its inputs")
        inputs = made[1]

        def build() -> nn.Module:
            module: nn.Module = make()[0]
            return module

        return TracedModel(path, build, inputs)
    return TracedModel(path, make, inputs)
