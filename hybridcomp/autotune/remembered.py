"""Reuse the decisions of a job's last run on the same machines, and verify them during the run.

Such a run sends no trial messages and spends no steps in native mode on comparisons:

1. ``recall`` replaces each trial: every rank sends all ranks a hash of its messages and links, rank
   0 also the contents of the job's file. All ranks adopt the verdicts whose saved hash is equal;
2. ``check`` times the first warm steps of the run. If they are faster or slower than in the run
   that found the verdicts, steps are compared as after a close trial;
3. rank 0 writes new measurements, with the seconds of the steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.autotune import remembered_file
from hybridcomp.autotune.recheck import StepClock
from hybridcomp.autotune.remembered_file import FoundVerdicts
from hybridcomp.autotune.verdicts import Decision, Verdicts
from hybridcomp.dimensions import Dimension
from hybridcomp.job.agreement import tell, versions
from hybridcomp.job.devices import device_name

#: number of steps whose median time is compared with the previous run's
STEPS = 8
#: factor, up or down, by which step times may differ before the verdicts are doubted
MOVED = 1.15
#: saved fields of a verdict, without the steps at which it changed
KEPT = ("pays", "nbytes", "native_s", "coded_s", "messages", "of", "gain_s")
#: environment variables that choose the network of a backend
NETWORK = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_NET")


class Remembered:
    """Adopt verdicts of an earlier run, and save this run's for later runs."""

    def __init__(self, block: str | None) -> None:
        """Store ``block``, the digest of the block; None: nothing is remembered."""
        self._block = block
        self._path: Path | None = None
        self._clock: StepClock | None = None
        self._facts: dict[Dimension, str] = {}
        self._found = FoundVerdicts()
        self._taken: list[Dimension] = []
        self.is_due = False  # whether steps remain to be timed

    def recall(
        self,
        messages: Mapping[Dimension, Any],
        model: Mapping[str, int],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> tuple[dict[Dimension, Decision], list[str]]:
        """Return the verdicts that hold for ``messages``, with sentences; a collective.

        Args:
            messages: for each dimension, a JSON description that identifies this rank's messages.
            model: number of values of each parameter, by name.
            device: device of the messages.
            group: group of the messages.
        """
        if self._block is None or not messages:
            return {}, []
        said = tell(self._statement(messages, model, device, group), what="remembered verdicts")
        hosts = [row["host"] for row in said]
        here = [hosts.index(host) for host in hosts]
        facts = {name: hashed([here, [row["sent"][name] for row in said]]) for name in messages}
        self._facts.update(facts)
        self._clock = None
        self.is_due, file = said[0]["keeps"], said[0]["found"]
        if not isinstance(file, dict):
            return {}, [f"measured anew: {file}"] if file else []
        self._found = FoundVerdicts(**file)
        same = [name for name in messages if self._found.facts.get(name) == facts[name]]
        self._taken += same
        taken = {name: Decision(**self._found.verdicts[name], checked=True) for name in same}
        words = [_told(name, verdict, self._found.day) for name, verdict in taken.items()]
        others = [n for n in messages if n not in same and n in self._found.facts]
        if others:
            why = "the machines, groups or messages are not those of the last run"
            words.append(f"{', '.join(others)}: measured anew, as {why}")
        return taken, words

    def _statement(
        self,
        messages: Mapping[Dimension, Any],
        model: Mapping[str, int],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> dict[str, Any]:
        """Return this rank's statement: hashes of its messages; on rank 0 also the file."""
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        where = transport(device, group)
        sent = {name: hashed([where, len(ranks), ranks[0], row]) for name, row in messages.items()}
        verdicts: Any = None
        if dist.get_rank() == 0:
            job = [self._block, dist.get_world_size(), where[:2], sorted(model.items())]
            self._path = remembered_file.path_of(hashed(job))
            verdicts = None if self._path is None else remembered_file.read(self._path)
            verdicts = asdict(verdicts) if isinstance(verdicts, FoundVerdicts) else verdicts
        keeps = self._path is not None
        return {"host": platform.node(), "sent": sent, "keeps": keeps, "found": verdicts}

    def stop(self) -> None:
        """Stop checking and writing, since the decisions now come from a checkpoint."""
        self.is_due = False

    def open(self, step: int, device: torch.device) -> None:
        """Record the first forward pass of ``step``."""
        if self._clock is not None:
            self._clock.open(step, device)

    def reopen(self, step: int) -> None:
        if self._clock is not None:
            self._clock.reopen(step)

    def check(self, step: int, device: torch.device, verdicts: Verdicts) -> list[str]:
        """Time the steps before ``step`` of a warm run; a collective at the last of them.

        Call it while no steps are compared. It marks adopted verdicts as doubtful if step times
        have changed. Returns messages for the user; only rank 0 reports the file.
        """
        if not self.is_due:
            return []
        if self._clock is None:
            self._clock = StepClock(step, STEPS)
            return []
        clock = self._clock
        clock.close(step, device)
        if step < clock.stop:
            return []
        self._clock = None
        seconds = [step_s for step_s in clock.slowest(clock.first, clock.stop, device) if step_s]
        self.is_due = False
        if len(seconds) < STEPS // 2:
            return []
        now, was = statistics.median(seconds), self._found.step_s if self._taken else 0.0
        if was and not was / MOVED <= now <= was * MOVED:
            names, self._taken = verdicts.doubt(self._taken), []
            self.is_due = True
            figures = f"steps take {now * 1e3:.1f} ms, and took {was * 1e3:.1f} ms"
            return [f"{', '.join(names)}: {figures} on {self._found.day}: compared anew"]
        return self._write(now, verdicts)

    def _write(self, step_s: float, verdicts: Verdicts) -> list[str]:
        """Have rank 0 write verdicts that no file contains yet."""
        known = {n: v for n, v in verdicts.by_dimension.items() if n in self._facts and v.nbytes}
        if self._path is None or not set(known) - set(self._taken):
            return []
        rows: dict[str, dict[str, Any]] = {
            name: {key: getattr(verdict, key) for key in KEPT} for name, verdict in known.items()
        }
        facts: dict[str, str] = {name: self._facts[name] for name in known}
        problem = remembered_file.write(self._path, FoundVerdicts(step_s, facts, rows))
        names = ", ".join(known)
        if problem:
            return [f"{names}: not remembered for the next run: {problem}"]
        return [f"{names}: remembered for the next run on these machines ({self._path})"]


def _told(name: Dimension, verdict: Decision, day: str) -> str:
    how = "compressed" if verdict.pays else "native"
    figures = (
        f"{verdict.nbytes / 1e6:.3g} MB took {verdict.native_s * 1e3:.1f} ms natively and "
        f"{verdict.coded_s * 1e3:.1f} ms encoded"
    )
    todo = 'checked in passing; "remember": false measures anew'
    return f"{name}: {how}, as found on {day} on the same machines ({figures}; {todo})"


def transport(device: torch.device, group: dist.ProcessGroup | None) -> list[Any]:
    """Return facts that decide the seconds of messages in ``group``, as JSON values."""
    network = {name: os.environ.get(name) for name in NETWORK}
    return [device_name(device), str(dist.get_backend(group)), network, versions()]


def hashed(facts: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
