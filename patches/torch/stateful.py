"""What a checkpoint keeps of an attached model: residuals, step, the guard, verdicts, factors.

In ``torch.distributed.checkpoint`` every rank writes one entry, ``rank_00003``, a pickled
``bytes``: residuals differ on every rank, and as tensors they would have to be there, in their
sizes, before a checkpoint could be read. On as many ranks every rank takes its own entry back, bit
for bit. On another number, or where other ranks encode other stretches, new rank r reads the
entries of all old ranks that are r modulo the new number, and each value goes to a rank that
encodes it (``channels/resharing.py``): the sum over the ranks, which is what gradients still miss,
stays what it was. ``Stateful.state_dict`` cannot know what a checkpoint holds, so for that
the folder is named: ``hybridcomp.stateful(model, checkpoint=folder)``.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hybridcomp.channels import Channels, resharing
from hybridcomp.channels.error_feedback import held_in
from hybridcomp.channels.resharing import share
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.job import saved
from hybridcomp.job.agreement import tell
from hybridcomp.patches.torch.session import say
from hybridcomp.session.engine_session import EngineSession

FORMAT = 1
CALL = "hybridcomp.stateful"
WHAT = "loading the state of hybridcomp"
#: what names of residuals begin with where replicas sum what shards have summed
BETWEEN = "between replicas: "


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


#: what a rank's state holds
_SCHEMA: dict[str, Callable[[Any], bool]] = {
    "kind": lambda value: isinstance(value, str),
    "world_size": lambda value: saved.is_count(value) and value > 0,
    "layout": _is_dict, "step": saved.is_count, "divisors": _is_dict,
    "residuals": saved.are_residuals, "guard": _is_dict, "link": _is_dict,
    "factors": saved.are_factors,
}  # fmt: skip


class Attached(Protocol):
    """What of an attached model (``attached.Attached``) its state is made of."""

    @property
    def kind(self) -> str:
        """Which of torch's engines it is."""

    @property
    def identity(self) -> str:
        """Which model it is (``identity``)."""

    @property
    def layout(self) -> dict[str, Any]:
        """How residuals are spread over the ranks."""

    @property
    def channels(self) -> Channels:
        """Its channels."""

    @property
    def divisors(self) -> Callable[[], Mapping[str, float]]:
        """Gives the units of residuals, by name."""

    @property
    def sends(self) -> Callable[[], Mapping[str, resharing.Sends]]:
        """Gives what this rank encodes, by the name of its residuals."""

    @property
    def session(self) -> EngineSession:
        """Its session."""

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
        "model": attached.identity,
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
    """Take over the entries of a checkpoint: this rank's own, or those that it reads of others.

    Every rank calls it. Raises on every rank, with nothing changed: ConfigError where the entries
    are of another number of ranks and some are missing, CheckpointError where one is damaged.
    """
    states, problem = saved.attempt(
        lambda: {name: checked(name, saved.unpack(found, name)) for name, found in entries.items()}
    )
    saved.all_well(problem, WHAT)
    take_over(attached, states or {})


def checked(name: Path | str, state: dict[str, Any]) -> dict[str, Any]:
    """``state``, a rank's, as ``name`` holds it. Raises CheckpointError where it is none."""
    for key, right in _SCHEMA.items():
        saved.expect(name, state, key, right)
    for named, _ in held_in(state["residuals"]):
        if not saved.is_scale(state["divisors"].get(named)):
            raise saved.damaged(name, f"it does not say what residuals of {named!r} are units of")
    return state


def take_over(attached: Attached, entries: Mapping[str, dict[str, Any]]) -> None:
    """As ``load``, of entries that have been read and checked."""
    channels = attached.channels
    states = [found for _, found in sorted(entries.items())]
    of = _of(states[0]) if states else None
    whose = states[0].get("model") if states else None
    read = {
        "of": of, "entries": sorted(entries), "model": whose, "here": attached.identity,
        "alike": all(_of(state) == of for state in states),
    }  # fmt: skip
    stated = tell(read, what=WHAT)
    if all(rank["of"] is None for rank in stated):
        say("the checkpoint holds no state of hybridcomp; step and residuals start at zero")
        channels.step = 0
        channels.residuals.drop()
        return
    _check(attached, stated)
    # whatever else this rank was handed is another one's
    states = [entries[entry(old)] for old in (share(of["world_size"]) if of else ())]
    first = next(rank["of"] for rank in stated if rank["of"] is not None)
    feedback = any(channel.error_feedback for channel in channels)
    here = json.loads(json.dumps({**attached.layout, "nodes": channels.layout}))  # as ``tell`` does
    same = (first["world_size"], first["layout"]) == (dist.get_world_size(), here)
    part = resharing.ReadResiduals()
    plan = None
    if feedback and same:
        _, problem = saved.attempt(lambda: _check_ends(attached, states[0]))
        saved.all_well(problem, WHAT)
    elif feedback:
        for state in states:
            _read_into(part, state, attached.divisors())
        plan = resharing.plan(part, attached.sends(), channels.nodes_of_sums, padding=0)
    told = _told(states[0] if states else None)
    channels.step = int(told["step"])
    for text in channels.resume_guard(told["guard"]) if channels.guard.watching else ():
        say(text)
    for text in channels.resume_verdicts(told["link"]) if channels.config.measured() else ():
        say(text)
    if feedback and same:
        channels.residuals.load(states[0]["residuals"])
        channels.factors.load(states[0]["factors"])
    elif plan is not None:
        say(
            f"residuals of {told['world_size']} ranks, {told['layout']}, are taken over by "
            f"{dist.get_world_size()}, {here}: their sum is kept"
        )
        channels.factors.load(told["factors"] if attached.kind == "ddp" else {})
        channels.residuals.clear()
        plan.move(part, channels.residuals, attached.session.device)
        divisors = attached.divisors()
        channels.residuals.in_units(lambda name: divisors[name])


