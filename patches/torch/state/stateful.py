"""Save and load an attached model's residuals, step, guard, verdicts and low-rank factors.

In ``torch.distributed.checkpoint`` every rank writes one entry, ``rank_00003``, a pickled
``bytes``: residuals differ on every rank, and tensors of their sizes would have to be allocated
before a checkpoint could be read. With the same number of ranks every rank loads its entry, bit for
bit. With another number, or if ranks encode other ranges, new rank r reads the entries of those old
ranks whose number is r modulo the new number of ranks, and sends each value to a rank that encodes
it (``channels/checkpoint/resharing.py``). So the sum of residuals over the ranks is kept, which is
what gradients still lack. ``Stateful.state_dict`` does not know the entries of a checkpoint, so
another number of ranks needs the folder: ``hybridcomp.stateful(model, checkpoint=folder)``.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hybridcomp.channels import Channels
from hybridcomp.channels.checkpoint import kept_state, resharing, saved_state
from hybridcomp.channels.checkpoint.resharing import share
from hybridcomp.channels.residuals.saved_residuals import held_in
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import CheckpointError, ConfigError
from hybridcomp.job import saved
from hybridcomp.job.agreement import tell
from hybridcomp.job.together import together
from hybridcomp.log import say_once as say
from hybridcomp.patches.torch.loss_scale import LossScale
from hybridcomp.patches.torch.state.identity import with_plain_names
from hybridcomp.session.engine_session import EngineSession
from hybridcomp.session.followers import StatefulFollower

CALL = "hybridcomp.stateful"
WHAT = "loading the state of hybridcomp"
#: advice on restoring state that a checkpoint lacks
BRING = (
    "To bring it: hybridcomp.save_state(folder) where the job saves and "
    "hybridcomp.load_state(folder) where it loads, or hybridcomp.stateful(model) in what "
    "torch.distributed.checkpoint saves"
)
DROPPED = (
    "WARNING: the checkpoint holds what error feedback has left out so far, and this job's block "
    "has no error feedback under dp: it is dropped; to take it over, resume with error_feedback"
)
#: keys of a state about the loss scale, which states of earlier versions lack
_SCALE = ("loss_scale", "scaled")
#: prefix of the names of residuals of sums between replicas
BETWEEN = "between replicas: "


class WithState(Protocol):
    """The part of an attached model's interface (``attached.Attached``) that its state needs."""

    identity: str  # digest of the model's parameters (``identity``)
    layout: dict[str, Any]  # the split of residuals over the ranks
    channels: Channels
    divisors: Callable[[], Mapping[str, float]]  # returns the units of residuals, by name
    #: returns this rank's encoded ranges, by name of the residual
    sends: Callable[[], Mapping[str, resharing.Sends]]
    session: EngineSession
    loss_scale: LossScale  # residuals are in units of the scaled loss

    @property
    def kind(self) -> str:
        """Return the engine of torch, "ddp" or "fsdp2"."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load entries of a checkpoint."""


@dataclass(frozen=True)
class SavedState:
    """State of an attached model in a pickle; ``WithState.load_state_dict`` takes it."""

    state: dict[str, Any]


def entry(rank: int) -> str:
    """Return the key of a rank's state."""
    return f"rank_{rank:05d}"


def state_of(attached: WithState) -> dict[str, bytes]:
    """Return this rank's state, ``{"rank_00003": bytes}``, readable with ``weights_only``."""
    file = io.BytesIO()
    torch.save(state_dict_of(attached), file)
    return {entry(dist.get_rank()): file.getvalue()}


def state_dict_of(attached: WithState, loss_scale: float | None = None) -> dict[str, Any]:
    """Return this rank's state, of plain types and CPU tensors.

    ``loss_scale``: the factor on the gradients; None: that of the model's GradScaler.
    """
    channels, scale = attached.channels, attached.loss_scale
    return saved_state.state_of(
        channels,
        rank=dist.get_rank(),
        kind=attached.kind,
        model=attached.identity,
        layout={**attached.layout, "nodes": channels.layout},
        divisors=dict(attached.divisors()),
        loss_scale=scale.value if loss_scale is None else loss_scale,
        scaled=scale.is_known and loss_scale is None,
        followers={one.name: one.state() for one in attached.session.followers.stateful},
    )


def load(attached: WithState, entries: Mapping[str, Any], loss_scale: float | None = None) -> None:
    """Load the entries of a checkpoint: this rank's own, or its part of all old ranks' entries.

    ``loss_scale``: the factor on the gradients from now on; None: see ``LossScale.load``.

    Every rank calls it. Raises on every rank, with nothing changed: ConfigError if the entries
    are of another number of ranks and some are missing, CheckpointError if an entry is damaged.
    """
    with or_nothing([attached]):
        states = {
            name: checked(name, saved.unpack(found, name), attached, name)
            for name, found in entries.items()
        }
        taken = take_over(attached, states, loss_scale)
    resume_followers(attached, taken)


@contextmanager
def or_nothing(every: Iterable[WithState]) -> Iterator[None]:
    """Make the body load into all of these models on all ranks, or change no model."""
    undo = ExitStack()
    with together(WHAT, undo.close, error=CheckpointError):
        for one in every:
            undo.callback(kept_state.put_back(one.channels, one.loss_scale))
        yield


