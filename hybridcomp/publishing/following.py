"""Publish after a session's optimizer steps, as the block's key ``publish`` says."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hybridcomp.publishing.publisher import Publisher
from hybridcomp.publishing.summaries import VersionSummary

#: field of a summary (seconds) -> figure of a report (milliseconds)
TIMES = {
    "compare_s": "compare_ms", "encode_s": "encode_ms", "wire_s": "wire_ms", "apply_s": "apply_ms",
    "wait_s": "wait_ms",
}  # fmt: skip


class PublishedSteps:
    """A ``StepFollower`` that publishes; it creates the publisher before the first step.

    At that time a checkpoint has been loaded and the weights are still the checkpoint's, so the
    publisher can check whether the destination's chain continues.
    """

    name = "publish"

    def __init__(self, make: Callable[[], Publisher | None], wait: bool) -> None:
        """Hold ``make``, which all ranks call once; None: nothing to publish.

        ``wait``: whether a step waits until its version is readable.
        """
        self._wait = wait
        self._make: Callable[[], Publisher | None] | None = make
        self._publisher: Publisher | None = None
        self._since: list[VersionSummary] = []
        self._versions = self._nbytes = self._raw_nbytes = 0

    def before_step(self) -> None:
        """Create the publisher. Raises ConfigError if the weights or the folder do not fit."""
        if self._make is not None:
            self._publisher = self._make()
            self._make = None  # set after success, so that a failed attempt is repeated
            if self._publisher is not None and not self._wait:
                self._publisher.make_room()

    def after_step(self, step: int) -> None:
        """Publish if the step is due.

        Raises errors of publishing; the error of a version written in the background is raised
        when the next version is due.
        """
        if self._publisher is not None and step % self._publisher.every == 0:
            self._publisher.publish(step, wait=self._wait)
            self._note(self._publisher.take_finished())

    def _note(self, finished: Iterable[VersionSummary]) -> None:
        for found in finished:
            self._since.append(found)
            self._versions += 1
            self._nbytes += found.nbytes
            self._raw_nbytes += 2 * found.weights  # published weights have 16 bits

    def after_skip(self) -> None:
        """Do nothing: the weights have not changed."""

    def row(self) -> dict[str, float] | None:
        """Return the figures of the versions since the last call; None if there were none.

        Shares and bits are averages over versions, times are sums. The link's speed, and the
        estimated times encoded and raw, are those by which the last version's codec was chosen.
        """
        since, self._since = self._since, []
        if not since:
            return None
        weights = sum(one.weights for one in since)
        found = {
            "version": float(since[-1].version),
            "versions": float(len(since)),
            "full_versions": float(sum(one.full for one in since)),
            "raw_versions": float(sum(one.raw for one in since)),
            "changed_share": sum(one.changed for one in since) / max(1, weights),
            "bits_per_weight": 8 * sum(one.nbytes for one in since) / max(1, weights),
            "wire_MB": sum(one.nbytes for one in since) / 1e6,
        }
        for key, figure in TIMES.items():
            known = [getattr(one, key) for one in since if getattr(one, key) is not None]
            if known:
                found[figure] = sum(known) * 1e3
        if (estimate := since[-1].estimate) is not None:
            found |= {
                "link_gbps": estimate.gbps, "coded_ms": estimate.coded_s * 1e3,
                "raw_ms": estimate.raw_s * 1e3,
            }  # fmt: skip
        return found

    def told(self) -> str:
        """Return words for the number of published versions and their MB; "" if none."""
        if not self._versions:
            return ""
        sizes = f"{self._nbytes / 1e6:.3g} MB in place of {self._raw_nbytes / 1e6:.3g} MB"
        return f"published {self._versions} version{'s'[: self._versions > 1]}, {sizes}"

    def close(self) -> None:
        """Close the publisher once its last version is readable or has failed."""
        self._make = None
        if self._publisher is not None:
            self._publisher.close()
            self._note(self._publisher.take_finished())
            self._publisher = None
