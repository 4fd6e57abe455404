"""Save and load a session's state beside an engine's checkpoint: a file of the job, one per rank.

``hybridcomp_state.json`` has the step, the loss scale and the groups of the job. Each rank's file
holds its residuals and the decisions of guard and ``auto``, and exists only if there are any.
Neither is part of upstream's files: DeepSpeed's client_state is written by one rank only, and
residuals differ on every rank. When the number of ranks or their nodes have changed, the sum of the
residuals is kept (``resharing``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.channels.checkpoint import checkpoint_note, resharing, saved_state
from hybridcomp.channels.engine_channels import Channels
from hybridcomp.channels.residuals.saved_residuals import held_in
from hybridcomp.errors import CheckpointError
from hybridcomp.job import saved, small_messages
from hybridcomp.job.agreement import tell
from hybridcomp.log import say

#: the file of the job
STATE = "hybridcomp_state.json"
FILES = f"{checkpoint_note.RESIDUALS}_rank_*.pt"
WHAT = "the state of hybridcomp beside the checkpoint"
TODO = (
    f"Restore the file, or delete every {FILES} of this checkpoint to resume with residuals at "
    "zero; weights and optimizer are not in them"
)


@dataclass(frozen=True)
class State:
    """State of the job, equal on all ranks."""

    step: int  # optimizer steps taken
    loss_scale: float  # factor on the gradients and therefore on the residuals
    # number of ranks in each group, by dimension
    groups: dict[str, int] = field(default_factory=dict)
    # parameters that no longer train, with the step at which each was frozen
    frozen: dict[str, Any] = field(default_factory=dict)
    format: int = saved.FORMAT


def _path(folder: Path, rank: int) -> Path:
    return folder / FILES.replace("*", f"{rank:05d}")


def save(
    folder: Path,
    channels: Channels,
    loss_scale: float,
    groups: Mapping[str, int],
    references: bool = False,
) -> None:
    """Write the state of the job and of every rank into ``folder``; a collective.

    ``groups``: sizes of the groups whose coordinates are part of the parameters' names;
    ``references``: whether every rank has also written its delta references there. Returns when all
    files are complete. Raises CheckpointError on every rank if any rank could not write.
    """
    state = State(channels.step, loss_scale, dict(groups), channels.frozen())
    _, problem = saved.attempt(lambda: _save(folder, channels, state, references))
    saved.all_well(problem, WHAT)


def _save(folder: Path, channels: Channels, state: State, references: bool) -> None:
    """Write this rank's file, and on rank 0 the job's file.

    If this rank has nothing to write, it deletes its file of an older save of the same name.
    """
    rank, has_any = dist.get_rank(), saved_state.has_any(channels)
    if has_any:
        own = {
            "rank": rank, "layout": channels.layout, "loss_scale": state.loss_scale,
            "encodes": _encodes(channels),
        }  # fmt: skip
        saved.write(_path(folder, rank), saved_state.state_of(channels, **own))
    else:
        saved.remove(_path(folder, rank))
    if rank == 0:
        saved.write_json(folder / STATE, asdict(state))
        kinds = [checkpoint_note.RESIDUALS] if has_any else []
        kinds += [checkpoint_note.PARAMETERS] if references else []
        kinds += [checkpoint_note.STATES] if channels.keeps_files else []
        world_size = dist.get_world_size()
        checkpoint_note.write(folder, channels.config, state.step, world_size, kinds)
        saved.sweep(folder, FILES, world_size)


def read_state(folder: Path) -> State | None:
    """Read the state of the job on rank 0 and broadcast it; None without a file. A collective.

    Codecs depend on the step, so only one rank reads it and no two can differ. Raises
    CheckpointError, on every rank, for a damaged file.
    """
    found, problem = None, None
    if dist.get_rank() == 0:
        found, problem = saved.attempt(lambda: state_in(folder))
    saved.all_well(problem, WHAT)
    stored = small_messages.from_first(found)
    if stored is None:
        return None
    frozen = dict(stored.get("frozen", {}))  # earlier versions lack it
    return State(stored["step"], float(stored["loss_scale"]), dict(stored["groups"]), frozen)


def state_in(folder: Path) -> dict[str, Any] | None:
    """Return the state of the job as it stands in its file; None without one.

    Raises CheckpointError for a damaged file.
    """
    path = folder / STATE
    if not path.is_file():
        return None
    stored = saved.read_json(path)
    saved.expect(path, stored, "step", saved.is_count)
    saved.expect(path, stored, "loss_scale", saved.is_scale)
    saved.expect(path, stored, "groups", lambda value: isinstance(value, dict))
    if "frozen" in stored:
        saved.expect(path, stored, "frozen", lambda value: isinstance(value, dict))
    return stored


@dataclass
class StoredState:
    """State that ``read`` has read and checked, ready for ``take_over``.

    Attributes:
        choices: decisions of guard, link and offload from rank 0's file; None: this run does not
            use them.
        own: contents of this rank's file, if every rank restores the file that has its number.
        count: number of ranks that saved; None where there are no residuals.
        lost: names of the state that this run restarts, since no rank's file exists.
        part, plan: residuals that this rank has read from old files, and the plan that assigns them
            to ranks.
        loss_scale: factor on the gradients, and so on the residuals, when they were saved.
    """

    folder: Path
    choices: dict[str, Any] | None = None
    own: dict[str, Any] | None = None
    count: int | None = None
    part: resharing.ReadResiduals | None = None
    plan: resharing.ResidualPlan | None = None
    loss_scale: float = 1.0
    factors: dict[str, Any] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)


def load(
    folder: Path, channels: Channels, loss_scale: float, device: torch.device | None = None
) -> None:
    """Restore what ``save`` wrote: ``read``, then ``take_over``."""
    found = read(folder, channels)
    say(*checkpoint_note.lacking(folder, found.lost, "Save it with hybridcomp"))
    take_over(found, channels, loss_scale, device)


def read(folder: Path, channels: Channels, step: int | None = None) -> StoredState:
    """Read and check the files of ``save``; changes nothing in ``channels``. A collective.

    ``step``: the job's step from ``read_state``, which the ranks' files must have; None: unknown.
    Raises CheckpointError on every rank if any rank's file is damaged, missing, from another rank
    or step, or holds residuals beyond the end of a parameter.
    """
    found = StoredState(folder)
    feedback = saved_state.has_feedback(channels)
    choices = any(part.anew and part.wanted(channels) for part in saved_state.OF_JOB)
    if not feedback:
        say(*checkpoint_note.dropped(folder, channels.config))
    if not feedback and not choices:
        return found
    own, problem = saved.attempt(lambda: _own(folder, channels))
    saved.all_well(problem, WHAT, TODO)
    count = _stored_ranks(folder, own, step)
    found.choices = saved_state.of_rank_0(channels, own, _path(folder, 0))
    if count is None:
        wrote_none = checkpoint_note.wrote_none(folder, checkpoint_note.RESIDUALS)
        found.lost = saved_state.anew(channels, wrote_none)
    if not feedback or count is None:
        return found
    found.count = count
    if _same_ranks(count, own, channels):
        assert own is not None
        found.own, found.loss_scale = own, own["loss_scale"]
        return found
    part, problem = saved.attempt(lambda: _read_part(folder, count, found))
    saved.all_well(problem, WHAT, TODO)
    found.part = part or resharing.ReadResiduals()
    sends = {name: resharing.Sends(((0, end),)) for name, end in channels.numels.items()} or None
    found.plan = resharing.plan(found.part, sends, channels.nodes_of_sums, padding=count)
    return found


def take_over(
    found: StoredState, channels: Channels, loss_scale: float, device: torch.device | None = None
) -> None:
    """Put the state that ``read`` returned into ``channels``; a collective.

    Without stored residuals they start at zero (``StoredState.lost``). ``loss_scale``: the factor
    on the gradients from now on; ``device``: where the default group reduces. Raises
    CheckpointError on every rank if this version cannot read the state of guard, link or offload.
    """
    if found.choices is None:
        return
    say(*saved_state.take_job_parts(channels, found.choices))
    if not saved_state.has_feedback(channels):
        return
    if found.count is None:
        return
    _restore_residuals(found, channels, device or torch.device("cpu"))
    channels.residuals.scale(loss_scale / found.loss_scale)
    if channels.verdicts.holds_nothing("dp", channels.step) and channels.residuals.nbytes:
        channels.residuals.clear()
        say("dp is native now (when: auto): what error feedback still held is dropped")


def _own(folder: Path, channels: Channels) -> dict[str, Any] | None:
    """Read and check this rank's file; return None if there is none."""
    path = _path(folder, dist.get_rank())
    if not path.is_file():
        return None
    own = _read(path, dist.get_rank())
    # with another number of ranks, other ranks may hold these parameters now
    if own["world_size"] == dist.get_world_size():
        for name, (offset, values) in held_in(own["residuals"]):
            end = offset + values.numel()
            numel = channels.numels.get(name, end)
            if end > numel + own["world_size"]:  # padding is encoded as well
                what = f"it has residuals up to value {end} of {name!r}, which has {numel}"
                raise saved.damaged(path, what)
    return own


