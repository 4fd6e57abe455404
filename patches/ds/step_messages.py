"""Predict the messages of a DeepSpeed engine's step, and detect the start of steps, for ``auto``.

Buckets are filled as in upstream: a parameter that does not fit starts the next one. They hold the
trained parameters in module order, nearly the order of the passes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
    stage = engine.zero_optimization_stage()
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
