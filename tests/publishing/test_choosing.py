"""Where coding does not pay on the measured link, changes are sent as they are, and it is said."""

from __future__ import annotations

import io
from typing import Any

import pytest

from hybridcomp.errors import ConfigError
from hybridcomp.publishing import WeightReceiver
from hybridcomp.publishing.choosing import AGAIN, AUTO, PATIENCE, STEPCODE, PublishedCodec
from hybridcomp.publishing.streams import Stream
from tests.publishing.made import Weights, same
from tests.ranks import RunRanks


def version(link_s: float, codec_s: float = 0.5) -> list[dict[str, Any]]:
    """Two parts of 25 MB that were 100 MB before, and what they took."""
    part = {"raw_nbytes": 10**8, "nbytes": 25 * 10**6, "codec_s": codec_s, "link_s": link_s}
    return [part, part]


def test_a_fast_link_makes_versions_raw_and_a_slow_one_keeps_them_coded() -> None:
    choice = PublishedCodec(AUTO, feels_link=True)
    for _ in range(10):
        assert choice.note(version(link_s=0.2)) is None and not choice.is_raw  # saves 1.2, takes 1
    told = [choice.note(version(link_s=0.1)) for _ in range(PATIENCE)]  # saves 0.6
    assert told[:-1] == [None] * (PATIENCE - 1) and choice.is_raw
    assert told[-1] is not None and "2 Gb/s" in told[-1] and "takes 1 s" in told[-1]
    for _ in range(AGAIN):
        assert choice.is_raw
        assert choice.note(version(link_s=0.1, codec_s=0.0)) is None
    assert not choice.is_raw  # one is coded again: it loses, which is said no second time
    assert choice.note(version(link_s=0.1)) is None and choice.is_raw
    for _ in range(AGAIN):
        choice.note(version(link_s=0.1))
    assert choice.note(version(link_s=1.0)) is None and not choice.is_raw


@pytest.mark.parametrize(("setting", "feels"), [(STEPCODE, True), (AUTO, False)])
def test_a_folder_and_an_explicit_codec_stay_coded(setting: str, feels: bool) -> None:
    choice = PublishedCodec(setting, feels)
    for _ in range(9):
        assert choice.note(version(link_s=1e-9)) is None
    assert not choice.is_raw


def raw_stream() -> bool:
    weights, stream = Weights(), io.BytesIO()
    publisher = weights.publisher(Stream(stream, (0,)), codec="raw")
    for number in range(2):
        weights.step(number)
        summary = publisher.publish()
    receiver = WeightReceiver(io.BytesIO(stream.getvalue()))
    while receiver.update() is not None:
        pass
    with pytest.raises(ConfigError, match="publish.codec: found 'zip'; expected one of auto"):
        weights.publisher(Stream(io.BytesIO(), (0,)), codec="zip")
    return same(receiver, weights.values) and summary.bits_per_weight > 14


def test_raw_versions_are_exact(on_ranks: RunRanks) -> None:
    assert on_ranks(1, raw_stream) == [True]
