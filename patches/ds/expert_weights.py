"""Name the experts of DeepSpeed's MoE layers like its checkpoints: by their number in the layer.

Each rank has some of a layer's experts, numbered from 0 on every rank. ``deepspeed.moe`` has a
module per expert; AutoEP, which replaces a model's own MoE blocks, has three tensors ``w1``,
``w2``, ``w3`` for all experts of the rank. In checkpoints each expert has its own tensors,
``...deepspeed_experts.5.<name>`` and ``...experts.w1.5``. Under Hugging Face's naming AutoEP's
layers have the names of the checkpoint from which the model was loaded.
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
#: model family by AutoEP's preset name
FAMILIES = {
    "mixtral": MIXTRAL, "qwen3_moe": QWEN_MOE, "deepseek_v2": DEEPSEEK, "deepseek_v3": DEEPSEEK
}  # fmt: skip
NAMES = "publish.names"


@dataclass(frozen=True)
class CheckpointTensor:
    """A checkpoint tensor that a parameter of this rank holds, alone or among several.

    A parameter's values are the concatenated values of its tensors.
    """

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class _Layer:
    """A layer of experts: its module's name with a dot, and the number of its first expert here."""

    before: str
    first: int
    family: str | None  # None: a layer of deepspeed.moe


class ExpertLayers:
    """The MoE layers of a module, which map its parameters to checkpoint tensors."""

    def __init__(self, module: nn.Module, plain: Callable[[str], str]) -> None:
        """Find the layers; ``plain`` removes the wrappers' parts from a name."""
        self._layers = [
            found
            for name, named_module in module.named_modules()
            if (found := _layer(f"{plain(name)}." if name else "", named_module)) is not None
        ]

    @property
    def any_auto(self) -> bool:
        """Return whether AutoEP has replaced layers of a Hugging Face model."""
        return any(layer.family is not None for layer in self._layers)

    def has(self, name: str) -> bool:
        """Return whether a parameter is in one of the layers."""
        return any(name.startswith(layer.before) for layer in self._layers)

    def of(self, name: str, shape: tuple[int, ...], is_expert: bool) -> list[CheckpointTensor]:
        """Return the checkpoint tensors that a parameter of ``shape`` holds on this rank.

        ``is_expert``: whether its values differ between ranks. Raises ConfigError if the name does
        not show which of a layer's experts the parameter is.
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
        """Return the Hugging Face name of a checkpoint tensor. Raises ConfigError."""
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
    """Describe a module; return None if it is no layer of experts."""
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
    """Return the Hugging Face name of an AutoEP tensor, relative to the layer's block."""
    matrices = {"w1": names.gate, "w2": names.down, "w3": names.up}
    first, _, rest = inside.partition(".")
    if first == "experts":
        which, _, number = rest.partition(".")
        return f"{names.expert(int(number))}.{matrices[which]}.weight"
    if first == "router":
        return f"{names.router}.{rest.removeprefix('gate.')}"
    known = {"shared_experts": names.shared, "shared_experts_gate": names.shared_gate}
    return f"{known[first]}.{rest}" if known.get(first) else None
