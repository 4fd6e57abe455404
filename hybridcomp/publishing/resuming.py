"""Decide whether a job continues the chain of versions at its destination.

The weights decide, not the number in a checkpoint: each rank compares checksums of its pieces with
those of the newest version. If all are equal, the weights are that version, and the next version is
encoded against it. Otherwise the next version is a full one of the same chain, which receivers can
apply even if they have applied versions of steps that the job has lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from hybridcomp.errors import ConfigError
from hybridcomp.job import saved
from hybridcomp.job.agreement import tell
from hybridcomp.publishing.checksums import XXH3
from hybridcomp.publishing.destinations import PARTS, TO, Destination, Folder
from hybridcomp.publishing.encoding import PartEncoder
from hybridcomp.publishing.part_buffers import FileBytes, open_file
from hybridcomp.publishing.parts import read_part
from hybridcomp.publishing.records import Manifest, read_manifest
from hybridcomp.publishing.weight_ranges import WeightRange
from hybridcomp.publishing.weights import DividedWeights, EngineWeights


@dataclass(frozen=True)
class Resumed:
    """State of a chain: the newest version, and whether the weights are that version."""

    base: str
    version: int
    digest: str
    since_full: int
    goes_on: bool
    text: str


def resume(
    weights: EngineWeights,
    divided: DividedWeights,
    encoder: PartEncoder,
    destination: Destination,
    digest: str,
) -> Resumed:
    """Compare the weights with the newest version of ``destination``; a collective.

    If the weights are equal to that version, they become the references of ``encoder``.
    ``digest``: checksum of the table.
    Raises ConfigError on every rank if the destination holds another model's weights.
    """
    rank = weights.ranks.index(dist.get_rank())
    newest, problem = saved.attempt(destination.latest) if rank == 0 else (None, None)
    mine = None if newest is None else newest.to_json().decode()
    said = tell({"newest": mine, "problem": problem}, what="resuming", ranks=weights.ranks)[0]
    if said["problem"] is not None:
        raise ConfigError(TO, "a damaged chain", f"{said['problem']}; or name an empty folder")
    if said["newest"] is None:
        return Resumed("", 0, "", 0, False, "publish: the first version is a full one")
    found = read_manifest(said["newest"].encode(), "the newest manifest")
    if found.table_digest != digest:
        todo = "it holds the weights of another model or dtype; name an empty folder"
        raise ConfigError(TO, f"version {found.version}", todo)
    assert isinstance(destination, Folder), "only a folder can be read back"
    unmeasured = None
    if weights.quantizer is not None:
        # a collective, so it runs on all ranks
        _, unmeasured = saved.attempt(weights.quantizer.measure)
    found_pieces, problem = saved.attempt(lambda: _pieces(destination.path, found, rank))
    why: str | None = problem or unmeasured
    if why is not None:
        pass
    elif found.checksum != XXH3:
        why = f"its checksums are of an older format, {found.checksum}"
    elif len(found.parts) != len(weights.ranks):
        why = f"it was written by {len(found.parts)} ranks, this job has {len(weights.ranks)}"
    else:
        taken, why = saved.attempt(encoder.take)
        if why is None and taken != found_pieces:
            why = "the weights are not those of it"
    since, late = None, None
    if rank == 0:
        since, late = saved.attempt(lambda: _since_full(destination, found))
    reasons = tell({"why": why or late, "since": since}, what="resuming", ranks=weights.ranks)
    reason = next((one["why"] for one in reasons if one["why"]), None)
    state = f"publish: version {found.version} is the newest of chain {found.base[:8]}"
    if reason is not None:
        encoder.forget()
        text = f"{state}; {reason}, so version {found.version + 1} is a full one"
        return Resumed(found.base, found.version, found.digest, 0, False, text)
    text = f"{state}, and the weights are those of it: the chain goes on"
    return Resumed(found.base, found.version, found.digest, reasons[0]["since"], True, text)


def _pieces(folder: Path, manifest: Manifest, rank: int) -> dict[WeightRange, str]:
    """Return the checksums of the pieces in ``rank``'s part; {} if it has none."""
    for entry in manifest.parts:
        if entry.rank == rank:
            with open_file(folder / PARTS / entry.file) as file:
                found = read_part(FileBytes(file), entry, manifest)
                return {piece.stretch: piece.after for piece in found.pieces}
    return {}


def _since_full(destination: Folder, newest: Manifest) -> int:
    """Return the number of versions since the last full one, including that one."""
    count, found = 1, newest
    while found.parent is not None:
        found = destination.read(found.parent)
        count += 1
    return count
