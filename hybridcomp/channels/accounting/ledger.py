"""Ledger: count each dimension's bytes, those native would have sent, and seconds of encoding.

Bytes are those passed to torch.distributed for other ranks, so that they can be compared with the
counters of the network card. ``ratio = raw / wire``, higher is better.

Seconds are host time where the host encodes. On a GPU they are device time of the timed steps
(``Channels.timing``), scaled to the whole interval by the bytes of the messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

import torch

from hybridcomp import dimensions
from hybridcomp.collectives import Meter
from hybridcomp.collectives.wire.device_clock import DeviceClock
from hybridcomp.dimensions import Dimension, Key

__all__ = ["KEYS", "Entry", "Key", "Ledger", "entries_of"]

#: rows of ``hybridcomp.generate``'s messages, which have their own codecs, by dimension and
#: direction
_SENT = ("dp", "tp", "pp", "offload")
GENERATED = cast("tuple[Key, ...]", tuple(("generate", name) for name in _SENT))
KEYS = dimensions.KEYS + GENERATED


@dataclass
class Entry:
    """Totals of one dimension and direction. All fields add up over messages and ranks."""

    messages: float = 0.0  # messages, including those left native
    native: float = 0.0  # how many of the messages stayed native
    raw_nbytes: float = 0.0  # bytes that native would have sent to other ranks
    wire_nbytes: float = 0.0  # bytes sent to other ranks
    codec_s: float = 0.0  # host seconds of encoding and decoding
    wait_s: float = 0.0
    error_sq: float = 0.0  # sampled: squared L2 of (decoded - values)
    value_sq: float = 0.0  # sampled: squared L2 of values
    inter_raw_nbytes: float = 0.0  # encoded messages: bytes native would have sent to other nodes
    inter_nbytes: float = 0.0  # encoded messages: bytes sent to other nodes
    outside: float = 0.0  # sampled: elements beyond their error bound; must stay 0
    device_nbytes: float = 0.0  # part of raw_nbytes that was encoded on a GPU
    timed_nbytes: float = 0.0  # part of device_nbytes in timed steps
    device_codec_s: float = 0.0  # seconds on the streams in timed steps
    device_wait_s: float = 0.0

    def add(self, other: Entry) -> None:
        """Add ``other`` field by field."""
        for name in FIELDS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def ratio(self) -> float | None:
        """Return raw / wire, None where nothing was sent."""
        return self.raw_nbytes / self.wire_nbytes if self.wire_nbytes else None

    @property
    def error(self) -> float | None:
        """Return the sampled relative L2 error of one encoding, None where nothing was sampled."""
        return (self.error_sq / self.value_sq) ** 0.5 if self.value_sq else None

    @property
    def inter_ratio(self) -> float | None:
        """Return native over encoded bytes between nodes; None where none crossed."""
        # None for islands, which have no native messages between nodes to compare with
        known = self.inter_nbytes and self.inter_raw_nbytes
        return self.inter_raw_nbytes / self.inter_nbytes if known else None

    @property
    def clock(self) -> str:
        """Return whether ``seconds`` is time of the device ("device") or of the host ("host")."""
        return "device" if self.device_nbytes else "host"

    def seconds(self) -> tuple[float | None, float | None]:
        """Return seconds of encoding and waiting; None if a GPU encoded and no step was timed."""
        if not self.device_nbytes:
            return self.codec_s, self.wait_s
        if not self.timed_nbytes:
            return None, None
        scale = self.device_nbytes / self.timed_nbytes
        return self.codec_s + scale * self.device_codec_s, self.wait_s + scale * self.device_wait_s

    def row(self, codec: str) -> dict[str, Any]:
        """Return the row in JSON form: megabytes (1e6), milliseconds."""
        codec_s, wait_s = self.seconds()
        return {
            "codec": codec,
            "messages": round(self.messages),
            "native_messages": round(self.native),
            "raw_MB": self.raw_nbytes / 1e6,
            "wire_MB": self.wire_nbytes / 1e6,
            "ratio": self.ratio,
            "codec_ms": None if codec_s is None else codec_s * 1e3,
            "wait_ms": None if wait_s is None else wait_s * 1e3,
            "clock": self.clock,
            "error": self.error,
            "inter_raw_MB": self.inter_raw_nbytes / 1e6,
            "inter_MB": self.inter_nbytes / 1e6,
            "inter_ratio": self.inter_ratio,
            "outside_bound": round(self.outside),
        }


FIELDS: tuple[str, ...] = tuple(f.name for f in fields(Entry))


@dataclass
class Ledger:
    """Counters of one engine on this rank since the last ``restart``."""

    codecs: Mapping[Key, str] = field(default_factory=dict)  # codec specs, for the rows
    # codec specs of the messages that were sent
    used: dict[Key, dict[str, None]] = field(default_factory=dict)
    interval: dict[Key, Entry] = field(default_factory=lambda: {key: Entry() for key in KEYS})
    #: dimensions that guard or autotune made native: the first step without their codec
    native_since: dict[Dimension, int] = field(default_factory=dict)
    #: dimensions that are encoded after native steps: the first step with their codec
    encoded_since: dict[Dimension, int] = field(default_factory=dict)
    clocks: dict[torch.device, DeviceClock] = field(default_factory=dict)

    def device_clock(self, device: torch.device) -> DeviceClock:
        """Return the clock of the timed steps of a GPU."""
        return self.clocks.setdefault(device, DeviceClock())

    def drain(self, wait: bool = False) -> None:
        """Add up the device times that are ready to be read; with ``wait`` all of them."""
        for clock in self.clocks.values():
            clock.drain(wait)

    def record(self, key: Key, raw_nbytes: int, meter: Meter, inter: float = 0.0) -> None:
        """Count one encoded message; ``inter``: the share of native bytes that crosses nodes."""
        entry = self.interval[key]
        entry.messages += 1
        entry.raw_nbytes += raw_nbytes
        entry.wire_nbytes += meter.wire_nbytes
        entry.inter_raw_nbytes += inter * raw_nbytes
        entry.inter_nbytes += meter.inter_nbytes
        if meter.clock.on_device:
            entry.device_nbytes += raw_nbytes
            entry.timed_nbytes += raw_nbytes if meter.clock.timed else 0
        self.record_time(key, meter)
        self.used.setdefault(key, {}).update(meter.used)

    def record_extra(self, key: Key, meter: Meter) -> None:
        """Count bytes and time of a message that upstream does not send, such as digests."""
        entry = self.interval[key]
        entry.wire_nbytes += meter.wire_nbytes
        entry.inter_nbytes += meter.inter_nbytes
        self.record_time(key, meter)

    def record_time(self, key: Key, meter: Meter) -> None:
        """Add the time of a message, or of a part of one, whose bytes are counted elsewhere."""
        entry = self.interval[key]
        entry.codec_s += meter.codec_s
        entry.wait_s += meter.wait_s
        timed = meter.clock.timed
        if timed is not None:
            timed.land(meter.spans, entry)

    def record_native(self, key: Key, wire_nbytes: int, raw_nbytes: int | None = None) -> None:
        """Count one native message; ``raw_nbytes``: bytes without hybridcomp, if different."""
        entry = self.interval[key]
        entry.messages += 1
        entry.native += 1
        entry.raw_nbytes += wire_nbytes if raw_nbytes is None else raw_nbytes
        entry.wire_nbytes += wire_nbytes

    def add_generated(self, other: Ledger) -> None:
        """Add the counters that ``hybridcomp.generate`` kept in ``other``, as separate rows."""
        for row, name in zip(GENERATED, _SENT, strict=True):
            for key in (one for one in dimensions.KEYS if one[0] == name):
                self.interval[row].add(other.interval[key])
                self.used.setdefault(row, {}).update(other.used.get(key, {}))

    def record_error(self, key: Key, error_sq: float, value_sq: float, outside: int = 0) -> None:
        """Add one sample of an encoding's error; ``outside``: elements beyond their bound."""
        entry = self.interval[key]
        entry.error_sq += error_sq
        entry.value_sq += value_sq
        entry.outside += outside

    def vector(self) -> torch.Tensor:
        """Return the interval as one float64 vector of fixed layout, for a sum over ranks."""
        return torch.tensor(
            [[getattr(self.interval[key], name) for name in FIELDS] for key in KEYS],
            dtype=torch.float64,
            device="cpu",
        ).reshape(-1)

    def restart(self) -> None:
        """Begin a new interval."""
        self.interval = {key: Entry() for key in KEYS}
        self.used = {}

    def rows(
        self, entries: Mapping[Key, Entry], used: Mapping[Key, Mapping[str, None]] | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return ``{dimension: {direction: row}}`` of the entries that have messages.

        ``used``: specs of the codecs of these messages, None for this interval's.
        """
        specs = self.used if used is None else used
        rows: dict[str, dict[str, Any]] = {}
        for (dimension, direction), entry in entries.items():
            if entry.messages:
                key = (dimension, direction)
                codec = " + ".join(specs.get(key, ())) or self.codecs.get(key, "none")
                row = {
                    **entry.row(codec),
                    "native_since": self.native_since.get(dimension),
                    "encoded_since": self.encoded_since.get(dimension),
                }
                rows.setdefault(dimension, {})[direction] = row
        return rows


def entries_of(vector: torch.Tensor) -> dict[Key, Entry]:
    """Return the entries of a vector of ``Ledger.vector``."""
    table = vector.reshape(len(KEYS), len(FIELDS)).tolist()
    return {key: Entry(*values) for key, values in zip(KEYS, table, strict=True)}
