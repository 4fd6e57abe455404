"""Swap exact weights into the module while a checkpoint is saved, then the decoded ones back.

Training computes with decoded weights, but checkpoints hold exact ones: the module's weights are
gathered natively before saving, and decoded again afterwards. Encoding the masters again gives the
same bytes as the last gather. With ``delta`` the decoded weights depend on all earlier steps: they
are gathered from the shares that the ranks keep (``channels/messages/delta_references.py``), and
each rank saves its share beside the checkpoint, so that a resumed run continues bit for bit. Stage
3 saves partitions, which only ``offload`` encodes, when copying to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channels
from hybridcomp.channels.checkpoint.checkpoint_note import PARAMETERS
from hybridcomp.channels.messages import delta_references
from hybridcomp.job import saved, small_messages
from hybridcomp.log import say
from hybridcomp.patches.ds.offload import offload_sums
from hybridcomp.patches.ds.pipeline import tied_weights
from hybridcomp.patches.ds.zero import frozen, secondary

WHAT = "parameter references beside the checkpoint"
TODO = (
    "Restore the file, or delete every hybridcomp_parameters_rank_*.pt of this checkpoint: the "
    "first gather is exact then"
)
#: attributes of the optimizers: the flat groups, and their partitions by rank
GROUPS = (
    ("bit16_groups_flat", "parallel_partitioned_bit16_groups"),
    ("bf16_groups_flat", "bf16_partitioned_groups"),
)


@contextmanager
def exact_parameters(
    engine: Any, channels: Channels | None, *, waits: bool = False
) -> Iterator[None]:
    """Gather exact weights into the module; restore training's decoded weights afterwards.

    ``waits``: whether the ranks wait for each other in the body. If it fails on one rank, the
    others are still in it, so a gather would never end: exact weights stay until the next step.
    """
    if channels is None or not _encodes_weights(engine, channels):
        yield
        return
    offload_sums.refresh(engine.optimizer, channels, exact=("zero", "offload"))
    try:
        yield
    except BaseException:
        if waits:
            forget(engine)
        else:
            _restore(engine, channels)
        raise
    _restore(engine, channels)


def _restore(engine: Any, channels: Channels) -> None:
    decode_parameters(engine, channels)
    if channels["zero"].delta:
        _spread(engine, channels)
    tied_weights.equalize(engine, channels)


def decode_parameters(engine: Any, channels: Channels) -> None:
    """Repeat the last step's encoded copies and gathers, starting from the master weights.

    With ``delta`` it repeats only the copies to the device, since gathered values depend on earlier
    steps.
    """
    deltas = channels["zero"].delta
    if not _encodes_weights(engine, channels) or (
        deltas and not offload_sums.sends_to_device(engine.optimizer, channels)
    ):
        return
    channels.step, step = channels.step - 1, channels.step
    offload_sums.refresh(engine.optimizer, channels, exact=("zero",) if deltas else ())
    channels.step = step


def resume(folder: Path, engine: Any, channels: Channels) -> None:
    """Give the module the decoded weights of the run that saved the checkpoint in ``folder``."""
    decode_parameters(engine, channels)
    if channels["zero"].delta and _saves(engine, channels):
        _load(folder, engine, channels)
    tied_weights.equalize(engine, channels)


def check(folder: Path, channels: Channels) -> None:
    """Raise CheckpointError on every rank if a rank's references in ``folder`` are damaged.

    A collective; changes nothing.
    """
    if channels["zero"].delta:
        _, problem = saved.attempt(lambda: _stored(folder))
        saved.all_well(problem, WHAT, TODO)


def forget(engine: Any) -> Callable[[], None]:
    """Drop the references of deltas, which a load invalidates: the next gather is exact, sends
    secondary copies whole, and gathers frozen weights anew.

    Returns an undo, for the case that nothing is loaded.
    """
    flats = [flat for flat, _, _ in flat_groups(engine.optimizer)]
    kept = [(flat, delta_references.reference_of(flat)) for flat in flats]
    for flat in flats:
        delta_references.forget(flat)
    keep_steps = secondary.forget(engine)
    weights = frozen.weights_of(engine.module.parameters())
    if weights is not None:
        weights.forget()

    def put_back() -> None:
        keep_steps()
        for flat, reference in kept:
            if reference is not None:
                setattr(flat, delta_references.ATTRIBUTE, reference)

    return put_back


def save(folder: Path, engine: Any, channels: Channels) -> bool:
    """Write this rank's shares of delta references; return whether there are any."""
    if not channels["zero"].delta or not _saves(engine, channels):
        return False
    found = [delta_references.reference_of(flat) for flat, _, _ in flat_groups(engine.optimizer)]
    shares = [None if reference is None else reference.own for reference in found]
    state = {
        "format": saved.FORMAT, "rank": dist.get_rank(), "world_size": dist.get_world_size(),
        "step": channels.step, "shares": shares,
    }  # fmt: skip
    _, problem = saved.attempt(lambda: saved.write(_path(folder), state))
    saved.all_well(problem, WHAT)
    return True


