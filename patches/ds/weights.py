"""State which stretches of the weights this rank of a DeepSpeed engine holds, for publishing.

Stages 0 to 2 hold the module's 16-bit parameters whole on every rank, stage 3 a range of each
(``ds_tensor``, padded at its end). What the module computes with is read: where gathers of stages 1
and 2 are encoded with loss, these are the decoded weights.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.patches.common.parameter_names import named_once
from hybridcomp.patches.ds.job_facts import tensor_ranks
from hybridcomp.patches.ds.partitions import filled
from hybridcomp.publishing import EngineWeights, Held, WeightRange

KEY = "publish"


def weights_of(engine: Any) -> EngineWeights:
    """Return the weights of ``engine``. Raises ConfigError where their cut is not known."""
    _check(engine)
    found, aliases = named_once(engine.module)
    parameters: dict[str, Any] = dict(found)
    shapes, dtypes, held = {}, {}, []
    for name, parameter in parameters.items():
        shapes[name] = tuple(getattr(parameter, "ds_shape", parameter.shape))
        is_cut = hasattr(parameter, "ds_tensor")
        dtypes[name] = (parameter.ds_tensor if is_cut else parameter).dtype
        held += [_range_of(name, parameter) if is_cut else _whole(name, parameter)]
    ranks = tuple(range(dist.get_world_size()))
    return EngineWeights(shapes, dtypes, held, ranks, aliases)


def _check(engine: Any) -> None:
    from deepspeed.moe.utils import is_moe_param

    if max(tensor_ranks(), engine.autotp_size() or 1) > 1:
        found, why = "tensor parallel", "DeepSpeed does not say how tensor ranks cut a weight"
    elif any(is_moe_param(parameter) for parameter in engine.module.parameters()):
        found, why = "MoE", "ranks have different experts under one name"
    elif any(_is_on_disk(parameter) for parameter in engine.module.parameters()):
        found, why = "offload_param to nvme", "weights that are on a disk cannot be compared"
    else:
        return
    todo = f"{why}; publish from an engine without it, or save and load a checkpoint"
    raise ConfigError(KEY, Shown(found), todo)


def _is_on_disk(parameter: Any) -> bool:
    status = getattr(getattr(parameter, "ds_tensor", None), "status", None)
    return getattr(status, "name", "AVAILABLE") != "AVAILABLE"


def _whole(name: str, parameter: Any) -> Held:
    return Held(WeightRange(name, 0, parameter.numel()), _Living(parameter).whole)


def _range_of(name: str, parameter: Any) -> Held:
    """Return the range of a parameter of stage 3, without the padding behind its end."""
    size = int(parameter.ds_tensor.ds_numel)
    start = min(dist.get_rank(parameter.ds_process_group) * size, int(parameter.ds_numel))
    numel = filled(parameter)
    return Held(WeightRange(name, start, numel), _Living(parameter, numel).part)


class _Living:
    """A parameter, held weakly: who publishes must not keep a dropped engine's weights alive."""

    def __init__(self, parameter: Tensor, numel: int = 0) -> None:
        self._known, self._numel = weakref.ref(parameter), numel

    def _parameter(self) -> Any:
        found = self._known()
        assert found is not None, "the engine of a publisher is alive"
        return found

    def whole(self) -> Tensor:
        found: Tensor = self._parameter().data
        return found

    def part(self) -> Tensor:
        found: Tensor = self._parameter().ds_tensor.data
        return found.reshape(-1)[: self._numel]