def _stored_ranks(folder: Path, own: dict[str, Any] | None, step: int | None) -> int | None:
    """Return how many ranks saved at ``step``, equal on all ranks; None if there is no file.

    Raises CheckpointError where files are missing or do not belong together.
    """
    statement = None if own is None else _statement(own)
    said = [rank["file"] for rank in tell({"file": statement}, what=WHAT)]
    there = [rank for rank, file in enumerate(said) if file is not None]
    if not there:
        return None
    count, told = int(said[there[0]]["world_size"]), said[there[0]]["step"]
    if step is not None and told != step:  # the files are of an older save; the last one wrote none
        path, state = _path(folder, there[0]), f"{folder / STATE} (step {step})"
        text = f"{path} (step {told}) and {state} were not saved together"
        raise CheckpointError(f"{WHAT}: {text}. {TODO}")
    missing = [rank for rank in range(min(count, len(said))) if said[rank] is None]
    if missing:
        path = _path(folder, missing[0])
        raise CheckpointError(f"{WHAT}: {path} of {count} is missing. {TODO}")
    for rank in range(min(count, len(said))):  # files of higher ranks are left from an older save
        if said[rank] != said[there[0]]:
            text = _not_together(folder, (rank, there[0]), said[rank], said[there[0]])
            raise CheckpointError(f"{WHAT}: {text}. {TODO}")
    return count


