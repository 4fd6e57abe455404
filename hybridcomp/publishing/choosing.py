"""Choose between steps and raw values for a destination whose link the sender itself feels.

A version takes as long as it is encoded, sent and decoded, one after the other:

    coded = encode + decode + its bytes / link
    raw   = all bytes of what changed / link

Bytes, seconds of the codec and the link are measured with every version. On a stream and over a
group the time of writing is the time of the link; a folder is written at the speed of a disk, which
says nothing about the link to the receivers: there changes are always coded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

AUTO, STEPCODE, RAW_VALUES = "auto", "stepcode", "raw"
CHOICES = (AUTO, STEPCODE, RAW_VALUES)
#: versions in a row that have to speak for the other way before it is taken
PATIENCE = 3
#: versions as they are before one is coded again, to see how well changes are coded by now
AGAIN = 50
#: fewer bytes say nothing about a link
LEAST_NBYTES = 1 << 20


@dataclass(frozen=True)
class ReceiverTimes:
    """Seconds that the slowest receiver needed for the version before, where receivers answer.

    Attributes:
        apply_s: of writing the mirror.
        decode_s: of decoding.
        late_s: from the sender's last byte on, until it had all.
    """

    apply_s: float
    decode_s: float
    late_s: float


@dataclass(frozen=True)
class CodecEstimate:
    """The seconds of a version either way, on a link of ``gbps`` Gb/s."""

    gbps: float
    coded_s: float
    raw_s: float


@dataclass
class PublishedCodec:
    """The codec of the next version; equal on all ranks, as all decide from the same figures.

    Attributes:
        setting: one of CHOICES.
        feels_link: whether writing to the destination takes as long as the link does.
        is_raw: whether the next version is sent as it is.
        estimate: what that was decided by; None before it is known.
    """

    setting: str
    feels_link: bool
    is_raw: bool = False
    estimate: CodecEstimate | None = None
    _rate: float | None = None  # bytes a second of the link
    _share: float = 1.0  # bytes of a coded version for each raw byte
    _coding: float | None = None  # its seconds of encoding and decoding for each raw byte
    _copying: float = 0.0  # those of a raw version
    _against: int = 0
    _since: int = 0
    _told: bool = False  # what the log has said last of is_raw

    def __post_init__(self) -> None:
        self.is_raw = self.setting == RAW_VALUES

    def beginning(self) -> str:
        """Return what the log says at the start beside the state of the chain."""
        if self.setting != AUTO or self.feels_link:
            return ""
        return (
            "; changes to a folder are always coded, as its disk says nothing of the receivers' "
            'link ("codec": "raw" sends them as they are)'
        )

    def note(
        self, said: Sequence[Mapping[str, Any]], receivers: ReceiverTimes | None, full: bool = False
    ) -> str | None:
        """Take what a version took, and choose for the next one.

        ``said``: of each rank's part ``raw_nbytes``, ``nbytes``, ``codec_s`` and ``link_s``. The
        parts of a stream go one after the other: bytes and seconds of coding add up. The speed of
        the link is that of the first rank, which writes, in the last version that had enough bytes.
        Where no receiver answers, decoding is taken to be as long as encoding. Of a ``full``
        version, which is coded without a reference, only the link counts.

        Returns a sentence where the choice changes.
        """
        if self.setting != AUTO or not self.feels_link:
            return None
        keys = ("raw_nbytes", "nbytes", "codec_s")
        raw, sent, codec_s = (sum(one[key] for one in said) for key in keys)
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
