"""Publish the weights of a training job, version by version; every rank sends its own part."""

from __future__ import annotations

import secrets
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hybridcomp.errors import ConfigError, PublishError
from hybridcomp.job import saved
from hybridcomp.job.agreement import tell
from hybridcomp.job.together import together
from hybridcomp.log import say
from hybridcomp.publishing.beside import LIMIT_S, BesideVersion
from hybridcomp.publishing.choosing import AUTO, CHOICES, PublishedCodec, ReceiverTimes
from hybridcomp.publishing.destinations import Destination, Folder
from hybridcomp.publishing.encoding import BUCKET, PartEncoder
from hybridcomp.publishing.records import Manifest, PartEntry, table_digest
from hybridcomp.publishing.removing import Cleaning
from hybridcomp.publishing.resuming import Resumed, resume
from hybridcomp.publishing.summaries import StartedVersion, VersionSummary, check_all
from hybridcomp.publishing.waited import (
    WHAT,
    MakesManifest,
    VersionStart,
    make_ready,
    write_version,
)
from hybridcomp.publishing.weights import DividedWeights, EngineWeights, agree_on_weights

#: most summaries that ``take_finished`` returns
MOST_FINISHED = 1000


class Publisher:
    """Send versions of an engine's weights to one destination; every rank has a publisher.

    All ranks of the job make the same calls together. The publisher never changes the weights. On
    the host it keeps a 16-bit copy of the weights that this rank sends, and a second copy once a
    version is written in the background.
    """

    def __init__(
        self,
        weights: EngineWeights,
        destination: Destination,
        *,
        every: int = 1,
        anchor_every: int = 100,
        dtype: str | None = None,
        codec: str = AUTO,
        keep: int | None = None,
        limit_s: float = LIMIT_S,
        bucket: int = BUCKET,
    ) -> None:
        """Divide the weights among the ranks, and check whether the destination's chain continues.

        Args:
            weights: the weights that this rank holds.
            destination: where versions are written.
            every: ``stepped`` publishes on every ``every``-th call.
            anchor_every: number of versions from one full version to the next.
            dtype: "bf16" or "fp16" for weights that are not 16-bit; None: the model's own dtype.
            codec: "stepcode", "raw" for unencoded values, or "auto": stepcode, except on a stream
                or group where encoding and decoding take longer than the bytes saved would.
            keep: number of full versions that remain in a folder, with their successors; older
                versions are removed after each full one. None: all versions remain.
            limit_s: seconds that a version in the background may take. Then PublishError is raised
                and the version given up; later ones also raise while its thread still runs.
            bucket: most values that are encoded at once; each bucket has a checksum. A chain
                continues after a restart only with the same ``bucket``.

        Raises ConfigError and PublishError, on every rank.
        """
        numbers = {"every": every, "anchor_every": anchor_every, "keep": keep}
        for key, number in numbers.items():
            if number is not None and number < 1:
                raise ConfigError(f"publish.{key}", number, "expected a number of 1 or more")
        if not limit_s > 0:
            raise ConfigError("publish.limit_s", limit_s, "expected seconds, more than 0")
        if codec not in CHOICES:
            raise ConfigError("publish.codec", codec, f"expected one of {', '.join(CHOICES)}")
        if keep is not None and not isinstance(destination, Folder):
            raise ConfigError(
                "publish.keep", keep, "only a folder has versions to keep; leave it out"
            )
        self.every, self.anchor_every, self.keep = every, anchor_every, keep
        self.summary: VersionSummary | None = None
        self._weights, self._destination = weights, destination
        self._divided: DividedWeights = agree_on_weights(weights, dtype)
        if weights.quantizer is not None:
            weights.quantizer.bind(self._divided)
        self._choice = PublishedCodec(codec, destination.feels_link)
        self._encoder = PartEncoder(self._divided, bucket)
        self._table_digest = table_digest(self._divided.table, self._divided.aliases)
        self._rank = weights.ranks.index(dist.get_rank())
        self._base, self._version, self._digest = "", 0, ""
        self._since_full = 0
        self._is_held = False  # whether the references are the values of self._version
        self._is_torn = False  # whether parts of a failed version may exist
        self._asked = self._is_closed = False
        self._steps = 0
        #: the ranks' statements on the last version, and whether it was a full one
        self._said: tuple[list[dict[str, Any]], bool] | None = None
        self._limit_s = limit_s
        self._beside: BesideVersion | None = None
        self._hook: Any = None
        self._waited_s = 0.0  # seconds that training waited for the version in the background
        self._finished: list[VersionSummary] = []
        self._look()
        self._cleaning: Cleaning | None = None
        if self._rank == 0 and isinstance(destination, Folder):
            self._cleaning = Cleaning(destination.path, keep)

    @property
    def version(self) -> int:
        """Return the number of the last version; 0 before the first."""
        return self._version

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks of the job that call this publisher together."""
        return self._weights.ranks

    @property
    def base(self) -> str:
        """Return the identity of the chain; "" before it is known."""
        return self._base

    def resume(self) -> bool:
        """Check again whether the weights are the destination's newest version; a collective.

        Call it after loading a checkpoint, before training continues. It does nothing once this
        publisher has published. Returns whether the chain continues without a full version.
        """
        with self._all_or_none():
            self._take_over()
            if not self._is_held and self._steps == 0:
                self._look()
        return self._is_held

    def _all_or_none(self) -> AbstractContextManager[None]:
        """Complete the body on all ranks, or raise PublishError on all of them."""
        return together(WHAT, self._give_up, ranks=self.ranks, error=PublishError)

    def _give_up(self) -> None:
        """Continue with a full version after an error on any rank. No collective.

        Rank 0 may have written the manifest nevertheless, so parts stay until all ranks have
        reached the next version.
        """
        self._is_held, self._is_torn = False, True
        if self._beside is not None:
            self._beside.give_up()
        if not isinstance(self._destination, Folder):
            saved.attempt(self._destination.abandon)

    def _look(self) -> None:
        found: Resumed = resume(
            self._weights, self._divided, self._encoder, self._destination, self._table_digest
        )
        self._base, self._version = found.base, found.version
        self._digest, self._since_full = found.digest, found.since_full
        self._is_held = found.goes_on
        if self._weights.ranks[0] == dist.get_rank():
            say(found.text + self._choice.beginning(), anywhere=True)

    def make_room(self) -> None:
        """Allocate, in a thread, memory for versions that are written in the background.

        Call it some steps before the first ``publish(wait=False)``, so that the training does not
        wait for new pages. Weights on a GPU need no such call. No collective.
        """
        self._encoder.make_room()

    def ask_full(self) -> None:
        """Make the next version a full one; a call on one rank is enough."""
        self._asked = True

    def stepped(self, *, wait: bool = True) -> VersionSummary | StartedVersion | None:
        """Count an optimizer step; publish on every ``every``-th step."""
        self._steps += 1
        if self._steps % self.every == 0:
            return self.publish(wait=wait)
        if not wait:
            self.make_room()
        return None

    @overload
    def publish(self, step: int | None = None, *, wait: Literal[True] = True) -> VersionSummary: ...

    @overload
    def publish(self, step: int | None = None, *, wait: Literal[False]) -> StartedVersion: ...

    @overload
    def publish(
        self, step: int | None = None, *, wait: bool
    ) -> VersionSummary | StartedVersion: ...

    def publish(
        self, step: int | None = None, *, wait: bool = True
    ) -> VersionSummary | StartedVersion:
        """Publish the current weights; a collective over the job's ranks.

        1 complete the previous version, if it was written in the background
        2 agree whether the new version is a full one
        3 compare, encode and send this rank's part
        4 rank 0 writes the manifest once all parts are written

        Args:
            step: number of the optimizer step, for the manifest; None: the count of ``stepped``.
            wait: whether to return only once the version is readable. False, for folders only: a
                thread does 3 and 4. Weights may change only once ``copied`` has returned; steps of
                torch's optimizers wait for that by themselves.

        Raises, on every rank: PublishError if any rank could not read or write this version, or the
        previous one in the background; the failed version is then not readable, no other one was
        begun, and the next is a full version. PeerError if a rank has ended. ConfigError if
        ``wait`` is False and the destination is no folder.
        """
        begun = time.perf_counter()
        if self._is_closed:
            raise PublishError("this publisher is closed; make another one with hybridcomp.publish")
        if not wait and not isinstance(self._destination, Folder):
            todo = "only a folder is written beside the training; leave it out"
            raise ConfigError("publish.wait", wait, todo)
        with self._all_or_none():
            return self._publish(step, wait, begun)

    def _publish(
        self, step: int | None, wait: bool, begun: float
    ) -> VersionSummary | StartedVersion:
        self._take_over()  # 1
        full, apply_s, tokens = self._begin()  # 2
        version = self._version + 1
        self._is_held = self._asked = False  # stays so until the version is written
        head = {"base": self._base, "version": version, "parent": None if full else self._version}
        begin = VersionStart(version, full, head, self._rank, self.ranks, tokens)
        self._encoder.raw = self._choice.is_raw
        make = partial(self._manifest, version, full, self._steps if step is None else step)
        if not wait:
            return self._start(begin, make, begun)
        # 3, 4
        manifest, said = write_version(begin, self._weights, self._encoder, self._destination, make)
        if self._cleaning is not None:
            self._cleaning.after(version, full)
        seconds = time.perf_counter() - begun
        return self._took(manifest, said, seconds, seconds, apply_s)

    def copied(self) -> None:
        """Wait until weights may change: until the background thread has copied them.

        Steps of torch's optimizers wait automatically. No collective.
        """
        if self._beside is not None:
            begun = time.perf_counter()
            self._beside.copied()
            self._waited_s += time.perf_counter() - begun

    def finish(self) -> VersionSummary | None:
        """Wait until the version being written in the background is readable; a collective.

        Returns that version's summary, None if there is no version. Raises like ``publish``.
        """
        with self._all_or_none():
            return self._take_over()

    def take_finished(self) -> list[VersionSummary]:
        """Return the versions that became readable since the last call, the oldest first."""
        found, self._finished = self._finished, []
        return found

    def _start(self, begin: VersionStart, make: MakesManifest, begun: float) -> StartedVersion:
        """Begin a version in the background, passing on an error that has already occurred."""
        folder = self._destination
        assert isinstance(folder, Folder)
        _, problem = saved.attempt(lambda: folder.claim(begin.version, begin.rank))
        problem = make_ready(self._weights) or problem
        for work in (self._weights.unchanged, self._encoder.begin_snapshot):
            if problem is None:
                _, problem = saved.attempt(work)
        if self._hook is None:
            self._hook = _before_optimizers(self)
        clean = self._cleaning.after if self._cleaning is not None else lambda *_: None
        self._beside = BesideVersion(
            begin, self._limit_s, self._encoder, folder, make, clean, problem
        )
        self._waited_s = time.perf_counter() - begun
        return StartedVersion(begin.version, begin.full, self._waited_s)

    def _take_over(self) -> VersionSummary | None:
        """Complete the version being written in the background; a collective if there is one."""
        beside = self._beside
        if beside is None or beside.is_given_up:
            return None
        begun = time.perf_counter()
        manifest, said = beside.settle()
        self._beside = None
        waited_s = self._waited_s + time.perf_counter() - begun
        seconds = max(statement.get("seconds", 0.0) for statement in said)
        return self._took(manifest, said, seconds, waited_s, None)

    def _took(
        self,
        manifest: Manifest,
        said: list[dict[str, Any]],
        seconds: float,
        wait_s: float,
        apply_s: float | None,
    ) -> VersionSummary:
        """Continue from a readable version; return its summary."""
        self._version, self._digest = manifest.version, manifest.digest
        self._since_full = 1 if manifest.full else self._since_full + 1
        self._said = said, manifest.full
        self._is_held = True
        slowest = {
            key: max((statement.get(key, 0.0) for statement in said), default=0.0)
            for key in ("compare_s", "encode_s", "wire_s")
        }
        self.summary = VersionSummary(
            manifest.version, manifest.full, manifest.weights, manifest.changed, manifest.nbytes,
            raw=self._choice.is_raw, apply_s=apply_s, seconds=seconds, wait_s=wait_s,
            estimate=self._choice.estimate, **slowest,
        )  # fmt: skip
        self._finished = [*self._finished, self.summary][-MOST_FINISHED:]
        return self.summary

    def close(self) -> None:
        """Free the copies of the weights and close the destination. No collective.

        It waits for a version being written in the background, and logs a failure of that version.
        """
        if self._hook is not None:
            self._hook.remove()
        if self._beside is not None:
            self._beside.close()
            manifest, self._beside = self._beside.manifest, None
            if manifest is not None and not self._is_closed:
                self._took(manifest, [], 0.0, self._waited_s, None)
        self._is_closed = True
        self._is_held = False
        self._encoder.forget()
        self._destination.close()

    def _begin(self) -> tuple[bool, float | None, tuple[str, ...]]:
        """Agree on whether the next version is full, and choose its codec.

        Returns whether it is full, the slowest receiver's seconds of applying the previous version,
        and the tokens in the names of all ranks' parts.
        """
        wanted, problem = False, None
        if self._beside is not None:
            problem = self._beside.still_writing()
            self._beside = self._beside if problem else None
        if self._is_torn and problem is None and isinstance(self._destination, Folder):
            _, problem = saved.attempt(self._destination.put_aside)
        if self._rank == 0 and problem is None:
            found, problem = saved.attempt(self._destination.wants_full)
            wanted = bool(found)
            self._base = self._base or secrets.token_hex(16)
            # the last version may be readable all the same
            if not self._is_held and problem is None:
                reached, problem = saved.attempt(self._destination.reached)
                self._version = max(self._version, reached.version if reached else 0)
        mine = {
            "full": wanted or self._asked or not self._is_held, "problem": problem,
            "base": self._base, "version": self._version, "since_full": self._since_full,
            "receivers": self._destination.receivers and vars(self._destination.receivers),
            "token": getattr(self._destination, "token", ""),
        }  # fmt: skip
        said = tell(mine, what=WHAT, ranks=self._weights.ranks)
        check_all(said, self._weights.ranks, f"version {self._version + 1}")
        if self._is_torn and isinstance(self._destination, Folder):
            self._destination.remove_aside()  # no rank can write a manifest that names them
        self._is_torn = False
        self._base, self._version = said[0]["base"], said[0]["version"]
        since_full = max(statement["since_full"] for statement in said)
        full = any(statement["full"] for statement in said) or since_full >= self.anchor_every
        told = said[0]["receivers"]
        receivers = None if told is None else ReceiverTimes(**told)
        last, self._said = self._said, None
        text = None if last is None else self._choice.note(last[0], receivers, last[1])
        if text is not None and self._rank == 0:
            say(text, anywhere=True)
        tokens = tuple(str(statement["token"]) for statement in said)
        return full, None if receivers is None else receivers.apply_s, tokens

    def _manifest(
        self, version: int, full: bool, step: int, said: Sequence[Mapping[str, Any]]
    ) -> Manifest:
        parts = [
            PartEntry(rank, statement["file"], statement["nbytes"], statement["digest"])
            for rank, statement in enumerate(said)
        ]
        divided = self._divided
        return Manifest(
            self._base, version, None if full else self._version, "" if full else self._digest,
            self._table_digest, divided.numel, sum(statement["changed"] for statement in said),
            step, parts,
            divided.table if full else None, divided.aliases if full else {},
        )  # fmt: skip


def _before_optimizers(publisher: Publisher) -> Any:
    """Make steps of torch's optimizers in this process wait for the publisher's copy.

    Returns a handle whose ``remove`` ends this; so does deleting the publisher.
    """
    known = weakref.ref(publisher)

    def before(*_: Any) -> None:
        if (found := known()) is not None:
            found.copied()

    disable: Any = torch.compiler.disable  # the hook must not be part of a compiled step
    hook = register_optimizer_step_pre_hook(disable(before))
    weakref.finalize(publisher, hook.remove).atexit = False
    return hook