def checked(
    name: Path | str, state: dict[str, Any], attached: WithState, key: str
) -> dict[str, Any]:
    """Check a rank's ``state``, read from ``name``, and return it. Raises CheckpointError.

    ``key``: the expected ``entry``; states of earlier versions do not name their rank.
    """
    saved_state.check(name, state)
    if "rank" in state:
        saved.expect(name, state, "rank", lambda rank: saved.is_count(rank) and entry(rank) == key)
    saved.expect(name, state, "kind", lambda value: isinstance(value, str))
    if "loss_scale" in state:  # states of earlier versions lack it
        saved.expect(name, state, "loss_scale", saved.is_scale)
    for part in ("layout", "divisors"):
        saved.expect(name, state, part, lambda value: isinstance(value, dict))
    for named, _ in held_in(state["residuals"]):
        if not saved.is_scale(state["divisors"].get(named)):
            raise saved.damaged(name, f"it does not say what residuals of {named!r} are units of")
    for follower, kept in _followed(attached, [state]):
        for one in kept:
            follower.check(one)
    return with_plain_names(state)


def take_over(
    attached: WithState, entries: Mapping[str, dict[str, Any]], loss_scale: float | None = None
) -> Sequence[Mapping[str, Any]]:
    """Load entries that have been read and checked; return those for ``resume_followers``."""
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
        lost = ["steps count from zero", *saved_state.anew(channels)]
        say(f"the checkpoint holds no state of hybridcomp: {', '.join(lost)}. {BRING}")
        attached.session.loaded = True
        channels.continue_from(0)
        channels.residuals.clear()
        return []
    _check(attached, stated)
    # further entries handed to this rank belong to other ranks
    states = [entries[entry(old)] for old in (share(of["world_size"]) if of else ())]
    first = next(rank["of"] for rank in stated if rank["of"] is not None)
    feedback = saved_state.has_feedback(channels)
    # in the form in which ``tell`` stores it
    here = json.loads(json.dumps({**attached.layout, "nodes": channels.layout}))
    same = (first["world_size"], first["layout"]) == (dist.get_world_size(), here)
    part = resharing.ReadResiduals()
    plan = None
    if feedback and same:
        _check_ends(attached, states[0])
    elif feedback:
        for state in states:
            _read_into(part, state, attached.divisors())
        plan = resharing.plan(part, attached.sends(), channels.nodes_of_sums, padding=0)
    told = saved_state.of_rank_0(
        channels, states[0] if states else None, entry(0),
        "step", "world_size", "layout", "factors", *_SCALE,
    )  # fmt: skip
    channels.continue_from(int(told["step"]))
    for text in saved_state.take_job_parts(channels, told):
        say(text)
    if not feedback and states and any(held_in(states[0]["residuals"])):
        attached.session.say(DROPPED)
    if feedback and same:
        saved_state.take_rank_parts(channels, states[0])
    elif plan is not None:
        say(
            f"residuals of {told['world_size']} ranks, {told['layout']}, are taken over by "
            f"{dist.get_world_size()}, {here}: their sum is kept"
        )
        factors = told["factors"] if attached.kind == "ddp" else {}
        saved_state.take_moved(channels, part, plan, factors, attached.session.device)
        divisors = attached.divisors()
        channels.residuals.in_units(lambda name: divisors[name])
    attached.loss_scale.load(told["loss_scale"], bool(told["scaled"]), loss_scale)
    attached.session.loaded = True
    return states


def resume_followers(attached: WithState, states: Sequence[Mapping[str, Any]]) -> None:
    """Load the followers' states, which have been checked."""
    for follower, kept in _followed(attached, states):
        follower.resume(kept)


def _followed(
    attached: WithState, states: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[StatefulFollower, list[Mapping[str, Any]]]]:
    """Yield each follower that has a state, with its saved states from ``states``."""
    for follower in attached.session.followers.stateful:
        kept = (state.get("followers", {}).get(follower.name) for state in states)
        yield follower, [one for one in kept if one is not None]


def _of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are equal in all states of one checkpoint."""
    return {key: state[key] for key in ("kind", "world_size", "layout", "step")}


def _check(attached: WithState, stated: Sequence[Mapping[str, Any]]) -> None:
    """Compare the states that the ranks have read; raises ConfigError on all of them alike."""
    known = {rank: found["of"] for rank, found in enumerate(stated) if found["of"] is not None}
    told = known[min(known)]
    if told["kind"] != attached.kind:
        todo = f"this model is under {attached.kind}; residuals do not fit: leave them out"
        raise ConfigError(CALL, told["kind"], todo)
    first = stated[min(known)]  # from one rank only: pipeline stages are different models
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


def _check_ends(attached: WithState, state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a residual extends past the ranges that this rank encodes."""
    sends = attached.sends()
    for name, (offset, values) in held_in(state["residuals"]):
        end = max((high for _, high in sends[name].ranges), default=0) if name in sends else None
        if end is not None and offset + values.numel() > end:
            what = f"{name!r} has residuals up to value {offset + values.numel()} of {end}"
            raise saved.damaged(entry(dist.get_rank()), what)


def _read_into(
    part: resharing.ReadResiduals, state: Mapping[str, Any], divisors: Mapping[str, float]
) -> None:
    """Add a rank's residuals to ``part`` in units of gradients, by the divisors of their sums.

    Residuals of owners and senders are added up, as owners may be other ranks now. Residuals of
    sums between replicas become residuals of sums to shards, or vice versa, if this job has only
    the other kind. ``divisors`` has the names of this job's residuals.
    """
    for name, (offset, values) in held_in(state["residuals"]):
        short = name.removeprefix(BETWEEN)
        taker = next((n for n in (name, short, BETWEEN + short) if n in divisors), name)
        part.add(taker, (offset, values), 1.0 / state["divisors"][name])
