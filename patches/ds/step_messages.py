"""Predict the messages of a DeepSpeed engine's step, and detect the start of steps, for ``auto``.

Buckets are filled as in upstream: a parameter that does not fit starts the next one. They hold the
trained parameters in module order, nearly the order of the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hybridcomp.autotune.trials import main_dtype
from hybridcomp.channels import StepTraffic, channels_of
from hybridcomp.channels.memory_use import note
from hybridcomp.collectives import Group
from hybridcomp.dimensions import Dimension
from hybridcomp.patches.ds.checkpoint.exact_weights import flat_groups
from hybridcomp.patches.ds.zero.secondary import BUCKET_NUMEL
from hybridcomp.session.engine_session import EngineSession

#: elements that ``DeepSpeedEngine.buffered_allreduce_fallback`` flattens into one bucket
STAGE0_BUCKET = 500_000_000


def sent(engine: Any) -> dict[Dimension, StepTraffic]:
    """Return the messages of ``dp`` and ``zero`` in a step of one micro-batch, as far as known.

    Experts are treated as if they were reduced with everything else.
    """
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    numels = [int(getattr(p, "ds_numel", p.numel())) for p in trained]
    stage = _stage(engine)
    if not numels:
        return {}
    if stage == 3:
        fetched = [n for p, n in zip(trained, numels, strict=True) if not p.ds_persist]
        reduced = buckets(reversed(numels), int(engine.zero_reduce_bucket_size()))
        found: dict[Dimension, StepTraffic] = {"dp": StepTraffic(reduced, "scatter")}
        channels = channels_of(engine)
        if channels is not None and channels.config.zero.keeps_copy:
            # gathered once a step; DeepSpeed's own copy serves the backward pass
            passes, together = buckets(fetched, BUCKET_NUMEL), False
        else:
            passes, together = buckets(fetched, int(engine.zero_prefetch_bucket_size())), True
            if sum(numels) > engine.zero_max_reuse_distance():
                passes *= 2  # gathered again in the backward pass
        return {**found, "zero": StepTraffic(passes, "gather", together)} if passes else found
    groups = tuple(flat.numel() for flat, *_ in flat_groups(engine.optimizer))
    gathers: dict[Dimension, StepTraffic] = (
        {"zero": StepTraffic(groups, "gather")} if groups else {}
    )
    if stage:
        reduced = buckets(reversed(numels), int(engine.zero_reduce_bucket_size()))
        return {**gathers, "dp": StepTraffic(reduced, "own")}
    return {**gathers, "dp": StepTraffic(groups or buckets(numels, STAGE0_BUCKET), "sum")}


def _stage(engine: Any) -> int:
    """Return the ZeRO stage; 0 with BF16_Optimizer, which sums as stage 0 does."""
    is_bf16 = hasattr(engine.optimizer, "bf16_groups_flat")
    return 0 if is_bf16 else int(engine.zero_optimization_stage())


def dtypes(engine: Any) -> dict[torch.dtype, list[Dimension]]:
    """Return the dtypes of most messages of ``dp`` and ``zero``, each with its dimensions.

    Gradients may be summed in another dtype than that of the parameters.
    """
    from deepspeed.runtime.torch_autocast import get_comm_dtype

    optimizer, every = engine.optimizer, list(engine.module.parameters())
    stage = _stage(engine)
    of_each = getattr(optimizer, "get_param_comm_dtype", None) if stage else None

    def summed(parameter: Any) -> Any:
        if stage in (1, 2) and getattr(optimizer, "sequence_parallel_size", 1) > 1:
            return torch.float32
        return engine.communication_data_type if of_each is None else of_each(parameter)

    def gathered(parameter: Any) -> Any:
        return get_comm_dtype(parameter) if stage == 3 else parameter.dtype

    trained = [p for p in every if p.requires_grad] or every
    found: dict[torch.dtype, list[Dimension]] = {}
    ways: tuple[tuple[Dimension, Callable[[Any], Any]], ...] = (("dp", summed), ("zero", gathered))
    for name, of in ways:
        dtype = main_dtype((of(p), int(getattr(p, "ds_numel", p.numel()))) for p in trained)
        found.setdefault(dtype, []).append(name)
    return found


def note_tied(engine: Any, session: EngineSession) -> None:
    """Record the sums of tied weights between pipeline stages, to count their memory.

    These sums and the data-parallel ones have separate residuals (``tied_weights``).
    """
    channels = session.channels
    if not getattr(engine.module, "tied_comms", None):
        return
    for weight, group in engine.module.get_tied_weights_and_groups():
        dtype = getattr(engine.optimizer, "grad_acc_dtype", None) or weight.dtype
        sent: dict[Dimension, StepTraffic] = {"dp": StepTraffic((weight.numel(),), "sum")}
        groups: dict[Dimension, Group] = {"dp": channels["dp"].group(group)}
        note(channels, sent, groups, dtype, session.device, beside=True)


def buckets(numels: Iterable[int], most: int) -> tuple[int, ...]:
    """Fill buckets with ``numels`` in order, each of at most ``most`` elements or one parameter."""
    found: list[int] = []
    for numel in numels:
        if found and found[-1] + numel <= most:
            found[-1] += numel
        else:
            found.append(numel)
    return tuple(found)
