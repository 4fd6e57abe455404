"""What a checkpoint keeps of an attached model: residuals, step, the guard, verdicts, factors.

In ``torch.distributed.checkpoint`` every rank writes one entry, ``rank_00003``, a pickled
``bytes``: residuals differ on every rank, and as tensors they would have to be there, in their
sizes, before a checkpoint could be read. On as many ranks every rank takes its own entry back, bit
for bit. On another number new rank r takes the entries of all old ranks that are r modulo the new
number: the sum over the ranks, which is what gradients still miss, stays what it was, and no rank
holds more than its share. ``Stateful.state_dict`` cannot know what a checkpoint holds, so for that
the folder is named: ``hybridcomp.stateful(model, checkpoint=folder)``.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hybridcomp import saved
from hybridcomp.channels import Channels
from hybridcomp.channels.error_feedback import HOPS
from hybridcomp.engines.session import say
from hybridcomp.errors import CheckpointError, ConfigError

FORMAT = 1
#: what names of residuals begin with where replicas sum what shards have summed
BETWEEN = "between replicas: "
#: the key of ``hybridcomp.save_state``'s files, one for each rank and model
FILE = "hybridcomp_model_{number:02d}_rank_{rank:05d}.pt"


class Attached(Protocol):
    """What of an attached model (``attached.Attached``) its state is made of."""

    @property
    def kind(self) -> str:
        """Which of torch's engines it is."""

    @property
    def layout(self) -> dict[str, Any]:
        """How residuals are spread over the ranks."""

    @property
    def channels(self) -> Channels:
        """Its channels."""

    @property
    def divisors(self) -> Callable[[], Mapping[str, float]]:
        """Gives the units of residuals, by name."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over entries of a checkpoint."""


@dataclass(frozen=True)
class SavedState:
    """What a pickle keeps of an attached model; ``Attached.load_state_dict`` takes it."""

    state: dict[str, Any]


def entry(rank: int) -> str:
    """The key under which a rank's state stands."""
    return f"rank_{rank:05d}"


def state_of(attached: Attached) -> dict[str, Any]:
    """``{"rank_00003": bytes}``: this rank's state."""
    return {entry(dist.get_rank()): pack(attached)}


def pack(attached: Attached) -> bytes:
    """This rank's state, as ``torch.save`` writes it and ``weights_only`` reads it."""
    file = io.BytesIO()
    torch.save(state_dict_of(attached), file)
    return file.getvalue()


def state_dict_of(attached: Attached) -> dict[str, Any]:
    """This rank's state, of plain types and CPU tensors."""
    channels = attached.channels
    return {
        "format": FORMAT,
        "kind": attached.kind,
        "world_size": dist.get_world_size(),
        "layout": {**attached.layout, "nodes": channels.layout},
        "step": channels.step,
        "divisors": dict(attached.divisors()),
        "residuals": channels.residuals.state_dict(),
        "guard": channels.guard.state(),
        "link": channels.verdicts.state(),
        "factors": channels.factors.state_dict(),
    }


def load(attached: Attached, entries: Mapping[str, Any]) -> None:
    """Take over the entries of a checkpoint: this rank's own, or those that ``share`` names.

    Raises ConfigError where they are of another number of ranks and some are missing.
    """
    _take_over(attached, {name: _unpack(found) for name, found in entries.items()})


def _take_over(attached: Attached, entries: Mapping[str, dict[str, Any]]) -> None:
    """As ``load``, of entries that have been read."""
    states = [found for _, found in sorted(entries.items())]
    first = states[0] if states else None
    told = _told(first)
    if told is None:
        say("the checkpoint holds no state of hybridcomp; step and residuals start at zero")
        attached.channels.step = 0
        attached.channels.residuals.drop()
        return
    _check(attached, told, entries)
    channels = attached.channels
    channels.step = int(told["step"])
    for text in channels.resume_guard(told["guard"]) if channels.guard.watching else ():
        say(text)
    for text in channels.resume_verdicts(told["link"]) if channels.config.measured() else ():
        say(text)
    if not any(channel.error_feedback for channel in channels):
        return
    here = {**attached.layout, "nodes": channels.layout}
    if told["world_size"] == dist.get_world_size() and told["layout"] == here:
        (own,) = states
        channels.residuals.load(own["residuals"])
        channels.factors.load(own["factors"])
        return
    say(
        f"residuals of {told['world_size']} ranks, {told['layout']}, are taken over by "
        f"{dist.get_world_size()}, {here}: their sum is kept"
    )
    channels.factors.load(told["factors"] if attached.kind == "ddp" else {})
    channels.residuals.load(_merged(states, attached.divisors()))


def share(old: int) -> range:
    """The ranks of a job of ``old`` ranks whose entries this rank takes over."""
    world_size = dist.get_world_size()
    if old == world_size:
        return range(dist.get_rank(), dist.get_rank() + 1)
    return range(dist.get_rank(), old, world_size)


