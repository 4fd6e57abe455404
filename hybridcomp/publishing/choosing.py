"""Choose between steps and raw values for a destination whose link the sender itself feels.

Coding pays where the bytes that it saves would take longer than it does. On a stream and over a
group the time of writing is the time of the link; a folder is written at the speed of a disk, which
says nothing about the link to the receivers: there changes are always coded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

AUTO, STEPCODE, RAW_VALUES = "auto", "stepcode", "raw"
CHOICES = (AUTO, STEPCODE, RAW_VALUES)
#: versions in a row in which coding has to lose before values are sent as they are
PATIENCE = 3
#: versions as they are before one is coded again, to see whether the link has changed
AGAIN = 50
#: fewer bytes say nothing about a link
LEAST_NBYTES = 1 << 20


@dataclass
class PublishedCodec:
    """The codec of the next version; equal on all ranks, as all decide from the same figures.

    Attributes:
        setting: one of CHOICES.
        feels_link: whether writing to the destination takes as long as the link does.
        is_raw: whether the next version is sent as it is.
    """

    setting: str
    feels_link: bool
    is_raw: bool = False
    _lost: int = 0
    _since: int = 0

    def __post_init__(self) -> None:
        self.is_raw = self.setting == RAW_VALUES

    def note(self, said: Sequence[Mapping[str, Any]]) -> str | None:
        """Take what the ranks' parts of a version took; return a sentence where the choice changes.

        The parts of a stream go one after the other: bytes and seconds of coding add up. The speed
        of the link is that of the first rank, which writes.
        """
        if self.setting != AUTO or not self.feels_link:
            return None
        if self.is_raw:
            self._since += 1
            self.is_raw = self._since < AGAIN
            return None
        raw, sent = (sum(one[key] for one in said) for key in ("raw_nbytes", "nbytes"))
        seconds = sum(one["codec_s"] for one in said)
        first = said[0]
        if raw < LEAST_NBYTES or not first["link_s"] or not first["nbytes"]:
            return None
        saved = (raw - sent) * first["link_s"] / first["nbytes"]
        if saved >= seconds:
            self._lost = self._since = 0
            return None
        self._lost += 1
        if self._lost < PATIENCE:
            return None
        is_news = self._since == 0
        self.is_raw, self._lost, self._since = True, PATIENCE - 1, 0
        if not is_news:
            return None
        rate = first["nbytes"] / first["link_s"] * 8 / 1e9
        return (
            f"publish: coding does not pay on this link ({rate:.3g} Gb/s): it takes {seconds:.3g} "
            f"s a version and saves {saved:.3g} s; changes are sent as they are, and one version "
            f'of {AGAIN} is coded to see whether that holds ("codec": "stepcode" always codes)'
        )
