"""Report the ledger: progress line, JSONL file, and events for monitors."""

from __future__ import annotations

import gc
import itertools
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridcomp.channels import Channels
from hybridcomp.channels.accounting.ledger import KEYS, Entry, Key, entries_of
from hybridcomp.channels.accounting.ledger_file import JsonLines
from hybridcomp.codecs import check_payloads
from hybridcomp.collectives import check_headers
from hybridcomp.config import CompressionConfig, LedgerConfig
from hybridcomp.dimensions import ONE_WAY
from hybridcomp.job import small_messages
from hybridcomp.log import say
from hybridcomp.metric_names import (
    CONFIG_BLOCK,
    CONFIG_CODECS,
    FIGURES,
    PREFIX,
    RESIDUAL_NORM,
    SAVED_S,
    TIME,
    TOTALS,
    event_name,
    follower_line,
)
from hybridcomp.session.closing import Account, close_at_the_end, open_account, opened
from hybridcomp.session.followers import StepFollower, ToldFollower

#: name and figure, as DeepSpeed's monitors take them
Event = tuple[str, float]


class Reporter:
    """Sum the ledgers of all ranks at intervals; print, write and return the figures.

    ``report`` is a collective: every rank calls it at the same step. A reporter's file is closed
    when the reporter is garbage-collected, or else when the process ends.
    """

    _jsonl: JsonLines | None = None
    _account: Account | None = None
    _number = 0  # of the model, among those of this process; 0: closed

    def __init__(
        self,
        channels: Channels,
        jsonl: Path | None,
        device: torch.device,
        followers: Sequence[StepFollower] = (),
    ) -> None:
        """Hold the channels; ``followers``: followers to mention in the job's last line."""
        self._followers = followers
        self._channels = channels
        self._device = device
        self._totals: dict[Key, Entry] = {key: Entry() for key in KEYS}
        self._used: dict[Key, dict[str, None]] = {}
        self._step = 0
        self._untaken: list[Event] = []
        if dist.get_rank() == 0:
            if jsonl is not None:
                self._jsonl = JsonLines(jsonl)
            self._account = open_account(channels.gains, "" if jsonl is None else str(jsonl))
            if numbers():
                gc.collect()  # engines hang in reference cycles: deleted ones do not count
            self._number = next(n for n in itertools.count(1) if n not in numbers())
            close_at_the_end(self)

    @property
    def whose(self) -> str:
        """Return the beginning of a line about this model; "" if no other model reports."""
        return f"model {self._number}, " if len(numbers()) > 1 else ""

    def report(self, step: int, followers: Iterable[StepFollower] = ()) -> list[Event]:
        """Sum the interval over the job; rank 0 prints and writes. ``followers`` add their rows.

        Returns the events on every rank, since any rank may log them. Raises CodecError if a GPU
        has met a damaged payload or an unexpected header since the last check: the report waits for
        the device anyway.
        """
        check_payloads()
        check_headers()
        ledger = self._channels.ledger
        ledger.drain(wait=True)
        self._channels.late_samples.read()
        residual = self._channels.residuals.norm() ** 2
        vector = torch.cat(
            [ledger.vector(), torch.tensor([residual], dtype=torch.float64, device="cpu")]
        )
        used = ledger.used
        ledger.restart()
        vector = small_messages.total(vector.to(self._device)).cpu()
        interval = entries_of(vector[:-1])
        for key, entry in interval.items():
            self._totals[key].add(entry)
            self._used.setdefault(key, {}).update(used.get(key, {}))
        self._step = step
        if self._account is not None:
            self._account.step = step
            self._account.add(interval)
        rows = ledger.rows(interval, used)
        norm = float(vector[-1]) ** 0.5
        more = {
            follower.name: dict(row)
            for follower in followers
            if (row := follower.row()) is not None
        }
        own = f"{self.whose}{line(step, rows, dist.get_world_size())}"
        say("; ".join([own, *map(follower_line, more.items())]))
        totals = self._sums()
        if self._jsonl is not None:
            now = round(time.time(), 3)
            record = {
                "step": step,
                TIME: now,
                RESIDUAL_NORM: norm,
                **totals,
                **more,
                "dimensions": rows,
            }
            self._jsonl.write(record)
        describe_run(self._channels.config)
        self._untaken = [*events_of(rows, norm), *((PREFIX + n, v) for n, v in totals.items())]
        self._untaken += [
            (event_name(name, "forward", figure, True), value)
            for name, row in more.items()
            for figure, value in row.items()
        ]
        return self._untaken

    def _sums(self) -> dict[str, float]:
        """Return the bytes sent and seconds saved since the run began, by figure name."""
        entries = self._totals.values()
        raw, wire = sum(e.raw_nbytes for e in entries), sum(e.wire_nbytes for e in entries)
        sums = dict(zip(TOTALS, (raw / 1e6, wire / 1e6), strict=True))
        gains = self._channels.gains
        return {**sums, SAVED_S: gains.net_s} if gains.by_dimension else sums

    def take(self) -> list[Event]:
        """Return the last report's events, only once; for readers that log at other steps."""
        events, self._untaken = self._untaken, []
        return events

    def close(self) -> None:
        """Write the totals as the last record; harmless when called twice.

        The totals lack messages sent after the last report: at the end ranks can no longer sum.
        """
        if self._account is not None:
            step = self._channels.step
            interval = self._channels.ledger.interval
            sent = {name for entries in (self._totals, interval)
                    for (name, _), entry in entries.items() if entry.messages}  # fmt: skip
            idle = self._channels.tuner.idle_reason(step, sent)
            also = [
                follower.told()
                for follower in self._followers
                if isinstance(follower, ToldFollower)
            ]
            self._account.close(interval, idle, filter(None, also))
            self._account = None
            self._number = 0
        if self._jsonl is not None:
            ledger = self._channels.ledger
            rows = ledger.rows(self._totals, self._used)
            now = round(time.time(), 3)
            record: dict[str, Any] = {
                "summary": True, "step": self._step, TIME: now, "dimensions": rows
            }  # fmt: skip
            missing = round(sum(entry.messages for entry in ledger.interval.values()))
            if missing:  # messages of an evaluation at the end, or of steps after the last report
                record["unreported_messages"] = missing
            if missing and not self._step:
                say(
                    "the run ended before its first report, so the ledger's summary is empty. One "
                    "is made every compression.ledger.every steps (default: DeepSpeed's "
                    "steps_per_print, else 10); set it to no more than the number of steps"
                )
            self._jsonl.write(record)
            self._jsonl.close()
            self._jsonl = None

    def __del__(self) -> None:
        self.close()


