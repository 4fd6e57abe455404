"""Measure whether encoding pays in each dimension of one engine; its ranks do it together.

dp and zero are timed before the first step, with messages like those of a step; tp and pp once
their messages have been observed. If a trial is close, real steps of the run are compared. The
engine's channels follow the verdicts in its state (``autotune/verdicts``).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.autotune import measured
from hybridcomp.autotune.measured import MeasuredLinks
from hybridcomp.autotune.memory_limits import has_room
from hybridcomp.autotune.remembered import Remembered
from hybridcomp.autotune.sum_trials import reductions
from hybridcomp.autotune.timing import confirm, judge, judge_seen
from hybridcomp.autotune.trials import StepTraffic, TrialGroup, agree_on, gathers, messages
from hybridcomp.autotune.verdicts import WARM
from hybridcomp.channels import memory_use
from hybridcomp.channels.accounting.memory import size
from hybridcomp.channels.channel import Channel
from hybridcomp.channels.engine_state import UNCOUNTED, EngineState
from hybridcomp.codecs import require_kernels
from hybridcomp.codecs.exact_steps import ExactSteps
from hybridcomp.codecs.words import DTYPE_NAMES
from hybridcomp.dimensions import DIMENSIONS, MEASURED_EARLY, ROWS, Dimension
from hybridcomp.job import small_messages
from hybridcomp.job.together import together

#: assumed number of parameters while it is unknown: more than any trial needs
UNKNOWN = 1 << 62
#: name of the operation in messages
MEASURING = "measuring whether encoding pays"
#: why a run compresses nothing
ALL_NATIVE = 'the link is faster than the codecs ("when": "auto")'


class OnlineTuner:
    """Measurements of one engine, and the decisions; issues collectives, sends no gradient.

    Methods documented as collectives are called by all ranks and return the same on all.
    """

    def __init__(self, state: EngineState, channels: Mapping[Dimension, Channel]) -> None:
        """Write decisions into ``state``, which ``channels`` share."""
        self._state, self._channels = state, channels
        config = state.config
        self._remembered = Remembered(config.digest() if config.remember else None)

    def run_autotune(
        self,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device,
        numel: int = UNKNOWN,
        sent: Mapping[Dimension, StepTraffic] | None = None,
        only: Collection[Dimension] = MEASURED_EARLY,
    ) -> list[str]:
        """Time dp and zero, as far as they have ``when: auto``, encoded and native; a collective.

        Call it after ``place``. ``group``: the ranks with this rank's parameters, which are
        ``numel`` values of ``dtype``. ``sent``: messages of a step, if known. ``only``: measure
        just these dimensions, if dp and zero differ in group or dtype. Returns messages for the
        user, the same on all ranks. Raises ConfigError if codecs cannot run on ``device``.
        """
        state = self._state
        state.is_weighed = True
        known = sent or {}
        groups = {name: self._channels[name].group(group) for name in known}
        memory_use.note(state, known, groups, dtype, device)
        if numel != UNKNOWN:
            state.replicas = dist.get_world_size(group)
            share = -(-numel // state.replicas)
            state.share = min(state.share or share, share)
        encoded = {name for (name, _), codec in state.policy.codecs.items() if codec is not None}
        if encoded - state.policy.low_rank and dist.get_world_size() > 1:
            require_kernels(device)
        wanted = [name for name in MEASURED_EARLY if name in only and name not in state.absent]
        names = [name for name in state.config.measured() if name in wanted]
        if not names or dist.get_world_size(group) < 2:
            return []
        place = TrialGroup(self._channels["zero"].group(group), dtype, device)
        common = small_messages.least(torch.tensor(numel, device=device), group)
        with together(MEASURING), state.gains.measuring():
            told = self._recall(names, group, int(common), known, place)
            anew = [name for name in names if name not in state.verdicts.by_dimension]
            links = None
            if anew and state.config.remember:
                links = measured.recall(device, group)
            confirmed = self._judge(anew, group, int(common), known, place, links)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the buffers of the trials are as large as the messages
        self._note_verdicts()
        told += [state.verdicts.by_dimension[name].describe(name) for name in anew]
        if confirmed and links is not None:
            told.append(links.describe(confirmed))
        return told + self._nothing_left()

    def _recall(
        self,
        names: Iterable[Dimension],
        group: dist.ProcessGroup | None,
        numel: int,
        sent: Mapping[Dimension, StepTraffic],
        place: TrialGroup,
    ) -> list[str]:
        """Restore remembered verdicts for messages of ``names``; a collective over the job."""
        state = self._state
        nodes = None if state.nodes is None else state.nodes.units
        messages = {
            name: [str(place.dtype), numel, nodes, asdict(sent[name]) if name in sent else None]
            for name in names
        }
        found, told = self._remembered.recall(messages, state.numels, place.device, group)
        state.verdicts.by_dimension.update(found)
        return told

    def _judge(
        self,
        names: Iterable[Dimension],
        group: dist.ProcessGroup | None,
        numel: int,
        sent: Mapping[Dimension, StepTraffic],
        place: TrialGroup,
        links: MeasuredLinks | None,
    ) -> list[Dimension]:
        """Run the trials of each of ``names`` (dp, zero) and keep its verdict; a collective.

        ``links``: the table of ``hybridcomp measure`` for these machines, if there is one. Returns
        the names whose verdict comes from the table, after short trials have confirmed it.
        """
        state, dtype, device = self._state, place.dtype, place.device
        levels, confirmed = 1 if place.group.levels is None else 2, []
        for name in names:
            known = sent.get(name)
            whole = agree_on(known, group, device)
            summed = ROWS[name].summed
            if known is None or not whole:
                known = StepTraffic((numel,), "sum" if summed else "gather")
            codec = state.policy.codecs[name, "forward"]
            assert codec is not None, "the block was checked"
            if name == "zero" and state.config.zero.keeps_copy:
                codec = ExactSteps()  # sends copies from the second gather on
            trials = gathers(codec, place)
            if summed:
                bits = state.residuals.bits if self._channels[name].error_feedback else 0
                trials = reductions(codec, bits, place)
            found = None
            if links is not None and whole:
                at = functools.partial(
                    links.seconds, codec=codec.spec, dtype=DTYPE_NAMES[dtype], levels=levels
                )
                found = confirm(trials, known, at, dtype.itemsize, device)
            confirmed += [name] if found else []
            state.verdicts.by_dimension[name] = found or judge(
                trials, known, dtype.itemsize, device, whole
            )
            del trials
        return confirmed

    def tune_from_profile(self, device: torch.device) -> list[str]:
        """Time tp and pp, if still undecided, with messages like those observed.

        A collective. Returns messages for the user, the same on all ranks.
        """
        state = self._state
        waits = state.seen.waiting and state.step > state.config.start_step
        if not waits or not state.seen.is_due():
            return []
        plans = state.seen.plans()
        stated = {name: seen.stated for name, seen in plans.items() if seen.nbytes}
        with together(MEASURING):
            found, told = self._remembered.recall(stated, state.numels, device)
            for name, seen in plans.items():
                if name not in found:
                    with state.gains.measuring():
                        found[name] = judge_seen(messages(seen.plan, device), seen.nbytes, device)
                    told.append(found[name].describe(name))
        for name in plans:
            state.seen.forget(name)
        state.verdicts.by_dimension.update(found)
        self._note_verdicts()
        return told + (self._nothing_left() if told else [])

    def compare(self, device: torch.device) -> list[str]:
        """Compare steps of the run where a trial was close; a collective when the comparison ends.

        Returns messages for the user, the same on all ranks.
        """
        state = self._state
        if not state.verdicts.by_dimension or state.step < state.config.start_step + WARM:
            return []
        if state.pace.is_measuring:
            return []  # offload varies these steps, which would blur the comparison
        if not state.verdicts.may_compare:
            return self._remembered.check(state.step, device, state.verdicts)
        without, told = set(state.guard.trips), []
        allocates = state.verdicts.begins("dp") and state.verdicts.native("dp", state.step)
        allocates = allocates and state.config.error_feedback("dp")
        if allocates and not has_room(nbytes := memory_use.feedback_nbytes(state), device):
            without.add("dp")
            needed = f"{size(nbytes)} for error feedback"
            told.append(f"dp: stays native: to compare steps, {needed} would be needed")
        compared = state.verdicts.compare(state.step, without, device)
        self._note_verdicts()
        return told + compared + (self._nothing_left() if compared else [])

    def unmeasured(self) -> list[str]:
        """Return a message about dimensions that are compressed without a measurement."""
        state = self._state
        if state.is_weighed:
            return []
        early = [n for n in state.config.measured() if n in MEASURED_EARLY]
        here = [n for n in early if n not in state.absent]
        why = "not timed, as this job makes its groups in a way of its own"
        return [f"{', '.join(here)}: compressed, {why}"] if here else []

    def idle_reason(self, step: int, sent: Collection[Dimension] | None = None) -> str:
        """Return why a run that ends at ``step`` has encoded no message.

        ``sent``: dimensions whose messages were counted; None: unknown.
        """
        state = self._state
        named = [n for n in DIMENSIONS if self._channels[n].active]
        here = [n for n in named if n not in state.absent]
        if not here and state.config.sync.acts:
            return "no meeting was held"
        if not named and state.config.kept_native:
            return f"{', '.join(sorted(state.config.kept_native))} native, as said at the start"
        if not named:
            return "the block names no codec for any dimension"
        if not here:
            return f"the job sends nothing in the dimensions of the block ({', '.join(named)})"
        alone = dist.is_initialized() and dist.get_world_size() < 2
        if alone and state.config.sync.jobs is None:
            return "one rank sends nothing"
        reasons: dict[str, list[str]] = {}
        for name in here:
            reasons.setdefault(self._idle(name, step, sent), []).append(name)
        if len(reasons) == 1:
            return next(iter(reasons))
        return "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())

    def _idle(self, name: Dimension, step: int, sent: Collection[Dimension] | None) -> str:
        """Return why no message of a dimension with a codec was encoded."""
        state = self._state
        if name in state.guard.trips:
            return f"the guard has made it native since step {state.guard.trips[name].step}"
        if name in state.verdicts.by_dimension and state.verdicts.native(name, step):
            return ALL_NATIVE
        if state.passes > (UNCOUNTED if step else 1):
            return f"no optimizer step was counted in the last {state.passes} passes with gradients"
        small = f"no message had min_bytes, {state.config.min_bytes}, and a dtype that codecs take"
        if not step:
            counted = bool(sent) and not state.config.start_step
            return small if counted else "it ended before its first optimizer step"
        if step <= state.config.start_step:
            return f"it ended at step {step}, and start_step is {state.config.start_step}"
        if sent is not None and name not in sent:
            return "no meeting was held" if name == "sync" else "it sent no message"
        if name in state.seen.counts:
            return 'it ended before "when": "auto" had timed its messages'
        return small

    def _nothing_left(self) -> list[str]:
        """Return a message that nothing is compressed, once no verdict can change any more."""
        state = self._state
        if self.idle_reason(state.step) != ALL_NATIVE or state.verdicts.may_change:
            return []
        return [f'nothing is compressed in this run: {ALL_NATIVE}; "when": "always" compresses']

    def resume(self, stored: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Restore the decisions of a checkpoint; return notes for the user on what changed."""
        state = self._state
        told = state.verdicts.restore(stored, state.seen.waiting)
        for name in state.verdicts.by_dimension:
            state.seen.forget(name)
        if stored:
            self._remembered.stop()
        self._note_verdicts()
        return told

    def open_step(self, device: torch.device) -> bool:
        """Record the first forward pass of a step; return whether later steps are timed as well."""
        state = self._state
        if state.verdicts.recheck is not None:
            state.verdicts.recheck.open(state.step, device)
        self._remembered.open(state.step, device)
        return state.verdicts.may_compare or self._remembered.is_due

    def reopen_step(self) -> None:
        """Record that the step was skipped; it begins again with the next first forward pass."""
        state = self._state
        if state.verdicts.recheck is not None:
            state.verdicts.recheck.reopen(state.step)
        self._remembered.reopen(state.step)

    def _note_verdicts(self) -> None:
        """Record in the ledger which dimensions are native, and since which step."""
        state, ledger = self._state, self._state.ledger
        for name, verdict in state.verdicts.by_dimension.items():
            if name in state.guard.trips:
                continue
            ledger.native_since.pop(name, None)
            if not verdict.pays:
                ledger.native_since[name] = verdict.since
                ledger.encoded_since.pop(name, None)
            elif verdict.since:
                ledger.encoded_since[name] = verdict.since
