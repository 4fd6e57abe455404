"""Write one version while the caller waits: all ranks' parts, then the manifest."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridcomp.job import saved
from hybridcomp.job.agreement import tell
from hybridcomp.log import say
from hybridcomp.publishing.destinations import Destination
from hybridcomp.publishing.encoding import PartEncoder, PartSummary
from hybridcomp.publishing.records import Manifest
from hybridcomp.publishing.summaries import check_all
from hybridcomp.publishing.weights import EngineWeights

WHAT = "publishing weights"
#: makes the manifest of what is said of all parts
MakesManifest = Callable[[Sequence[Mapping[str, Any]]], Manifest]


@dataclass(frozen=True)
class VersionStart:
    """Describe a version when it begins; equal on all ranks but for ``rank``.

    Attributes:
        version, full: its number, and whether it needs none before it.
        head: what the index of a part says of it.
        rank: place of this rank among ``ranks``, those of the job.
        tokens: of the names of all ranks' parts, in order.
    """

    version: int
    full: bool
    head: dict[str, Any]
    rank: int
    ranks: tuple[int, ...]
    tokens: tuple[str, ...]

    def tell(self, **statement: Any) -> list[dict[str, Any]]:
        """Exchange statements; a collective over the job's ranks, for the caller's thread alone."""
        return tell(statement, what=WHAT, ranks=self.ranks)


def make_ready(weights: EngineWeights) -> str | None:
    """Have gathers finished and blocks measured, which may be collectives: on all ranks."""
    _, problem = saved.attempt(weights.ready)
    if weights.quantizer is not None:
        _, unmeasured = saved.attempt(weights.quantizer.measure)
        problem = problem or unmeasured
    return problem


def write_version(
    begin: VersionStart,
    weights: EngineWeights,
    encoder: PartEncoder,
    destination: Destination,
    make: MakesManifest,
) -> tuple[Manifest, list[dict[str, Any]]]:
    """Write a version; a collective over the job's ranks.

    Returns its manifest, and what the ranks say of their parts. Raises PublishError, on every rank,
    where the version is not readable.
    """
    part, file, problem = _part(begin, weights, encoder, destination)
    said = _all_well(begin, destination, problem, {"file": file, **vars(part)})
    manifest = make(said)
    problem = commit(destination, manifest) if begin.rank == 0 else None
    _all_well(begin, destination, problem, {})
    return manifest, said


def _part(
    begin: VersionStart, weights: EngineWeights, encoder: PartEncoder, destination: Destination
) -> tuple[PartSummary, str, str | None]:
    """Write this rank's part; returns what it took, its file, and what went wrong."""
    sink, problem = saved.attempt(lambda: destination.begin(begin.version, begin.rank))
    unready = make_ready(weights)
    problem, part = problem or unready, None
    if sink is not None and problem is None:
        begun = sink

        def write() -> PartSummary:
            weights.unchanged()
            return encoder.write(begun, begin.head, begin.rank, begin.full)

        part, problem = saved.attempt(write)
    ending = time.perf_counter()
    file, late = saved.attempt(lambda: destination.finish(problem))
    found = part or PartSummary()
    found.wire_s += time.perf_counter() - ending
    return found, file or "", problem or late


def _all_well(
    begin: VersionStart, destination: Destination, problem: str | None, statement: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Exchange what the ranks have done; take everything back where one has failed."""
    said = begin.tell(problem=problem, **statement)
    if any(one["problem"] for one in said):
        # not where ``tell`` raises: rank 0 may have heard all, and have written the manifest
        saved.attempt(destination.abandon)
    check_all(said, begin.ranks, f"version {begin.version}")
    return said


def commit(destination: Destination, manifest: Manifest) -> str | None:
    """Write the manifest, on rank 0; returns what went wrong.

    A version that is there in spite of an error is told, and has none.
    """
    _, problem = saved.attempt(lambda: destination.commit(manifest))
    if problem is None:
        return None
    found, _ = saved.attempt(destination.reached)
    if found is None or found.digest != manifest.digest:
        return problem
    there = f"publish: version {manifest.version} is there, in spite of an error"
    say(f"{there}: {problem}", anywhere=True)
    return None
