"""Write versions to a folder in the background: each rank's thread copies, encodes and writes.

1. ``publish(wait=False)``, on the caller's thread: the ranks agree on the version, and each starts
   its thread.
2. The thread copies the weights; the next optimizer step, which changes them, waits for the copy.
   Then the thread encodes and writes this rank's part.
3. The thread of rank 0 waits until the parts of all ranks are in the folder, and writes the
   manifest, which makes the version readable.
4. The next ``publish`` completes the version, or raises one rank's failure on all ranks.

These threads send nothing to other ranks: the caller's thread sends all messages, in 1 and 4. The
interpreter waits for the thread when it exits. A killed job leaves parts that no manifest names:
receivers keep the previous version, and the next job removes the parts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from hybridcomp.errors import PublishError
from hybridcomp.escaping import one_line, quoted_path
from hybridcomp.job import saved
from hybridcomp.job.waits import NOTICE_S
from hybridcomp.log import say
from hybridcomp.publishing.destinations import FAILED, PARTS, Folder, part_name
from hybridcomp.publishing.encoding import PartEncoder, PartSummary
from hybridcomp.publishing.part_buffers import FileBytes, open_file
from hybridcomp.publishing.parts import summary_of
from hybridcomp.publishing.records import Manifest, read_manifest
from hybridcomp.publishing.summaries import check_all
from hybridcomp.publishing.waited import MakesManifest, VersionStart, commit

#: default limit in seconds for writing a version in the background
LIMIT_S = 600.0
#: seconds that rank 0 still waits for other ranks' parts after its script has ended
EXIT_S = 30.0
#: shortest and longest pause between two polls for other ranks' parts, in seconds
LOOK_S, LOOKS_S = 0.005, 0.25


class BesideVersion:
    """The version being written in the background; all ranks call ``settle`` together.

    Attributes:
        manifest: the manifest that rank 0 has written; None before, and on other ranks.
    """

    def __init__(
        self,
        begin: VersionStart,
        limit_s: float,
        encoder: PartEncoder,
        folder: Folder,
        make: MakesManifest,
        clean: Callable[[int, bool], None],
        problem: str | None,
    ) -> None:
        """Start the thread.

        Args:
            begin: start of the version; ``limit_s``: seconds that writing the version may take.
            encoder: encoder with a snapshot in progress.
            folder: folder to which the version is written.
            make: makes the manifest.
            clean: called on rank 0 with ``version`` and ``full``, once the version is readable.
            problem: an error that this rank already has, or None.
        """
        self._of, self._encoder, self._folder = begin, encoder, folder
        self._make, self._clean, self._limit_s = make, clean, limit_s
        self.manifest: Manifest | None = None
        self._begun = time.perf_counter()
        self._problem: str | None = problem
        self._unwritten: str | None = None
        self._statement: dict[str, Any] = {}
        self._said: list[dict[str, Any]] | None = None
        self.is_given_up = self._is_committing = False
        self._lock = threading.Lock()
        self._copied, self._written, self._ended = (threading.Event() for _ in range(3))
        self._news = threading.Event()  # wakes rank 0's thread, which waits for parts
        name = f"hybridcomp version {begin.version}"
        thread = threading.Thread(target=self._run, name=name, daemon=False)
        _, unstarted = saved.attempt(thread.start)
        if unstarted is not None:
            self._problem = unstarted
            for event in (self._copied, self._written, self._ended):
                event.set()

    @property
    def version(self) -> int:
        """Return the version number."""
        return self._of.version

    def copied(self) -> None:
        """Wait until weights may change: until the thread has its copy. No collective."""
        if not self._copied.wait(self._left()):
            self._problem = self._problem or self._late("copied")

    def _left(self) -> float:
        return max(0.0, self._limit_s - (time.perf_counter() - self._begun))

    def _late(self, doing: str) -> str:
        where = quoted_path(self._folder.path)
        return (
            f"it was still being {doing} after {self._limit_s:g} s (limit_s); look why {where} "
            "is slow"
        )

    # the thread

    def _run(self) -> None:
        try:
            self._write()
        finally:
            self._copied.set()
            self._written.set()
        try:
            if self._of.rank == 0 and self._problem is None:
                _, self._unwritten = saved.attempt(self._commit)
        finally:
            self._ended.set()

    def _write(self) -> None:
        """Copy the weights, and write this rank's part."""
        of, part, problem = self._of, PartSummary(), self._problem
        if problem is None:
            _, problem = saved.attempt(self._encoder.end_snapshot)
        self._copied.set()
        begun = time.perf_counter()
        if problem is None:
            found, problem = saved.attempt(
                lambda: self._encoder.write(
                    self._folder.begin(of.version, of.rank), of.head, of.rank, of.full, beside=True
                )
            )
            part = found or part
        ending = time.perf_counter()
        file, late = saved.attempt(lambda: self._folder.finish(problem))
        part.wire_s += time.perf_counter() - ending
        self._problem = self._problem or problem or late
        if self._problem is not None:
            self._folder.fail(self._problem)
        self._statement = {"file": file, **vars(part), "seconds": time.perf_counter() - begun}

    def _commit(self) -> None:
        """Write the manifest once all parts are complete, unless the version is cancelled."""
        said = self._parts()
        with self._lock:
            if said is None or self.is_given_up:
                return
            self._is_committing = True
        manifest = self._make(said)
        problem = commit(self._folder, manifest)
        if problem is not None:
            raise PublishError(problem)
        self.manifest = manifest
        self._clean(manifest.version, manifest.full)

    def _parts(self) -> Sequence[dict[str, Any]] | None:
        """Return all parts' manifest entries once they are complete; None if cancelled."""
        found, pause = {self._of.rank: self._statement}, LOOK_S
        exits = False
        while self._said is None and len(found) < len(self._of.tokens):
            left = self._left()
            if not threading.main_thread().is_alive() and not exits:
                late = time.perf_counter() - self._limit_s + EXIT_S
                exits, self._begun = True, min(self._begun, late)
            elif not left:
                missing = [r for n, r in enumerate(self._of.ranks) if n not in found]
                raise PublishError(f"the parts of rank(s) {missing[:8]} never came")
            for place, token in enumerate(self._of.tokens):
                if place not in found and (there := self._part(place, token)) is not None:
                    found[place] = there
            self._news.wait(min(pause, max(left, LOOK_S)))
            pause = min(2 * pause, LOOKS_S)
            if self.is_given_up:
                return None
        return self._said or [found[place] for place in range(len(self._of.tokens))]

    def _part(self, place: int, token: str) -> dict[str, Any] | None:
        """Return the manifest entry of another rank's part; None if it is not complete yet."""
        name = part_name(self._of.version, token, place)
        path = self._folder.path / PARTS / name
        failed = path.with_name(f"{name}{FAILED}")
        try:
            with open_file(path) as file:
                return {"file": name, **summary_of(FileBytes(file), place)}
        except (OSError, ValueError, KeyError, TypeError):  # missing or incomplete
            pass
        if failed.exists():
            why, _ = saved.attempt(failed.read_text)
            text = one_line(why or "its part cannot be written")
            raise PublishError(f"rank {self._of.ranks[place]}: {text}")
        return None

    # the caller's thread

    def settle(self) -> tuple[Manifest, list[dict[str, Any]]]:
        """Wait until the version is readable; a collective over the job's ranks.

        Returns the version's manifest, and each rank's statement on that rank's part. Raises
        PublishError on every rank if the version is not readable.
        """
        if not self._written.wait(min(NOTICE_S, self._left())):
            say(f"publish: waits for version {self.version}, which is being written", anywhere=True)
        is_there = self._written.wait(self._left())
        problem = self._problem if is_there else self._late("written")
        said = self._of.tell(problem=problem, **(self._statement if is_there else {}))
        if any(statement["problem"] for statement in said):
            return self._unreadable(said)
        if self._of.rank == 0:
            self._said = said
            self._news.set()
            is_there = self._ended.wait(self._left())
            problem = self._unwritten if is_there else self._late("written")
        ends = self._of.tell(problem=problem)
        if any(end["problem"] for end in ends):
            return self._unreadable(ends, said)
        return self._make(said), said

    def give_up(self) -> None:
        """Prevent the manifest from being written, unless its writing has begun. No collective."""
        with self._lock:
            self.is_given_up = True
        self._news.set()

    def still_writing(self) -> str | None:
        """Wait for the thread of a cancelled version; return a message if it is still running.

        No collective.
        """
        return None if self._ended.wait(self._left()) else self._late("written")

    def _unreadable(
        self, bad: list[dict[str, Any]], said: list[dict[str, Any]] | None = None
    ) -> tuple[Manifest, list[dict[str, Any]]]:
        """Cancel the version, unless its manifest exists in spite of an error."""
        self.give_up()
        if self._is_committing:
            self._ended.wait(self._left())
        kept = None if self.manifest is None else self.manifest.to_json().decode()
        ends = self._of.tell(manifest=kept, is_writing=not self._ended.wait(LOOKS_S))
        if ends[0]["manifest"] is None:
            if not any(end["is_writing"] for end in ends):
                saved.attempt(self._folder.abandon)
            check_all(bad, self._of.ranks, f"version {self.version}")
            raise AssertionError("one of the ranks has a problem")
        # all parts were written, so the references of all ranks are this version's values
        found = read_manifest(ends[0]["manifest"].encode(), "the version beside the training")
        if self._of.rank == 0:
            there = f"publish: version {found.version} is there, in spite of an error"
            say(f"{there}: {next(one['problem'] for one in bad if one['problem'])}")
        return found, said or bad

    def close(self) -> None:
        """Wait until this rank's work is done, and report its failure. No collective.

        Files of a failed version stay for the next job to remove: rank 0 may still have to read
        from them why a part is missing.
        """
        is_there = self._ended.wait(self._left())
        problem = self._problem or self._unwritten if is_there else self._late("written")
        if problem is not None:
            rank = dist.get_rank() if dist.is_initialized() else self._of.ranks[self._of.rank]
            text = f"publish: version {self.version} was not published: rank {rank}: {problem}"
            say(text, anywhere=True)
