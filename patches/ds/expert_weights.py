"""Name the experts of DeepSpeed's MoE layers as its checkpoints do: by their number in the layer.

A rank has some of a layer's experts, under numbers that begin at 0 on every rank. ``deepspeed.moe``
has a module for each; AutoEP, which takes the place of a model's own MoE blocks, three tensors
``w1``, ``w2``, ``w3`` of all experts of the rank. In checkpoints an expert has tensors of its own,
``...deepspeed_experts.5.<name>`` and ``...experts.w1.5``. With Hugging Face's names AutoEP's layers
have those of the checkpoint that the model was loaded from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.patches.common.expert_names import DEEPSEEK, MIXTRAL, QWEN_MOE, ExpertNames

NATIVE = "deepspeed_moe.experts.deepspeed_experts."
#: families by AutoEP's names of their presets
FAMILIES = {
    "mixtral": MIXTRAL, "qwen3_moe": QWEN_MOE, "deepseek_v2": DEEPSEEK, "deepseek_v3": DEEPSEEK
}  # fmt: skip
NAMES = "publish.names"


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint that a parameter of this rank holds, or one of several.

    Values of a parameter are those of its tensors, one behind the other.
    """

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class _Layer:
    """A layer of experts: its module's name with a dot, and the first of its experts here."""

    before: str
    first: int
    family: str | None  # None: of deepspeed.moe


class ExpertLayers:
    """The MoE layers of a module, which say what its parameters are in checkpoints."""

    def __init__(self, module: nn.Module, plain: Callable[[str], str]) -> None:
        """Find the layers; ``plain`` takes the parts of wrappers out of a name."""
        self._layers = [
            found
            for name, one in module.named_modules()
            if (found := _layer(f"{plain(name)}." if name else "", one)) is not None
        ]

    @property
    def any_auto(self) -> bool:
        """Return whether AutoEP has put layers into a model of Hugging Face."""
        return any(layer.family is not None for layer in self._layers)

    def has(self, name: str) -> bool:
        """Return whether a parameter is in one of the layers."""
        return any(name.startswith(layer.before) for layer in self._layers)

    def of(self, name: str, shape: tuple[int, ...], is_expert: bool) -> list[CheckpointTensor]:
        """Return what a parameter of ``shape`` on this rank is in checkpoints.

        ``is_expert``: whether ranks have different values of it. Raises ConfigError where nothing
        says which of a layer's experts it is.
        """
        for layer in self._layers:
            inside = name.removeprefix(layer.before)
            if not name.startswith(layer.before):
                continue
            if layer.family is None and inside.startswith(NATIVE):
                number, _, rest = inside.removeprefix(NATIVE).partition(".")
                whole = f"{layer.before}{NATIVE}{layer.first + int(number)}.{rest}"
                return [CheckpointTensor(whole, shape)]
            if layer.family is not None and inside in ("experts.w1", "experts.w2", "experts.w3"):
                numbers = range(layer.first, layer.first + shape[0])
                return [CheckpointTensor(f"{name}.{number}", shape[1:]) for number in numbers]
        if is_expert:
            todo = "ranks have different experts under this name; use deepspeed.moe or AutoEP"
            raise ConfigError("publish", Shown(name), todo)
        return [CheckpointTensor(name, shape)]

    def hugging_face(self, name: str) -> str:
        """Return Hugging Face's name of a tensor of a checkpoint. Raises ConfigError."""
        for layer in self._layers:
            if not name.startswith(layer.before):
                continue
            inside = name.removeprefix(layer.before)
            names = FAMILIES.get(layer.family or "")
            block = layer.before.removesuffix("mlp.")
            if names is None or block == layer.before:
                todo = (
                    f"names are known of the experts of {', '.join(FAMILIES)} under AutoEP, in "
                    'layers called mlp; leave "names" out'
                )
                raise ConfigError(NAMES, Shown(f"{layer.family or 'deepspeed.moe'}: {name}"), todo)
            found = _inside(names, inside)
            if found is None:
                todo = 'Hugging Face\'s name of it is not known here; leave "names" out'
                raise ConfigError(NAMES, Shown(name), todo)
            return f"{block}{found}"
        return name


def _layer(before: str, module: Any) -> _Layer | None:
    """Return what a module is, None where it is no layer of experts."""
    kind = type(module).__name__
    if kind not in ("MoE", "AutoEPMoELayer"):
        return None
    from deepspeed.moe.layer import MoE
    from deepspeed.utils import groups

    is_auto = kind == "AutoEPMoELayer"
    if not is_auto and not isinstance(module, MoE):
        return None
    group = module.ep_group_name if is_auto else module.expert_group_name
    first = groups._get_expert_parallel_rank(group) * module.num_local_experts
    return _Layer(before, first, str(module.model_family) if is_auto else None)


def _inside(names: ExpertNames, inside: str) -> str | None:
    """Return Hugging Face's name of an AutoEP tensor, relative to the layer's block."""
    matrices = {"w1": names.gate, "w2": names.down, "w3": names.up}
    first, _, rest = inside.partition(".")
    if first == "experts":
        which, _, number = rest.partition(".")
        return f"{names.expert(int(number))}.{matrices[which]}.weight"
    if first == "router":
        return f"{names.router}.{rest.removeprefix('gate.')}"
    known = {"shared_experts": names.shared, "shared_experts_gate": names.shared_gate}
    return f"{known[first]}.{rest}" if known.get(first) else None
