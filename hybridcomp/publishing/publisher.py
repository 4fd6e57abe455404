"""Publish the weights of a training job, version by version; every rank sends its own part."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from hybridcomp.errors import ConfigError, PublishError
from hybridcomp.foreign import one_line, quoted_path
from hybridcomp.job import saved
from hybridcomp.job.agreement import tell
from hybridcomp.log import say
from hybridcomp.publishing.choosing import AUTO, CHOICES, PublishedCodec, ReceiverTimes
from hybridcomp.publishing.destinations import Destination, Folder
from hybridcomp.publishing.encoding import BUCKET, PartEncoder, PartSummary
from hybridcomp.publishing.records import Manifest, PartEntry, table_digest
from hybridcomp.publishing.removing import Leftovers, remove_old
from hybridcomp.publishing.resuming import Resumed, resume
from hybridcomp.publishing.summaries import VersionSummary, check_all
from hybridcomp.publishing.weights import DividedWeights, EngineWeights, agree_on_weights

WHAT = "publishing weights"


class Publisher:
    """Sends versions of an engine's weights to one destination; every rank has one.

    All ranks of the job make the same calls together. The publisher reads weights and never
    changes them. It keeps one 16-bit copy of what this rank sends, on the host.
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
        bucket: int = BUCKET,
    ) -> None:
        """Divide the weights among the ranks, and look whether the destination's chain goes on.

        Args:
            weights: what this rank holds.
            destination: where versions go.
            every: ``stepped`` publishes in every so many calls.
            anchor_every: versions from one full version to the next.
            dtype: "bf16" or "fp16" for weights that have no 16 bits; None: the model's own.
            codec: "stepcode", "raw" for values as they are, or "auto": stepcode, and on streams and
                groups raw where encoding and decoding take longer than they save.
            keep: full versions that remain in a folder, with those that follow them; older ones are
                removed when a full one is there. None: all remain.
            bucket: most values that are encoded at once, the unit of checksums. A chain goes on
                after a restart only with the same one.

        Raises ConfigError and PublishError, on every rank.
        """
        numbers = {"every": every, "anchor_every": anchor_every, "keep": keep}
        for key, number in numbers.items():
            if number is not None and number < 1:
                raise ConfigError(f"publish.{key}", number, "expected a number of 1 or more")
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
            weights.quantizer.bind(self._divided.owned)
        self._choice = PublishedCodec(codec, destination.feels_link)
        self._encoder = PartEncoder(self._divided, bucket)
        self._table_digest = table_digest(self._divided.table, self._divided.aliases)
        self._rank = weights.ranks.index(dist.get_rank())
        self._base, self._version, self._digest = "", 0, ""
        self._since_full = 0
        self._is_held = False  # whether the references are those of self._version
        self._asked = self._is_closed = False
        self._steps = 0
        #: what the parts of the last version took, and whether it was a full one
        self._said: tuple[list[dict[str, Any]], bool] | None = None
        self._look()
        self._left = self._leftovers()

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
        """Look again whether the weights are the destination's newest version; a collective.

        To be called after a checkpoint was loaded, before training goes on. Does nothing once this
        publisher has published. Returns whether the chain goes on without a full version.
        """
        if not self._is_held and self._steps == 0:
            self._look()
        return self._is_held

    def _look(self) -> None:
        found: Resumed = resume(
            self._weights, self._divided, self._encoder, self._destination, self._table_digest
        )
        self._base, self._version = found.base, found.version
        self._digest, self._since_full = found.digest, found.since_full
        self._is_held = found.goes_on
        if self._weights.ranks[0] == dist.get_rank():
            say(found.text + self._choice.beginning(), anywhere=True)

    def ask_full(self) -> None:
        """Make the next version a full one; one rank that calls it is enough."""
        self._asked = True

    def stepped(self) -> VersionSummary | None:
        """Count an optimizer step; publish where ``every`` of them have come."""
        self._steps += 1
        return self.publish() if self._steps % self.every == 0 else None

    def publish(self, step: int | None = None) -> VersionSummary:
        """Publish the weights as they are now; a collective over the job's ranks.

        1 agree on whether the version is a full one
        2 compare, encode and send this rank's part
        3 rank 0 writes the manifest once all parts are there

        Args:
            step: number of the optimizer step, for the manifest; None: counted by ``stepped``.

        Raises, on every rank: PublishError where one could not read or write; the version is not
        readable then, and the next one is a full version. PeerError where a rank has ended.
        """
        begun = time.perf_counter()
        if self._is_closed:
            raise PublishError("this publisher is closed; make another one with hybridcomp.publish")
        # 1
        full, apply_s = self._begin()
        version = self._version + 1
        self._is_held = False  # until the version is there
        # 2
        head = {"base": self._base, "version": version, "parent": None if full else self._version}
        part, file, problem = self._send(version, head, full)
        statement = {"file": file, **vars(part)}
        said = self._all_well(problem, version, statement)
        # 3
        manifest = self._manifest(version, full, said, step)
        self._commit(manifest)
        self._version, self._digest = version, manifest.digest
        self._since_full = 1 if full else self._since_full + 1
        self._said = said, full
        self._is_held, self._asked = True, False
        if self._rank == 0:
            self._clean(full)
        slowest = {
            key: max(one[key] for one in said) for key in ("compare_s", "encode_s", "wire_s")
        }
        self.summary = VersionSummary(
            version, full, manifest.weights, manifest.changed, manifest.nbytes,
            raw=self._choice.is_raw, apply_s=apply_s, seconds=time.perf_counter() - begun,
            estimate=self._choice.estimate, **slowest,
        )  # fmt: skip
        return self.summary

    def close(self) -> None:
        """Free the copy of the weights and let go of the destination. No collective."""
        self._is_closed = True
        self._is_held = False
        self._encoder.forget()
        self._destination.close()

    def _leftovers(self) -> Leftovers | None:
        """Return what runs that were cut off have left in the folder, on rank 0."""
        if self._rank or not isinstance(self._destination, Folder):
            return None
        try:
            return Leftovers(self._destination.path)
        except (OSError, PublishError) as error:
            say(f"publish: nobody looked for leftovers: {one_line(error)}", anywhere=True)
            return None

    def _clean(self, full: bool) -> None:
        """Remove leftovers and old versions, on rank 0.

        The new version is readable by now: an error is told, not raised.
        """
        if not isinstance(self._destination, Folder):
            return
        left, self._left = self._left, None
        try:
            count = 0 if left is None else left.remove(self._version)
            if count:
                where = quoted_path(self._destination.path)
                told = f"publish: removed {count} file(s) in {where} of runs that were cut off"
                say(told, anywhere=True)
            if full and self.keep is not None:
                remove_old(self._destination.path, self.keep)
        except (OSError, PublishError) as error:
            say(f"publish: old files were not removed: {one_line(error)}", anywhere=True)

    def _begin(self) -> tuple[bool, float | None]:
        """Agree on whether the next version is full, and choose its codec.

        Returns whether it is, and the receivers' seconds of applying the version before.
        """
        wanted, problem = False, None
        if self._rank == 0:
            found, problem = saved.attempt(self._destination.wants_full)
            wanted = bool(found)
            self._base = self._base or secrets.token_hex(16)
            if not self._is_held and problem is None:  # the last one may be there all the same
                reached, problem = saved.attempt(self._destination.reached)
                self._version = max(self._version, reached.version if reached else 0)
        mine = {
            "full": wanted or self._asked or not self._is_held, "problem": problem,
            "base": self._base, "version": self._version, "since_full": self._since_full,
            "receivers": self._destination.receivers and vars(self._destination.receivers),
        }  # fmt: skip
        said = tell(mine, what=WHAT, ranks=self._weights.ranks)
        check_all(said, self._weights.ranks, f"version {self._version + 1}")
        self._base, self._version = said[0]["base"], said[0]["version"]
        since_full = max(one["since_full"] for one in said)
        full = any(one["full"] for one in said) or since_full >= self.anchor_every
        told = said[0]["receivers"]
        receivers = None if told is None else ReceiverTimes(**told)
        last, self._said = self._said, None
        text = None if last is None else self._choice.note(last[0], receivers, last[1])
        if text is not None and self._rank == 0:
            say(text, anywhere=True)
        return full, None if receivers is None else receivers.apply_s

    def _send(
        self, version: int, head: dict[str, Any], full: bool
    ) -> tuple[PartSummary, str, str | None]:
        """Write this rank's part; returns what it took, its file, and what went wrong."""
        sink, problem = saved.attempt(lambda: self._destination.begin(version, self._rank))
        _, unready = saved.attempt(self._weights.ready)  # may be a collective: on all ranks
        if self._weights.quantizer is not None:
            _, unmeasured = saved.attempt(self._weights.quantizer.measure)  # so is this
            unready = unready or unmeasured
        problem, part = problem or unready, None
        if sink is not None and problem is None:
            begun = sink

            def write() -> PartSummary:
                self._weights.unchanged()
                self._encoder.raw = self._choice.is_raw
                return self._encoder.write(begun, head, self._rank, full)

            part, problem = saved.attempt(write)
        ending = time.perf_counter()
        file, late = saved.attempt(lambda: self._destination.finish(problem))
        found = part or PartSummary()
        found.wire_s += time.perf_counter() - ending
        return found, file or "", problem or late

    def _all_well(
        self, problem: str | None, version: int, statement: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Exchange what the ranks have written; take everything back where one has failed."""
        said = tell({"problem": problem, **statement}, what=WHAT, ranks=self._weights.ranks)
        if any(one["problem"] for one in said):
            # not where ``tell`` raises: rank 0 may have heard all, and have written the manifest
            saved.attempt(self._destination.abandon)
        check_all(said, self._weights.ranks, f"version {version}")
        return said

    def _manifest(
        self, version: int, full: bool, said: list[dict[str, Any]], step: int | None
    ) -> Manifest:
        parts = [
            PartEntry(rank, one["file"], one["nbytes"], one["digest"])
            for rank, one in enumerate(said)
        ]
        divided = self._divided
        return Manifest(
            self._base, version, None if full else self._version, "" if full else self._digest,
            self._table_digest, divided.numel, sum(one["changed"] for one in said),
            self._steps if step is None else step, parts,
            divided.table if full else None, divided.aliases if full else {},
        )  # fmt: skip

    def _commit(self, manifest: Manifest) -> None:
        """Have rank 0 write the manifest, and wait until it is there."""
        problem = None
        if self._rank == 0:
            _, problem = saved.attempt(lambda: self._destination.commit(manifest))
            if problem is not None:
                found, _ = saved.attempt(self._destination.reached)
                if found is not None and found.digest == manifest.digest:
                    there = f"publish: version {manifest.version} is there, in spite of an error"
                    say(f"{there}: {problem}", anywhere=True)
                    problem = None
        self._all_well(problem, manifest.version, {})