def flat_groups(optimizer: Any) -> Iterator[tuple[Tensor, list[Tensor], Any]]:
    """Yield the flat groups that are gathered after a step: buffer, partitions by rank, group."""
    for flats, partitions in GROUPS:
        if hasattr(optimizer, flats):
            yield from zip(
                getattr(optimizer, flats),
                getattr(optimizer, partitions),
                optimizer.real_dp_process_group,
                strict=True,
            )


def _load(folder: Path, engine: Any, channels: Channels) -> None:
    """Load the saved shares, or print that the first gather is exact; the same on all ranks."""
    groups = list(flat_groups(engine.optimizer))
    shares, problem = saved.attempt(lambda: _stored(folder, channels.step))
    saved.all_well(problem, WHAT, TODO)
    fits = (
        shares is not None
        and len(shares) == len(groups)
        and all(
            share is None or (share.dtype == flat.dtype and share.shape == partitions[0].shape)
            for share, (flat, partitions, _) in zip(shares, groups, strict=True)
        )
    )
    verdict = torch.tensor([fits], dtype=torch.int32, device=engine.device)
    if not small_messages.least(verdict).item():
        # if no rank's file exists, a message about missing files was already printed
        if any(folder.glob(f"{PARAMETERS}_*")):
            say(
                f"{folder} holds no parameter references of {dist.get_world_size()} ranks at step "
                f"{channels.step}; the first gather is exact"
            )
        return
    assert shares is not None
    for share, (flat, _, _) in zip(shares, groups, strict=True):
        if share is not None:
            own = share.to(flat.device)
            setattr(
                flat,
                delta_references.ATTRIBUTE,
                delta_references.Reference(own, channels.generation),
            )
    _spread(engine, channels)


def _stored(folder: Path, step: int | None = None) -> list[Tensor | None] | None:
    """Return this rank's shares; None if saved by another number of ranks or at another step."""
    path = _path(folder)
    if not path.is_file():
        return None
    stored = saved.read(path)
    saved.expect(path, stored, "world_size", saved.is_count)
    saved.expect(path, stored, "shares", _are_shares)
    older = {"step": 0, "rank": dist.get_rank()}  # older files lack these
    saved.expect(path, {**older, **stored}, "step", saved.is_count)
    saved.expect(path, {**older, **stored}, "rank", lambda rank: rank == dist.get_rank())
    if stored["world_size"] != dist.get_world_size() or stored.get("step", step) != step:
        return None
    shares: list[Tensor | None] = stored["shares"]
    return shares


def _are_shares(value: Any) -> bool:
    return isinstance(value, list) and all(s is None or isinstance(s, Tensor) for s in value)


@torch.no_grad()
def _spread(engine: Any, channels: Channels) -> None:
    """Gather the references into the flat groups from the ranks' shares."""
    from deepspeed.runtime import utils

    for flat, partitions, group in flat_groups(engine.optimizer):
        reference = delta_references.reference_of(flat)
        if reference is not None:
            partitions[dist.get_rank(group)].data.copy_(reference.own)
            with channels["zero"].suspended():
                utils.all_gather_into_tensor_dp_groups([flat], [partitions], [group])


def _path(folder: Path) -> Path:
    return folder / f"{PARAMETERS}_rank_{dist.get_rank():05d}.pt"


def _saves(engine: Any, channels: Channels) -> bool:
    """Return whether gathered weights differ from the exact ones, so that deltas need
    references.
    """
    return channels.lossy("zero") and _encodes_weights(engine, channels)


def _encodes_weights(engine: Any, channels: Channels) -> bool:
    """Return whether the module's weights come from a lossy gather (not stage 3) or copy."""
    codec = channels.policy.codecs.get(("zero", "forward"))
    lossy = codec is not None and not codec.lossless
    gathers = hasattr(engine.optimizer, "update_lp_params") and lossy
    copies = offload_sums.sends_to_device(engine.optimizer, channels)
    return (gathers or copies) and channels.step > 0
