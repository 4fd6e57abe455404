"""Choose between encoded and raw versions, if the sender itself can measure the link.

A version is encoded, sent and decoded, one after the other:

    coded = encode + decode + its bytes / link raw = all bytes of changed pieces / link

Bytes, codec seconds and link speed are measured with every version. On a stream or a group, writing
takes as long as the link does. A folder is written at the speed of its disk, which says nothing
about the link to the receivers, so a folder's changes are always coded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

AUTO, STEPCODE, RAW_VALUES = "auto", "stepcode", "raw"
CHOICES = (AUTO, STEPCODE, RAW_VALUES)
#: consecutive versions whose estimates must favour the other choice before it is made
PATIENCE = 3
#: raw versions in a row after which one is encoded again, to measure encoding anew
AGAIN = 50
#: versions with fewer bytes do not measure the link
LEAST_NBYTES = 1 << 20


@dataclass(frozen=True)
class ReceiverTimes:
    """Seconds that the slowest receiver needed for the previous version, if receivers answer.

    Attributes:
        apply_s: seconds of writing the mirror.
        decode_s: seconds of decoding.
        late_s: seconds from the sender's last byte until the receiver had received everything.
    """

    apply_s: float
    decode_s: float
    late_s: float


@dataclass(frozen=True)
class CodecEstimate:
    """Seconds of a version encoded or raw, on a link of ``gbps`` Gb/s."""

    gbps: float
    coded_s: float
    raw_s: float


@dataclass
class PublishedCodec:
    """The codec of the next version; all ranks choose the same one, from the same figures.

    Attributes:
        setting: one of CHOICES.
        feels_link: whether writing to the destination takes as long as the link does.
        is_raw: whether the next version is sent unencoded.
        estimate: the estimate from which ``is_raw`` was decided; None before the first estimate.
    """

    setting: str
    feels_link: bool
    is_raw: bool = False
    estimate: CodecEstimate | None = None
    _rate: float | None = None  # bytes per second of the link
    _share: float = 1.0  # encoded bytes per raw byte
    _coding: float | None = None  # seconds of encoding and decoding per raw byte
    _copying: float = 0.0  # codec seconds per raw byte of a version sent raw
    _against: int = 0
    _since: int = 0
    _told: bool = False  # value of is_raw that the log last reported

    def __post_init__(self) -> None:
        self.is_raw = self.setting == RAW_VALUES

    def beginning(self) -> str:
        """Return what the log adds, at the start, to the state of the chain; may be empty."""
        if self.setting != AUTO or self.feels_link:
            return ""
        return (
            "; changes to a folder are always coded, as its disk says nothing of the receivers' "
            'link ("codec": "raw" sends them as they are)'
        )

    def note(
        self, said: Sequence[Mapping[str, Any]], receivers: ReceiverTimes | None, full: bool = False
    ) -> str | None:
        """Record a version's times, and choose the codec of the next version.

        ``said``: ``raw_nbytes``, ``nbytes``, ``codec_s`` and ``link_s`` of each rank's part. The
        parts of a stream are sent one after the other, so bytes and codec seconds are summed over
        ranks. The link's speed is that of the first rank, which writes, in the last version with
        enough bytes. If no receiver answers, decoding is assumed to take as long as encoding. A
        ``full`` version, encoded without a reference, only measures the link.

        Returns a sentence if the choice changes.
        """
        if self.setting != AUTO or not self.feels_link:
            return None
        keys = ("raw_nbytes", "nbytes", "codec_s")
        raw, sent, codec_s = (sum(statement[key] for statement in said) for key in keys)
        first = said[0]
        if sent >= LEAST_NBYTES and first["link_s"] and first["nbytes"]:
            late_s = receivers.late_s if receivers else 0.0
            self._rate = sent / (first["link_s"] * sent / first["nbytes"] + late_s)
        if full or raw < LEAST_NBYTES or self._rate is None:
            return None
        rate = self._rate
        each = (codec_s + (receivers.decode_s if receivers else codec_s)) / raw
        if self.is_raw:
            self._copying = each
        else:
            self._share, self._coding = sent / raw, each
        assert self._coding is not None, "the first version of auto is a coded one"
        self.estimate = CodecEstimate(
            rate * 8 / 1e9, raw * (self._share / rate + self._coding),
            raw * (1 / rate + self._copying),
        )  # fmt: skip
        return self._decide(self.estimate)

    def _decide(self, found: CodecEstimate) -> str | None:
        self._since = self._since + 1 if self.is_raw else 0
        if (found.raw_s < found.coded_s) == self.is_raw:
            self._against = 0
        else:
            self._against += 1
            if self._against < PATIENCE:
                return None
            self.is_raw, self._against, self._since = not self.is_raw, 0, 0
        if self._since >= AGAIN:  # try one coded version; its result alone may switch back to raw
            self.is_raw, self._against, self._since = False, PATIENCE - 1, 0
            return None
        if self.is_raw == self._told:
            return None
        self._told = self.is_raw
        times = f"{found.coded_s:.3g} s coded, {found.raw_s:.3g} s raw"
        link = f"publish: on this link ({found.gbps:.3g} Gb/s) a version takes {times}"
        if not self.is_raw:
            return f"{link}: changes are coded from now on"
        return (
            f"{link}: changes are sent as they are, and one version of {AGAIN} is coded to see "
            'whether that holds ("codec": "stepcode" always codes)'
        )
