"""Decide whether compression pays on the link of this job, and remember it.

A dimension whose encoded messages are not faster (``timing``) stays native for the rest of the run,
and in runs that resume it from a checkpoint. If the trial was close, real steps of the run are
compared once, and the verdict may change (``recheck``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

import torch

from hybridcomp.autotune import recheck
from hybridcomp.autotune.recheck import Recheck
from hybridcomp.dimensions import Dimension

#: if encoding took this many times as long as native in the trial, no steps are compared: in a step
#: encoding also takes the model's cores
CLEAR = 2.0
#: no steps are compared either if encoding was this many times as fast. Below that the model's own
#: work may hide the wire: over 1 Gb/s messages of DDP were twice as fast encoded, yet steps were
#: slower
CLEAR_CODED = 8.0
#: encoded steps before steps are compared, in which kernels load and buffers are allocated
WARM = 3


@dataclass(frozen=True)
class Decision:
    """Result of the (largest) trial of a dimension; equal on all ranks.

    The later fields come from a comparison of steps, see ``recheck``.
    """

    pays: bool
    nbytes: int  # size of the messages on one rank
    native_s: float  # seconds of the slowest rank
    coded_s: float
    messages: int = 1
    of: int = 0  # bytes that a step sends, if ``nbytes`` is only part of them
    first: int = -1  # the first step of the comparison
    checked: bool = False  # whether the comparison is over
    since: int = 0  # the first step from which ``pays`` holds
    gain_s: float | None = None  # seconds per step that encoding saves, if known
    flush: int = -1  # the step that sends the residuals, after a comparison that ended native
    rounds: int = 1  # rounds of the comparison so far

    @property
    def is_close(self) -> bool:
        """Return whether steps must decide: the trial was not clear, or there was none."""
        if self.checked or not self.nbytes:
            return not self.checked
        if self.pays:
            return self.native_s < CLEAR_CODED * self.coded_s
        return self.coded_s < CLEAR * self.native_s

    def describe(self, dimension: Dimension) -> str:
        """Describe the verdict in one sentence."""
        if not self.nbytes:
            return f"{dimension}: compressed, not timed: the ranks of a group send different sizes"
        count = f" in {self.messages} messages" if self.messages > 1 else ""
        count += f" (of {self.of / 1e6:.3g} MB a step)" if self.of else ""
        figures = (
            f"{self.nbytes / 1e6:.3g} MB{count} take {self.native_s * 1e3:.1f} ms natively and "
            f"{self.coded_s * 1e3:.1f} ms encoded"
        )
        todo = "compressed" if self.pays else 'native for this run; "when": "always" compresses'
        return f"{dimension}: {figures} (compression.{dimension}.when: auto): {todo}"


class Verdicts:
    """The verdicts of one engine, and its comparison of steps."""

    def __init__(self) -> None:
        self.by_dimension: dict[Dimension, Decision] = {}
        self.recheck: Recheck | None = None
        self._is_planned = False
        self._doubted: frozenset[Dimension] = frozenset()

    def native(self, dimension: Dimension, step: int) -> bool:
        """Return whether ``dimension`` is native in ``step``."""
        coded = None if self.recheck is None else self.recheck.coded(dimension, step)
        if coded is not None:
            return not coded
        verdict = self.by_dimension.get(dimension)
        return verdict is not None and verdict.pays == (step < verdict.since)

    def comparing(self, step: int) -> bool:
        return self.recheck is not None and self.recheck.covers(step)

    @property
    def may_compare(self) -> bool:
        """Return whether any steps remain to be compared."""
        undone = self.recheck is not None and not all(
            self.by_dimension[name].checked for name in self.recheck.names
        )
        return undone or not self._is_planned

    @property
    def may_change(self) -> bool:
        """Return whether steps are being compared, or will be."""
        if self._is_planned:
            return self.may_compare
        return any(map(self._is_open, self.by_dimension))

    def _is_open(self, dimension: Dimension) -> bool:
        """Return whether steps must decide on ``dimension``."""
        verdict = self.by_dimension[dimension]
        return verdict.is_close or (dimension in self._doubted and not verdict.checked)

    def doubt(self, names: Iterable[Dimension]) -> list[Dimension]:
        """Have steps confirm the verdicts on ``names``, which an earlier run found.

        Returns the names that have a verdict.
        """
        self._doubted = frozenset(names) & frozenset(self.by_dimension)
        for name in self._doubted:
            self.by_dimension[name] = replace(self.by_dimension[name], checked=False)
        self._is_planned, self.recheck = False, None
        return [name for name in self.by_dimension if name in self._doubted]

    def begins(self, dimension: Dimension) -> bool:
        """Return whether a comparison that begins now would include ``dimension``."""
        return not self._is_planned and dimension in self.by_dimension and self._is_open(dimension)

    def flushes(self, dimension: Dimension, step: int) -> bool:
        """Return whether messages of ``step`` send the residuals too, losslessly."""
        verdict = self.by_dimension.get(dimension)
        return verdict is not None and verdict.flush == step

    def holds_nothing(self, dimension: Dimension, step: int) -> bool:
        """Return whether no message of ``step`` or later uses residuals."""
        verdict = self.by_dimension.get(dimension)
        if verdict is None or verdict.pays or self.comparing(step):
            return False
        return step > verdict.flush

    def compare(self, step: int, without: Collection[Dimension], device: torch.device) -> list[str]:
        """Begin, continue or end the comparison of steps, before ``step`` of a warm run.

        ``without``: dimensions that no step encodes any more. A collective in the step where it
        ends. Returns sentences for the user.
        """
        words = []
        if not self._is_planned:
            self._is_planned = True
            close = [n for n in self.by_dimension if self._is_open(n) and n not in without]
            if close:
                words.append(self._begin(close[: recheck.MOST], step))
        if self.recheck is not None and step <= self.recheck.stop:
            self.recheck.close(step, device)
            pays = {name: self.by_dimension[name].pays for name in self.recheck.names}
            self.recheck.end_early(step, pays, device)
            if step == self.recheck.stop:
                words += self._end(self.recheck, without, device)
        return words

    def _begin(self, names: Sequence[Dimension], step: int) -> str:
        self.recheck = Recheck(names, step)
        for name in names:
            self.by_dimension[name] = replace(self.by_dimension[name], first=step)
        usual, most = self.recheck.stop - 1, self.recheck.last
        return (
            f"{', '.join(names)}: a trial times messages alone, so steps {step} to {usual}, or "
            f"{most} where it is close, run in both ways, in turns, and are compared"
        )

    def _end(
        self, done: Recheck, without: Collection[Dimension], device: torch.device
    ) -> list[str]:
        findings = done.judge({n: self.by_dimension[n].pays for n in done.names}, device)
        for name in done.names:
            self.by_dimension[name] = replace(self.by_dimension[name], rounds=done.rounds)
        words = []
        for name, finding in ({} if findings is None else findings).items():
            verdict = replace(self.by_dimension[name], checked=True)
            if finding.native_s:
                verdict = replace(verdict, gain_s=finding.native_s - finding.coded_s)
            if finding.changes:
                verdict = replace(verdict, pays=not verdict.pays, since=done.stop)
            if name not in without:
                if not verdict.pays:
                    verdict = replace(verdict, flush=done.stop)
                words.append(recheck.describe_finding(name, finding, verdict.pays, done.stop))
            self.by_dimension[name] = verdict
        return words

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the state that a resumed run needs, as plain dicts."""
        usual = {f.name: f.default for f in fields(Decision)}
        return {
            name: {key: value for key, value in asdict(verdict).items() if value != usual[key]}
            for name, verdict in self.by_dimension.items()
        }

    def restore(
        self, state: Mapping[str, Mapping[str, Any]], waiting: Sequence[Dimension] = ()
    ) -> list[str]:
        """Restore the decisions of the resumed run; return notes for the user on what changed.

        ``waiting``: dimensions that would be measured later; those in ``state`` will not be.
        """
        words = []
        for name, verdict in self.by_dimension.items():
            stored = Decision(**state[name]) if name in state else verdict
            if stored.pays != verdict.pays:
                was = "compressed" if stored.pays else "native"
                change = '"codec": "none"' if stored.pays else '"when": "always"'
                words.append(
                    f"{name}: stays {was}, as in the run that is continued, although encoding "
                    f"{verdict.nbytes / 1e6:.3g} MB now takes {verdict.coded_s * 1e3:.1f} ms and "
                    f"native {verdict.native_s * 1e3:.1f} ms; {change} changes that"
                )
            self.by_dimension[name] = stored
        for name in waiting:
            if name in state:
                self.by_dimension[name] = Decision(**state[name])
                was = "compressed" if self.by_dimension[name].pays else "native"
                words.append(f"{name}: {was}, as measured in the run that is continued")
        self._go_on()
        return words

    def _go_on(self) -> None:
        """Continue the resumed run's comparison, which was running or about to start."""
        under_way = {
            n: v.first for n, v in self.by_dimension.items() if v.first >= 0 and not v.checked
        }
        self.recheck = Recheck(list(under_way), min(under_way.values())) if under_way else None
        if self.recheck is not None:
            self.recheck.rounds = max(self.by_dimension[name].rounds for name in under_way)
        self._is_planned = any(verdict.first >= 0 for verdict in self.by_dimension.values())


def are_decisions(value: Any) -> bool:
    """Return whether ``value`` has the form of ``Verdicts.state``."""
    return isinstance(value, dict) and all(map(_is_decision, value.values()))


def _is_decision(value: Any) -> bool:
    """Return whether ``value`` has the required fields of a ``Decision``, with right types."""
    known = {field.name: field for field in fields(Decision)}
    needed = {name for name, field in known.items() if field.default is MISSING}
    return (
        isinstance(value, dict)
        and needed <= set(value) <= set(known)
        and all(
            isinstance(setting, (int, float) if "float" in str(known[name].type) else int)
            or (name == "gain_s" and setting is None)
            for name, setting in value.items()
        )
    )
