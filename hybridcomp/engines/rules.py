"""What torch's engines do with the traffic of each dimension: refused, absent, or said once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from torch.distributed.tensor import DTensor

from hybridcomp.config import BLOCK, CompressionConfig
from hybridcomp.config.error_messages import Shown
from hybridcomp.engines.session import say
from hybridcomp.errors import ConfigError, SeamError
from hybridcomp.policy import DIMENSIONS, DIRECTIONS, Dimension

#: ``refuse``: never together, whatever ``on_unsupported`` says. ``bypass``: this traffic is sent
#: where no slot is. ``absent``: there is no such traffic, an error for a key that the user wrote.
Verdict = Literal["refuse", "bypass", "absent"]


@dataclass(frozen=True)
class Rule:
    """One thing that a model does, and what it means for some dimensions."""

    verdict: Verdict
    dimensions: tuple[Dimension, ...]
    what: str
    reason: str
    todo: str
    applies: Callable[[Any], bool] = field(repr=False)
    #: of the block, what else has to be so
    settings: Callable[[CompressionConfig], bool] = field(default=lambda block: True, repr=False)


def lossy(block: CompressionConfig, name: Dimension) -> bool:
    """Whether messages of ``name`` change values."""
    codecs = [block.codecs().get((name, way)) for way in DIRECTIONS]
    return any(codec is not None and not codec.lossless for codec in codecs)


def _elsewhere(engine: str) -> tuple[Rule, ...]:
    """What neither engine has."""
    return (
        Rule(
            "absent", ("pp", "ep", "cp", "offload"), f"a model under {engine}",
            "messages of pipelines, of routed tokens and of contexts, and copies to the host, are "
            "encoded under DeepSpeed and Megatron only", "leave it out", lambda job: True,
        ),
    )  # fmt: skip


def _has_tensor_parallel(model: Any) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _is_sparse(model: Any) -> bool:
    layers = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return any(isinstance(layer, layers) and layer.sparse for layer in model.modules())


#: of a DistributedDataParallel
DDP: tuple[Rule, ...] = (
    *_elsewhere("DistributedDataParallel"),
    Rule(
        "bypass", ("tp",), "layers that DTensor cuts (tensor parallel)",
        "DTensor communicates by functional collectives, which have no slot",
        "leave tp out", _has_tensor_parallel,
    ),
    Rule(
        "absent", ("tp",), "a model under DistributedDataParallel",
        "its layers are not cut", "leave tp out", lambda model: not _has_tensor_parallel(model),
    ),
    Rule(
        "absent", ("zero",), "a model under DistributedDataParallel",
        "every rank holds all parameters, and none are gathered",
        "leave zero out, or use fully_shard", lambda model: True,
    ),
    Rule(
        "bypass", ("dp",), "Embedding(sparse=True)",
        "sparse gradients are gathered row by row and come in buckets of their own",
        "set sparse to False", _is_sparse,
    ),
    Rule(
        "bypass", ("dp",), "delay_all_reduce_named_params",
        "DDP sums the gradients of these parameters outside its buckets", "remove it",
        lambda model: bool(model._delay_all_reduce_params),
    ),
    Rule(
        "refuse", ("dp",), 'torch._dynamo.config.optimize_ddp = "python_reducer"',
        "gradients are then reduced one by one in compiled code, without buckets", "set it to True",
        lambda model: bool(model._use_python_reducer),
    ),
    Rule(
        "refuse", ("dp",), "_apply_optimizer_in_backward",
        "DDP takes its one communication hook for optimizers that run in the backward pass",
        "run them after it",
        lambda model: any(hasattr(p, "_in_backward_optimizers") for p in model.parameters()),
    ),
    Rule(
        "absent", ("dp",), "one rank", "nothing is sent", "leave dp out, or add ranks",
        lambda model: dist.get_world_size(model.process_group) < 2,
    ),
)  # fmt: skip


def check(block: CompressionConfig, table: Sequence[Rule], job: Any) -> tuple[Dimension, ...]:
    """Hold the block against a model; the dimensions that it has no traffic of.

    Raises ConfigError for the first dimension that cannot act. With ``"on_unsupported": "native"``
    it is said once instead, on rank 0, what stays native and why.
    """
    active = [name for name in DIMENSIONS if block.active(name)]
    absent: dict[Dimension, None] = {}
    for rule in table:
        if not rule.applies(job):
            continue
        if rule.verdict == "absent":
            absent |= dict.fromkeys(rule.dimensions)
        names = [name for name in active if name in rule.dimensions]
        if rule.verdict == "absent":
            names = [name for name in names if name in block.explicit]
        if names and rule.settings(block):
            _apply(rule, names, block)
    return tuple(absent)


def _apply(rule: Rule, names: Sequence[Dimension], block: CompressionConfig) -> None:
    """Raise ConfigError for ``names[0]``, or say what stays native."""
    if rule.verdict != "refuse" and block.on_unsupported == "native":
        say(f"{', '.join(names)} native: {rule.what}: {rule.reason}")
        return
    native = "" if rule.verdict == "refuse" else ', or set "on_unsupported": "native"'
    raise ConfigError(
        f"{BLOCK}.{names[0]}",
        Shown(rule.what),
        f'{rule.reason}; {rule.todo}, or set "{names[0]}": "none"{native}',
    )


def check_version(engine: str, requirement: str) -> None:
    """Raise SeamError where torch is outside the window."""
    found = version("torch")
    if not Requirement(requirement).specifier.contains(found, prereleases=True):
        raise SeamError(
            f"{engine}: needs {requirement}, found torch {found}; install a version inside the "
            "window, or a hybridcomp that knows this one"
        )