def numbers() -> set[int]:
    """Return the numbers of this process's models that still report."""
    return {reporter._number for reporter in opened(Reporter)} - {0}


def say_kept(block: CompressionConfig | None) -> None:
    """Tell the user that models keep their block, where ``block`` is a new one of the process."""
    new = None if block is None else block.model_dump()
    models = [one for one in opened(Reporter) if one._number]
    kept = sum(one._channels.config.model_dump() != new for one in models)
    if kept:
        say(
            f"hybridcomp.install: {kept} model(s) that are attached keep the block of before; "
            "hybridcomp.detach(model) and hybridcomp.attach(model, block) change it"
        )


def report_interval(ledger: LedgerConfig, steps_per_print: float | None) -> int:
    """Return the number of optimizer steps between two reports, at least 1.

    Accelerate, and with it Hugging Face's Trainer, writes ``steps_per_print: inf`` to silence
    DeepSpeed's line, and without the key DeepSpeed prints no line. Neither of the two is meant to
    turn off our report.
    """
    if ledger.every is not None or not steps_per_print or math.isinf(steps_per_print):
        return ledger.interval
    return int(steps_per_print)


def line(
    step: int, rows: Mapping[str, Mapping[str, Mapping[str, Any]]], ranks: int | None = None
) -> str:
    """Format the progress line of an interval; ``ranks``: number of ranks in its sums."""
    parts = []
    for dimension, ways in rows.items():
        for direction, row in ways.items():
            name = dimension if dimension in ONE_WAY else f"{dimension}.{direction}"
            ratio = f"{row['ratio']:.2f}x" if row["ratio"] else "-"
            error = f", error {row['error']:.1e}" if row["error"] is not None else ""
            left = row["native_messages"]
            if row["outside_bound"]:
                error += f", {row['outside_bound']} sampled values OUTSIDE THE BOUND"
            native = f", {left} of {row['messages']} messages native" if left else ""
            codec = row["codec"]
            for mode in ("native", "encoded"):
                if row[f"{mode}_since"] is not None:
                    codec += f", {mode} since step {row[f'{mode}_since']}"
            between = ""
            if row["inter_ratio"] is not None:
                between = (
                    f", between nodes {row['inter_ratio']:.2f}x "
                    f"({row['inter_MB']:.2f} of {row['inter_raw_MB']:.2f} MB)"
                )
            parts.append(
                f"{name} {codec} {ratio} ({row['wire_MB']:.2f} of {row['raw_MB']:.2f} MB"
                f"{_times(row, ranks)}{error}{native}{between})"
            )
    return f"step {step}: " + ("; ".join(parts) or "nothing was sent")


def _times(row: Mapping[str, Any], ranks: int | None) -> str:
    """Format the seconds of coding and waiting; "" if no step of the interval was timed."""
    if row["codec_ms"] is None:
        return ""
    whose = "device " if row["clock"] == "device" else ""
    of = "" if ranks is None else f" over {ranks} ranks"
    return f", {whose}codec {row['codec_ms']:.0f} ms, wait {row['wait_ms']:.0f} ms{of}"


def events_of(rows: Mapping[str, Mapping[str, Mapping[str, Any]]], norm: float) -> list[Event]:
    """Return one interval's figures as events (name, value); see ``metric_names``."""
    events: list[Event] = []
    for dimension, ways in rows.items():
        for direction, row in ways.items():
            events += [
                (event_name(dimension, direction, figure, dimension in ONE_WAY), float(row[figure]))
                for figure in FIGURES
                if row[figure] is not None
            ]
    if norm:
        events.append((event_name("dp", "forward", RESIDUAL_NORM, True), norm))
    return events


def describe_run(config: CompressionConfig | None) -> None:
    """Write the block and its codecs into the config of this process's W&B run, where it has one.

    DeepSpeed, Megatron or GPT-NeoX has created the run; this function creates none. ``config``
    None: no block.
    """
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is None or CONFIG_CODECS in run.config:
        return
    block, codecs = None, {}
    if config is not None:
        block = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
        named = ((f"{name}/{way}", codec) for (name, way), codec in config.codecs().items())
        codecs = {name: codec.spec for name, codec in named if codec is not None}
    # GPT-NeoX writes its parsed block under the same name
    run.config.update({CONFIG_BLOCK: block, CONFIG_CODECS: codecs}, allow_val_change=True)