def _unpack(packed: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
    return state


def _told(own: dict[str, Any] | None) -> dict[str, Any] | None:
    """What rank 0 has read, without its residuals: steps and verdicts change on all ranks alike."""
    box = [None if own is None else {key: own[key] for key in own if key != "residuals"}]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _check(attached: Attached, told: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
    if told["kind"] != attached.kind:
        todo = f"this model is under {attached.kind}; residuals do not fit: leave them out"
        raise ConfigError("hybridcomp.stateful", told["kind"], todo)
    wanted = {entry(rank) for rank in share(int(told["world_size"]))}
    if wanted - set(entries):
        todo = (
            f"the checkpoint is of {told['world_size']} ranks, this job has "
            f"{dist.get_world_size()}; load with hybridcomp.stateful(model, checkpoint=folder), "
            "which takes the residuals of all of them over"
        )
        raise ConfigError("hybridcomp.stateful", sorted(entries), todo)


def _merged(
    states: Sequence[Mapping[str, Any]], divisors: Mapping[str, float]
) -> dict[Any, dict[str, list[tuple[int, torch.Tensor]]]]:
    """The residuals of several ranks as those of one, in the units of this job.

    What owners had left out joins what senders had: owners are others now. Replicas and shards take
    over from each other. ``divisors`` has the names that this job knows; others are told.
    """
    unknown: dict[str, None] = {}
    merged: dict[Any, dict[str, list[tuple[int, torch.Tensor]]]] = {hop: {} for hop in HOPS}
    for state in states:
        for hop in HOPS:
            for name, stretches in state["residuals"][hop].items():
                short = name.removeprefix(BETWEEN)
                taker = next((n for n in (name, short, BETWEEN + short) if n in divisors), None)
                if taker is None:
                    unknown[name] = None
                    continue
                factor = divisors[taker] / state["divisors"][name]
                kept = merged["sender"].setdefault(taker, [])
                kept += [(offset, tensor * factor) for offset, tensor in stretches]
    if unknown:
        say(f"residuals that no parameter of this job takes start at zero: {', '.join(unknown)}")
    return merged


class AtCheckpoint:
    """The ``Stateful`` of a model for loading from ``folder``, whoever wrote it, on as many ranks
    as there were.
    """

    def __init__(self, attached: Attached, folder: str | Path, prefix: str = "hybridcomp") -> None:
        """``prefix``: the key under which the state stands in what is saved."""
        self._attached = attached
        self._keys = _keys_of(folder, prefix)

    def state_dict(self) -> dict[str, Any]:
        """The entries that this rank takes over; nothing where the checkpoint has none."""
        return {entry(rank): b"" for rank in share(len(self._keys))} if self._keys else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them over."""
        self._attached.load_state_dict(state)


def _keys_of(folder: str | Path, prefix: str) -> list[str]:
    """The ranks' keys in the checkpoint ``folder``."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    known = FileSystemReader(folder).read_metadata().state_dict_metadata
    start = f"{prefix}.rank_"
    return sorted(key for key in known if key.startswith(start))


def save_files(folder: Path, every: Iterable[Attached]) -> None:
    """Write one file for each rank and model into ``folder``; every rank calls it.

    Every file is written whole or not at all. Raises CheckpointError, on every rank, where one
    could not write its own.
    """
    problem = None
    for number, attached in enumerate(every):
        path = folder / FILE.format(number=number, rank=dist.get_rank())
        _, found = saved.attempt(functools.partial(saved.write, path, state_dict_of(attached)))
        problem = problem or found
    saved.all_well(problem, "saving the state of hybridcomp")  # nobody goes on before it is whole


def load_files(folder: Path, every: Iterable[Attached]) -> None:
    """Take over what ``save_files`` wrote; every rank calls it.

    Raises CheckpointError, on every rank, where a file is damaged or one of a rank is missing;
    nothing is taken over then.
    """
    models = list(every)
    found = [
        saved.attempt(functools.partial(_read, folder, number)) for number in range(len(models))
    ]
    problem = next((text for _, text in found if text is not None), None)
    saved.all_well(problem, "loading the state of hybridcomp")
    for attached, (states, _) in zip(models, found, strict=True):
        _take_over(attached, states or {})


def _read(folder: Path, number: int) -> dict[str, dict[str, Any]]:
    """The states that this rank takes over, by entry; raises CheckpointError."""
    pattern = FILE.format(number=number, rank=0).replace("rank_00000", "rank_*")
    paths = sorted(folder.glob(pattern))
    if not paths:
        return {}
    old = saved.read(paths[0])["world_size"]
    wanted = {rank: folder / FILE.format(number=number, rank=rank) for rank in share(old)}
    missing = [path.name for path in wanted.values() if not path.is_file()]
    if missing:
        raise CheckpointError(f"{folder}: expected files of {old} ranks, found no {missing[0]}")
    return {entry(rank): saved.read(path) for rank, path in wanted.items()}
