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
#: makes the manifest from the statements on all parts
MakesManifest = Callable[[Sequence[Mapping[str, Any]]], Manifest]


@dataclass(frozen=True)
class VersionStart:
    """Start of a version; equal on all ranks except for ``rank``.

    Attributes:
        version, full: its number, and whether it can be applied without an earlier version.
        head: description of the version in a part's index.
        rank: index of this rank in ``ranks``, the job's ranks.
        tokens: tokens in the names of all ranks' parts, in order.
    """

    version: int
    full: bool
    head: dict[str, Any]
    rank: int
    ranks: tuple[int, ...]
    tokens: tuple[str, ...]

    def tell(self, **statement: Any) -> list[dict[str, Any]]:
        """Exchange statements; a collective over the job's ranks, only on the caller's thread."""
        return tell(statement, what=WHAT, ranks=self.ranks)


def make_ready(weights: EngineWeights) -> str | None:
    """Finish pending gathers and measure quantized blocks; maybe a collective: on all ranks."""
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

    Returns its manifest and the ranks' statements on their parts. Raises PublishError on every rank
    if the version is not readable.
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
    """Write this rank's part; return its summary, its file, and an error if there was one."""
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
    """Exchange the ranks' results; withdraw everything if a rank has failed."""
    said = begin.tell(problem=problem, **statement)
    if any(one["problem"] for one in said):
        # if ``tell`` raises, nothing is withdrawn: rank 0 may have written the manifest
        saved.attempt(destination.abandon)
    check_all(said, begin.ranks, f"version {begin.version}")
    return said


def commit(destination: Destination, manifest: Manifest) -> str | None:
    """Write the manifest on rank 0; return an error if there was one.

    If the version exists despite an error, that error is logged but not returned.
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
