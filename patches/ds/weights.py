"""List the ranges of weights that this rank of a DeepSpeed engine holds, for publishing.

Stages 0 to 2 hold the module's 16-bit parameters whole on every rank, stage 3 a range of each
(``ds_tensor``, padded at its end). Each rank holds only its own experts
(``expert_weights``). The weights read are those that the module computes with: after lossy gathers
of stages 1 and 2, the decoded weights.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.job.parameter_names import named_once, plain_name
from hybridcomp.patches.common.table_weights import with_tables
from hybridcomp.patches.common.unchanged import KnownParameters
from hybridcomp.patches.ds import island_unit
from hybridcomp.patches.ds.expert_weights import ExpertLayers
from hybridcomp.patches.ds.job_facts import tensor_ranks
from hybridcomp.patches.ds.zero.partitions import filled
from hybridcomp.publishing import EngineWeights, Held, WeightRange, unless_refused

KEY = "publish"


def weights_of(engine: Any) -> EngineWeights:
    """Return the weights of ``engine``; ``refused`` is set if their sharding is unknown."""
    islands = island_unit.islands_of_engine(engine)
    ranks = tuple(range(dist.get_world_size())) if islands is None else islands.ranks
    return unless_refused(functools.partial(_of_engine, engine, ranks), ranks)


def _of_engine(engine: Any, ranks: tuple[int, ...]) -> EngineWeights:
    _check(engine)
    layers = ExpertLayers(engine.module, plain_name)
    renamed: Callable[[], EngineWeights] | None = None
    if layers.any_auto:
        renamed = functools.partial(_collected, engine, ranks, layers, layers.hugging_face)
        renamed = functools.partial(unless_refused, renamed, ranks)
    found = replace(_collected(engine, ranks, layers, str), hugging_face=renamed)
    return with_tables(found, engine.module)


def _collected(
    engine: Any, ranks: tuple[int, ...], layers: ExpertLayers, rename: Callable[[str], str]
) -> EngineWeights:
    """Return the weights of ``engine``, each under its name mapped by ``rename``."""
    from deepspeed.moe.utils import is_moe_param

    found, aliases = named_once(engine.module)
    parameters: dict[str, Any] = dict(found)
    shapes, dtypes, held = {}, {}, []
    for name, parameter in parameters.items():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        is_cut = hasattr(parameter, "ds_tensor")
        begin = 0
        for whole in layers.of(name, shape, is_moe_param(parameter)):
            told = rename(whole.name)
            shapes[told] = whole.shape
            dtypes[told] = (parameter.ds_tensor if is_cut else parameter).dtype
            held.append((_range_of if is_cut else _whole)(told, parameter, begin, whole.numel))
            begin += whole.numel
    tied = {
        alias: rename(name) for alias, name in aliases.items()
        if not layers.has(alias)  # AutoEP has a further name for its router
    }  # fmt: skip
    unchanged = KnownParameters(engine.module)
    return EngineWeights(
        shapes, dtypes, held, ranks, tied, unchanged=unchanged, module=weakref.ref(engine.module)
    )


def _check(engine: Any) -> None:
    if max(tensor_ranks(), engine.autotp_size() or 1) > 1:
        found, why = "tensor parallel", "DeepSpeed does not say how tensor ranks cut a weight"
    elif any(_is_on_disk(parameter) for parameter in engine.module.parameters()):
        found, why = "offload_param to nvme", "weights that are on a disk cannot be compared"
    else:
        return
    todo = f"{why}; publish from an engine without it, or save and load a checkpoint"
    raise ConfigError(KEY, Shown(found), todo)


def _is_on_disk(parameter: Any) -> bool:
    status = getattr(getattr(parameter, "ds_tensor", None), "status", None)
    return getattr(status, "name", "AVAILABLE") != "AVAILABLE"


def _whole(name: str, parameter: Any, begin: int, numel: int) -> Held:
    """Return the weight ``name``: ``numel`` values of a whole parameter from ``begin`` on."""
    whole = numel == parameter.numel()
    living = _Living(parameter, begin, begin + numel)
    return Held(WeightRange(name, 0, numel), living.whole if whole else living.some)


def _range_of(name: str, parameter: Any, begin: int, numel: int) -> Held:
    """Return this rank's range of ``name``, which is all or part of a stage-3 parameter.

    The padding after the parameter's end is left out.
    """
    size = int(parameter.ds_tensor.ds_numel)
    start = min(dist.get_rank(parameter.ds_process_group) * size, int(parameter.ds_numel))
    low = min(max(begin, start), begin + numel)
    high = max(low, min(begin + numel, start + filled(parameter)))
    return Held(
        WeightRange(name, low - begin, high - low),
        _Living(parameter, low - start, high - start).part,
    )


class _Living:
    """A parameter, held weakly: a publisher must not keep a dropped engine's weights alive."""

    def __init__(self, parameter: Tensor, low: int, high: int) -> None:
        self._known, self._low, self._high = weakref.ref(parameter), low, high

    def _parameter(self) -> Any:
        found = self._known()
        assert found is not None, "the engine of a publisher is alive"
        return found

    def whole(self) -> Tensor:
        found: Tensor = self._parameter().data
        return found

    def some(self) -> Tensor:
        return self.whole().reshape(-1)[self._low : self._high]

    def part(self) -> Tensor:
        found: Tensor = self._parameter().ds_tensor.data
        return found.reshape(-1)[self._low : self._high]