def _of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the states of one checkpoint have in common."""
    return {key: state[key] for key in ("kind", "world_size", "layout", "step")}


def _told(own: dict[str, Any] | None) -> dict[str, Any]:
    """What rank 0 has read, without its residuals: steps and verdicts change on all ranks alike."""
    box = [None if own is None else {key: own[key] for key in own if key != "residuals"}]
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None, "rank 0 reads an entry of every checkpoint that has any"
    return box[0]


def _check(attached: Attached, stated: Sequence[Mapping[str, Any]]) -> None:
    """Hold what the ranks have read against each other; raises ConfigError on all of them alike."""
    known = {rank: found["of"] for rank, found in enumerate(stated) if found["of"] is not None}
    told = known[min(known)]
    if told["kind"] != attached.kind:
        todo = f"this model is under {attached.kind}; residuals do not fit: leave them out"
        raise ConfigError(CALL, told["kind"], todo)
    first = stated[min(known)]  # one rank alone: stages of a pipeline are models of their own
    if first["model"] not in (None, first["here"]):
        todo = (
            f"this one is {first['here']}: names or shapes of parameters differ; load it into the "
            "model that saved it, or leave it out"
        )
        raise ConfigError(CALL, Shown(f"the state of {first['model']}"), todo)
    world_size, count = dist.get_world_size(), int(told["world_size"])
    for rank, found in enumerate(stated):
        wanted = {entry(old) for old in range(rank, count, world_size)}
        if wanted - set(found["entries"]):
            todo = (
                f"the checkpoint is of {count} ranks, this job has {world_size}, and rank {rank} "
                "lacks entries; load with hybridcomp.stateful(model, checkpoint=folder), which "
                "takes the residuals of all of them over"
            )
            raise ConfigError(CALL, found["entries"], todo)
    for rank, of in known.items():
        if of != told or not stated[rank]["alike"]:
            todo = f"ranks {min(known)} and {rank} have read states that were not saved together"
            raise ConfigError(CALL, f"{told} and {of}", f"{todo}; load one checkpoint")


def _check_ends(attached: Attached, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError where a residual ends behind what this rank encodes."""
    sends = attached.sends()
    for name, (offset, values) in held_in(state["residuals"]):
        end = max((high for _, high in sends[name].ranges), default=0) if name in sends else None
        if end is not None and offset + values.numel() > end:
            what = f"{name!r} has residuals up to value {offset + values.numel()} of {end}"
            raise saved.damaged(entry(dist.get_rank()), what)


def _read_into(
    part: resharing.ReadResiduals, state: Mapping[str, Any], divisors: Mapping[str, float]
) -> None:
    """Add a rank's residuals to ``part``, as gradients: divided by what their sum is divided by.

    What owners had left out joins what senders had: owners are others now. Replicas and shards take
    over from each other. ``divisors`` has the names that this job knows.
    """
    for name, (offset, values) in held_in(state["residuals"]):
        short = name.removeprefix(BETWEEN)
        taker = next((n for n in (name, short, BETWEEN + short) if n in divisors), name)
        part.add(taker, (offset, values), 1.0 / state["divisors"][name])


class AtCheckpoint:
    """The ``Stateful`` of a model for loading from ``folder``, whoever wrote it, on as many ranks
    as there were.
    """

    def __init__(self, attached: Attached, folder: str | Path, prefix: str = "hybridcomp") -> None:
        """Read which entries there are; every rank does, as what follows are collectives.

        ``prefix``: the key under which the state stands in what is saved. Raises CheckpointError
        on every rank where one cannot read the checkpoint's metadata.
        """
        self._attached = attached
        keys, problem = saved.attempt(lambda: _keys_of(folder, prefix))
        saved.all_well(problem, f"reading what the checkpoint {str(folder)!r} holds")
        self._keys = keys or []

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
