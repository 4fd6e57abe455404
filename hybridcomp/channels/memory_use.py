"""Compute the memory of an engine's channels on this rank from the messages of its seams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from hybridcomp.autotune.trials import StepTraffic
from hybridcomp.channels.accounting.memory import (
    MemoryItem,
    frozen,
    meetings,
    published,
    taken,
)
from hybridcomp.channels.accounting.rank_messages import RankMessages, residual_nbytes
from hybridcomp.channels.engine_state import EngineState
from hybridcomp.collectives import Group
from hybridcomp.dimensions import Dimension


def note(
    state: EngineState,
    sent: Mapping[Dimension, StepTraffic],
    groups: Mapping[Dimension, Group],
    dtype: torch.dtype,
    device: torch.device,
    *,
    beside: bool = False,
) -> None:
    """Record in ``state.messages`` the messages that a step sends.

    Args:
        state: whose ``messages`` are changed.
        sent: messages of ``dtype`` by dimension.
        groups: group of each dimension, with its nodes.
        device: where the messages are encoded.
        beside: whether to add them to the messages already known for their dimensions.
    """
    for name, traffic in sent.items():
        group, on_gpu = groups[name], device.type == "cuda"
        made = RankMessages(
            traffic.numels, traffic.how, dtype, group.size, group.width, on_gpu, traffic.copied,
            staged=on_gpu and group.backends.get("cuda") == "gloo",
        )  # fmt: skip
        known = state.messages.get(name, ()) if beside else ()
        state.messages[name] = (*known, made)


def note_tables(state: EngineState, numels: tuple[int, ...]) -> None:
    """Record in ``state.messages`` that sums are sent as tables of ``numels`` with padding.

    Only lossy codecs, or codecs that send residuals, use tables; low-rank ones use matrices.
    """
    codec, sent = state.policy.codecs.get(("dp", "forward")), state.messages.get("dp")
    if sent is None or codec is None or codec.low_rank is not None:
        return
    if state.config.error_feedback("dp") or not codec.lossless:
        state.messages["dp"] = (replace(sent[0], numels=numels, tabled=True),)


def feedback_nbytes(state: EngineState) -> int:
    """Return the bytes that all residuals of ``state`` would take; 0: unknown."""
    bits, codec = state.residuals.bits, state.policy.codecs.get(("dp", "forward"))
    if codec is None:
        return 0
    return sum(sum(residual_nbytes(one, codec, bits)) for one in state.messages.get("dp", ()))


def memory_of(state: EngineState) -> list[MemoryItem]:
    """Return the memory that channels, frozen weights, islands and publishing take on this rank.

    A dimension that was measured to be faster native takes nothing.
    """
    encoded = {
        name: message
        for name, message in state.messages.items()
        if not state.verdicts.native(name, state.step)
    }
    found = taken(state.config, encoded) + frozen(state.config, state.frozen_numels)
    if state.share:
        found += meetings(state.config, state.share, _islands(state))
        found += published(state.config, state.share)
    return found


def _islands(state: EngineState) -> int:
    """Return the number of islands; an estimate if more jobs may join."""
    sync = state.config.sync
    if sync.jobs is not None:
        return sync.jobs.at_start
    width = sync.islands if isinstance(sync.islands, int) else state.replicas
    return max(1, dist.get_world_size() // width)
