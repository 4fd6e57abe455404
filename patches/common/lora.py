"""Publish a PEFT model: its adapters alone, or the merged weights under the base model's names."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError, PublishError
from hybridcomp.job.parameter_names import plain_name
from hybridcomp.publishing.weight_ranges import WeightRange
from hybridcomp.publishing.weights import EngineWeights

KEY = "publish.lora"
ALONE, MERGED = "adapters", "merged"
WAYS = (ALONE, MERGED)
PREFIX = "base_model.model."
#: a tensor of an adapter: its prefix, which matrix of the pair it is, and the adapter's name
ADAPTER = re.compile(r"(.*\.lora_(?:A|B|embedding_A|embedding_B))\.([^.]+)(\.weight)?")
#: further weights that PEFT trains: a vector of DoRA, a bias of ``lora_B``, rows of an embedding
OTHER = re.compile(r"\.(modules_to_save|lora_[^.]*|trainable_tokens_delta)\.")
BASE = ".base_layer."


def adapted(weights: EngineWeights, way: str | None) -> EngineWeights:
    """Return the ``weights`` of a PEFT model in one of the forms WAYS; None: unchanged.

    "adapters": only the adapters, named as in PEFT's checkpoints. "merged": each matrix with its
    adapter added by the operations of PEFT's ``merge_adapter``. Raises ConfigError if the model has
    no adapter or several, or if its layers do not fit the way.
    """
    if way is None or weights.refused is not None:
        return weights
    if way not in WAYS:
        raise ConfigError(KEY, way, f"expected one of {', '.join(WAYS)}, or nothing")
    found = {name: match for name in weights.shapes if (match := ADAPTER.fullmatch(name))}
    adapters = sorted({match[2] for match in found.values()})
    if len(adapters) != 1:
        shown = Shown(f"adapters {', '.join(adapters)}" if adapters else "a model without adapters")
        raise ConfigError(KEY, shown, "expected one adapter of PEFT's LoRA; leave it out")
    further = [name for name in weights.shapes if name not in found and OTHER.search(name)]
    if further := sorted(further):
        todo = "neither adapters alone nor merged values are what it computes with; leave it out"
        raise ConfigError(KEY, Shown(further[0]), todo)
    if way == ALONE:
        _refuse_trained(weights, set(found))
        return _renamed(
            weights, {name: match[1] + (match[3] or "") for name, match in found.items()}
        )
    return _merged(weights, adapters[0], set(found))


def _refuse_trained(weights: EngineWeights, adapters: set[str]) -> None:
    """Refuse adapters alone if the base trains, too, as with ``LoraConfig(bias="lora_only")``."""
    root = weights.module()
    every = {} if root is None else {plain_name(n): p for n, p in root.named_parameters()}
    if trained := sorted(n for n, p in every.items() if p.requires_grad and n not in adapters):
        todo = "it trains, and adapters alone would leave it out; write merged, or leave it out"
        raise ConfigError(KEY, Shown(trained[0]), todo)


def _renamed(weights: EngineWeights, names: dict[str, str]) -> EngineWeights:
    """Return only the weights in ``names``, each under its new name."""
    held = [
        replace(one, stretch=replace(one.stretch, name=names[one.stretch.name]))
        for one in weights.held if one.stretch.name in names
    ]  # fmt: skip
    return replace(
        weights, held=held, hugging_face=None,
        shapes={new: weights.shapes[old] for old, new in names.items()},
        dtypes={new: weights.dtypes[old] for old, new in names.items()},
        aliases={alias.removeprefix(PREFIX): names[name]
                 for alias, name in weights.aliases.items() if name in names},
    )  # fmt: skip


def _merged(weights: EngineWeights, adapter: str, adapters: set[str]) -> EngineWeights:
    root = weights.module()
    modules = {} if root is None else dict(root.named_modules())
    held = []
    for one in weights.held:
        name, whole = one.stretch.name, WeightRange(one.stretch.name, 0, one.stretch.numel)
        owner, base, last = name.partition(BASE)
        layer = modules.get(owner)
        if base and last == "weight":
            numel = torch.Size(weights.shapes[name]).numel()
            is_whole = one.stretch == whole and whole.numel == numel
            if layer is None or not is_whole:
                todo = "the base is cut among the ranks (ZeRO 3, FSDP2): publish adapters alone"
                raise ConfigError(KEY, MERGED, todo)
            read = functools.partial(_with_adapter, one.read, layer, adapter)
            held.append(replace(one, read=read))
        elif name not in adapters:
            held.append(one)
    names = {name: name.removeprefix(PREFIX).replace(BASE, ".")
             for name in weights.shapes if name not in adapters}  # fmt: skip
    return _renamed(replace(weights, held=held), names)


@torch.no_grad()
def _with_adapter(read: Callable[[], Tensor], layer: Any, adapter: str) -> Tensor:
    """Return a matrix with its adapter merged, as PEFT's ``merge_adapter`` computes it."""
    base: Tensor = read().detach()
    if getattr(layer, "merged", False) or getattr(layer, "disable_adapters", False):
        return base
    delta = layer.get_delta_weight(adapter)
    if delta.shape != base.shape:
        raise PublishError(f"an adapter of shape {tuple(delta.shape)} for {tuple(base.shape)}")
    found: Tensor = (base + delta).to(base.dtype)
    return found