def _statement(file: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that all ranks' files of one save have in common."""
    return {key: file.get(key) for key in ("world_size", "step")}


def _not_together(
    folder: Path, ranks: tuple[int, int], one: Mapping[str, Any], other: Mapping[str, Any]
) -> str:
    shown = [
        f"{_path(folder, rank)} ({', '.join(f'{key} {value}' for key, value in file.items())})"
        for rank, file in zip(ranks, (one, other), strict=True)
    ]
    return f"{' and '.join(shown)} were not saved together"


def _same_ranks(count: int, own: dict[str, Any] | None, channels: Channels) -> bool:
    """Return whether every rank encodes the parameters that it saved, so may load its file."""
    here = _encodes(channels)
    same = own is not None and count == dist.get_world_size()
    same = same and own is not None and own.get("layout") == channels.layout
    # the same number of ranks may hold other pipeline stages; older files do not list their
    # parameters
    same = same and own is not None and own.get("encodes", here) == here
    return all(rank["same"] for rank in tell({"same": same}, what=WHAT))


def _encodes(channels: Channels) -> str:
    """Return a digest of the parameters that this rank encodes."""
    return hashlib.sha256(repr(sorted(channels.numels.items())).encode()).hexdigest()[:16]


def _restore_residuals(found: StoredState, channels: Channels, device: torch.device) -> None:
    """Load residuals from this rank's own file, or this rank's part of the sum over all files."""
    if found.own is not None:
        saved_state.take_rank_parts(channels, found.own)
        return
    assert found.part is not None and found.plan is not None
    count, world_size = found.count, dist.get_world_size()
    nodes = " that had other parameters or nodes" if count == world_size else ""
    say(f"residuals of {count} ranks{nodes} are shared among {world_size}: their sum is kept")
    saved_state.take_moved(channels, found.part, found.plan, found.factors, device)


def _read_part(folder: Path, count: int, found: StoredState) -> resharing.ReadResiduals:
    """Read this rank's share of the files; put all low-rank right factors into ``found``."""
    part, first = resharing.ReadResiduals(), _read(_path(folder, 0), 0)
    for rank in resharing.share(count):
        stored = _read(_path(folder, rank), rank)
        one, other = _statement(stored), _statement(first)
        if one != other:  # the file is left from an older save, because a later one failed
            raise CheckpointError(_not_together(folder, (rank, 0), one, other))
        for name, stretch in held_in(stored["residuals"]):
            part.add(name, stretch)
    found.loss_scale = first["loss_scale"]
    for rank in range(count) if first["factors"] else ():
        found.factors |= _read(_path(folder, rank), rank)["factors"]
    return part


def _read(path: Path, rank: int) -> dict[str, Any]:
    """Read the file of ``rank``. Raises CheckpointError if it is damaged or of another rank."""
    stored = saved.read(path)
    saved_state.check(path, stored)
    saved.expect(path, stored, "loss_scale", saved.is_scale)
    if stored.get("rank") != rank:
        found = stored.get("rank")
        raise saved.damaged(path, f"expected the file of rank {rank}, found {found!r}'s")
    return stored
