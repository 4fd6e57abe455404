"""Table of the parts of an engine's channels in a checkpoint: one row per part.

Each rank writes all parts: into a file beside the checkpoints of DeepSpeed, Megatron-core and
GPT-NeoX (``checkpoint``), or into an entry of ``torch.distributed.checkpoint`` for FSDP2 and DDP
(``patches/torch/state/stateful``). The same file or entry identifies the save (world size, step,
nodes) and gives the units of the residuals: the loss scale, or the divisors of sums.

| part | of | on another number of ranks |
|---|---|---|
| residuals | a rank | their sum over the ranks is kept (``resharing``) |
| factors | a rank, for the parameters whose residuals it has | they follow the residuals |
| guard, link, offload, frozen | the job | all take rank 0's |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from hybridcomp.autotune.verdicts import are_decisions
from hybridcomp.channels.accounting.guard import are_trips
from hybridcomp.channels.accounting.offload_tuner import is_pace
from hybridcomp.channels.checkpoint import resharing
from hybridcomp.channels.engine_channels import Channels
from hybridcomp.channels.residuals.saved_residuals import are_residuals
from hybridcomp.job import saved, small_messages


def has_feedback(channels: Channels) -> bool:
    """Return whether any dimension of this run has error feedback and so restores residuals."""
    return any(channel.error_feedback for channel in channels)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


@dataclass(frozen=True)
class SavedPart:
    """One part of the state of ``Channels``.

    Attributes:
        of: "rank": each rank has its own; "job": equal on all ranks.
        get: returns the part, of plain types and CPU tensors.
        put: restores a part that passed ``right``; returns messages for the user.
        right: returns whether a part that was read has the right form.
        wanted: whether this run's block restores it; only then must a part of the job pass
            ``right``.
        anew: name of this part in the message that it starts afresh, if a checkpoint lacks it.
        required: False if older checkpoints lack it.
    """

    name: str
    of: Literal["rank", "job"]
    get: Callable[[Channels], dict[str, Any]]
    put: Callable[[Channels, Any], Iterable[str] | None]
    right: Callable[[Any], bool]
    anew: str
    wanted: Callable[[Channels], bool]
    required: bool = True


PARTS = (
    SavedPart(
        "residuals", "rank",
        lambda channels: channels.residuals.state_dict(),
        lambda channels, state: channels.residuals.load(state),
        right=are_residuals,
        anew="residuals of error feedback start at zero",
        wanted=has_feedback,
    ),
    SavedPart(
        "guard", "job",
        lambda channels: channels.guard.state(),
        Channels.resume_guard,
        right=are_trips,
        anew="the guard forgets what it gave up",
        wanted=lambda channels: channels.guard.watching,
    ),
    SavedPart(
        "link", "job",
        lambda channels: channels.verdicts.state(),
        lambda channels, state: channels.tuner.resume(state),
        right=are_decisions,
        anew='"when": "auto" measures again',
        wanted=lambda channels: bool(channels.config.measured()),
    ),
    SavedPart(
        "offload", "job",
        lambda channels: channels.host.pace.state(),
        lambda channels, state: channels.host.pace.restore(state),
        right=is_pace,
        anew='offload\'s "when": "auto" measures again',
        wanted=lambda channels: channels.config.offload.when == "auto",
        required=False,  # states of FSDP2 and DDP of format 1 lack it
    ),
    SavedPart(
        "factors", "rank",
        lambda channels: channels.factors.state_dict(),
        lambda channels, state: channels.factors.load(state),
        right=saved.are_factors,
        anew="powersgd begins with new factors",
        wanted=lambda channels: bool(channels.policy.low_rank),
    ),
    SavedPart(
        "frozen", "job",
        lambda channels: channels.frozen(),
        Channels.will_freeze,
        right=_is_dict,
        anew="",  # without this part nothing was frozen
        wanted=lambda channels: True,
        required=False,
    ),
)  # fmt: skip
OF_JOB = tuple(part for part in PARTS if part.of == "job")
OF_RANK = tuple(part for part in PARTS if part.of == "rank")


def state_of(channels: Channels, **more: Any) -> dict[str, Any]:
    """Return this rank's state: its identification, the engine's ``more``, and all parts."""
    found = {"world_size": dist.get_world_size(), "step": channels.step}
    parts = {part.name: part.get(channels) for part in PARTS}
    return {"format": saved.FORMAT, **found, **more, **parts}


def check(path: Path | str, stored: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless ``stored``, read from ``path``, has the form of ``state_of``."""
    saved.expect(path, stored, "world_size", lambda value: saved.is_count(value) and value > 0)
    saved.expect(path, stored, "step", saved.is_count)
    for part in PARTS:
        if part.required or part.name in stored:
            saved.expect(path, stored, part.name, part.right if part.of == "rank" else _is_dict)


def has_any(channels: Channels) -> bool:
    """Return whether there is anything to save; equal on every rank."""
    return any(part.get(channels) for part in OF_JOB) or has_feedback(channels)


def anew(channels: Channels, wrote_none: bool = False) -> list[str]:
    """Return the state that restarts if a checkpoint lacks the ranks' files.

    ``wrote_none``: whether the save itself wrote none, so that its guard had given nothing up.
    """
    wanted = (part for part in PARTS if part.anew and part.wanted(channels))
    return [part.anew for part in wanted if not (wrote_none and part.name == "guard")]


def of_rank_0(
    channels: Channels, state: Mapping[str, Any] | None, path: Path | str, *more: str
) -> dict[str, Any]:
    """Broadcast from rank 0's ``state``, read from ``path``, the job's parts and the keys ``more``.

    All ranks must restore the same parts. Returns an empty dict if rank 0 has no state. Raises
    CheckpointError on all ranks, before anything has changed, if this version cannot read a part
    that this run wants.
    """
    parts = {part.name: (state or {}).get(part.name, {}) for part in OF_JOB}
    values = {key: state.get(key) for key in more} if state else {}
    told = small_messages.from_first({**parts, **values} if state else {})
    for part in OF_JOB:
        if told and part.wanted(channels):
            saved.expect(path, told, part.name, part.right)
    return told


def take_job_parts(channels: Channels, state: Mapping[str, Any]) -> list[str]:
    """Restore the job's parts from ``of_rank_0``'s result; return messages for the user."""
    said: list[str] = []
    for part in OF_JOB:
        if part.wanted(channels):
            said += part.put(channels, state.get(part.name, {})) or ()
    return said


def take_rank_parts(channels: Channels, state: Mapping[str, Any]) -> None:
    """Restore the parts that this rank itself saved, bit for bit."""
    for part in OF_RANK:
        part.put(channels, state[part.name])


def take_moved(
    channels: Channels,
    part: resharing.ReadResiduals,
    plan: resharing.ResidualPlan,
    factors: Mapping[str, torch.Tensor],
    device: torch.device,
) -> None:
    """Restore residuals of other ranks by ``plan``, so that their sum is kept; a collective.

    ``part``: residuals that this rank has read; ``factors``: low-rank right factors of all ranks.
    """
    channels.factors.load(dict(factors))
    channels.residuals.clear()
    plan.move(part, channels.residuals, device)
