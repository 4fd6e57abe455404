"""Implement ``hybridcomp.publish``: find the engine's adapter and the destination."""

from __future__ import annotations

from typing import Any

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.patches.common.engine_packages import is_megatron, packages_of
from hybridcomp.patches.common.publishing_steps import destination_of, in_form
from hybridcomp.patches.torch.attach import ATTRIBUTE, unwrapped
from hybridcomp.publishing import EngineWeights, Publisher
from hybridcomp.publishing.socket_stream import MOST_STILL_S
from hybridcomp.publishing.streams import Stream
from hybridcomp.session import process
from hybridcomp.session.engine_session import EngineSession, session_of


def publish(
    engine: Any,
    to: Any,
    names: str,
    still_s: float,
    as_: str | None,
    lora: str | None,
    **options: Any,
) -> Publisher:
    """Implement ``hybridcomp.publish``, whose docstring describes the ``options``.

    If only this rank refuses weights or a destination, all ranks raise its error.
    """
    if not 0 < still_s <= MOST_STILL_S:
        todo = f"expected seconds, above 0 and at most {MOST_STILL_S:g}"
        raise ConfigError("publish.still_s", still_s, todo)
    engine = unwrapped(engine)
    weights = in_form(weights_of(engine), lora, names, as_, options["dtype"])
    try:
        destination = destination_of(to, weights, _session_of(engine), still_s)
    except ConfigError as error:
        weights = EngineWeights({}, {}, [], weights.ranks, refused=error)
        destination = Stream(None, weights.ranks)
        options["keep"] = None  # only folders take this option
    return Publisher(weights, destination, **options)


def _session_of(engine: Any) -> EngineSession | None:
    """Return the session of an attached engine, else the process's if it has begun."""
    attached = getattr(engine, ATTRIBUTE, None)
    if attached is not None:
        found: EngineSession = attached.session
        return found
    own = process.own_session() if process.has_begun() else None
    return session_of(engine) or own


def weights_of(engine: Any) -> EngineWeights:
    """Return this rank's part of an engine's weights. Raises ConfigError."""
    if "deepspeed" in packages_of(engine):
        from hybridcomp.patches.ds import weights as of_deepspeed

        return of_deepspeed.weights_of(engine)
    if is_megatron(engine):
        from hybridcomp.patches.mcore import weights as of_megatron

        if of_megatron.is_engine(engine):
            return of_megatron.weights_of(engine)
    from hybridcomp.patches.torch import weights as of_torch

    if of_torch.is_engine(engine):
        return of_torch.weights_of(engine)
    todo = (
        "expected an engine of DeepSpeed, the DistributedDataParallel of torch or megatron-core (a "
        "list of them with virtual pipeline stages), or the root of fully_shard"
    )
    raise ConfigError("publish.engine", Shown(type(engine).__name__), todo)
