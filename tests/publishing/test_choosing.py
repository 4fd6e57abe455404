"""Where coding does not pay on the measured link, changes are sent raw, with a message."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch.distributed as dist

from hybridcomp.codecs import StepCode
from hybridcomp.errors import ConfigError
from hybridcomp.patches.common.publishing_steps import destination_of
from hybridcomp.publishing import Publisher, WeightReceiver
from hybridcomp.publishing.choosing import (
    AGAIN,
    AUTO,
    PATIENCE,
    STEPCODE,
    PublishedCodec,
    ReceiverTimes,
)
from hybridcomp.publishing.following import PublishedSteps
from hybridcomp.publishing.groups import GroupSource
from hybridcomp.publishing.streams import Stream
from tests.publishing.made import Weights, drain, same
from tests.ranks import RunRanks


def version(link_s: float, codec_s: float = 0.5, raw: bool = False) -> list[dict[str, Any]]:
    """Return two parts of 100 MB, sent as 25 MB or raw; ``link_s``: seconds for 25 MB."""
    nbytes = 10**8 if raw else 25 * 10**6
    part = {
        "raw_nbytes": 10**8, "nbytes": nbytes, "codec_s": 0.0 if raw else codec_s,
        "link_s": link_s * nbytes / 25e6,
    }  # fmt: skip
    return [part, part]


def answered(decode_s: float = 0.0, late_s: float = 0.0) -> ReceiverTimes:
    return ReceiverTimes(0.1, decode_s, late_s)


def test_encoding_sending_and_decoding_decide() -> None:
    choice = PublishedCodec(AUTO, feels_link=True)
    for _ in range(10):  # saves 6 links, more than the time of encoding and decoding
        assert choice.note(version(link_s=0.4), answered(decode_s=1.0)) is None
    assert not choice.is_raw and choice.estimate is not None
    assert choice.estimate.coded_s == pytest.approx(2.8)
    assert choice.estimate.raw_s == pytest.approx(3.2)
    slow = [choice.note(version(link_s=0.4), answered(decode_s=2.0)) for _ in range(PATIENCE)]
    assert slow[:-1] == [None] * (PATIENCE - 1) and choice.is_raw
    assert slow[-1] is not None and "(0.5 Gb/s) a version takes 3.8 s coded, 3.2 s raw" in slow[-1]


def test_a_stream_without_an_answer_decodes_as_long_as_it_encodes() -> None:
    for link_s, wants_raw in ((0.3, True), (0.35, False)):  # 6 links for 2 seconds of coding
        choice = PublishedCodec(AUTO, feels_link=True)
        for _ in range(PATIENCE):
            choice.note(version(link_s), None)
        assert choice.is_raw == wants_raw


def test_bytes_that_wait_in_buffers_count_as_the_link() -> None:
    choice = PublishedCodec(AUTO, feels_link=True)
    for _ in range(PATIENCE):
        choice.note(version(link_s=1e-6), answered(late_s=1.0))
    assert not choice.is_raw and choice.estimate is not None
    assert choice.estimate.gbps == pytest.approx(0.4, rel=1e-3)


def test_a_link_that_changes_changes_the_choice() -> None:
    choice = PublishedCodec(AUTO, feels_link=True)
    for _ in range(PATIENCE):
        choice.note(version(link_s=0.1), None)
    assert choice.is_raw
    told = [choice.note(version(link_s=2.0, raw=True), None) for _ in range(PATIENCE)]
    assert not choice.is_raw and told[-1] is not None and "coded from now on" in told[-1]
    told = [choice.note(version(link_s=0.1), None) for _ in range(PATIENCE)]
    assert choice.is_raw and told[-1] is not None


def test_one_version_of_many_is_coded_again() -> None:
    choice = PublishedCodec(AUTO, feels_link=True)
    for _ in range(PATIENCE):
        choice.note(version(link_s=0.1), None)
    for turn in range(2):
        for _ in range(AGAIN):
            assert choice.is_raw
            assert choice.note(version(link_s=0.1, raw=True), None) is None
        assert not choice.is_raw  # an encoded version loses, without a second message
        if turn == 0:
            assert choice.note(version(link_s=0.1), None) is None and choice.is_raw
    told = choice.note(version(link_s=0.1, codec_s=0.01), None)
    assert not choice.is_raw and told is not None and "coded from now on" in told


def test_few_bytes_say_nothing_about_a_link() -> None:
    choice = PublishedCodec(AUTO, feels_link=True)
    few = {"raw_nbytes": 10**8, "nbytes": 10**5, "codec_s": 0.1, "link_s": 0.3}
    assert choice.note([few], None) is None and choice.estimate is None
    full = {"raw_nbytes": 10**8, "nbytes": 7 * 10**7, "codec_s": 9.0, "link_s": 0.7}
    assert choice.note([full], None, full=True) is None and choice.estimate is None
    choice.note([few], None)
    assert choice.estimate is not None and choice.estimate.gbps == pytest.approx(0.8)
    assert choice.estimate.coded_s == pytest.approx(0.201)
    assert choice.estimate.raw_s == pytest.approx(1.0)


def test_the_log_says_that_a_folder_gets_coded_changes() -> None:
    assert "always coded" in PublishedCodec(AUTO, feels_link=False).beginning()
    assert not PublishedCodec(AUTO, feels_link=True).beginning()
    assert not PublishedCodec(STEPCODE, feels_link=False).beginning()


@pytest.mark.parametrize(("setting", "feels"), [(STEPCODE, True), (AUTO, False)])
def test_a_folder_and_an_explicit_codec_stay_coded(setting: str, feels: bool) -> None:
    choice = PublishedCodec(setting, feels)
    for _ in range(9):
        assert choice.note(version(link_s=1e-9), None) is None
    assert not choice.is_raw and choice.estimate is None


SIDES = {"one": (1 << 18, 4)}
VERSIONS = PATIENCE + 4


def over_a_group() -> list[Any]:
    """Report a decoding time of 1,000 s to the sender, which changes to raw."""
    group: Any = dist.new_group([0, 1])
    weights = Weights(shapes=dict(SIDES))
    if dist.get_rank() == 1:
        return received(group, weights)
    held = weights.held(count=1)
    publisher = Publisher(held, destination_of(group, held))
    found = []
    for number in range(VERSIONS):
        weights.step(number, 0.5)
        found.append(publisher.publish())
    rows = PublishedSteps(lambda: None, wait=True)
    rows._since = found
    row = rows.row()
    assert row is not None and row["raw_versions"] == sum(one.raw for one in found)
    assert 0 < row["raw_ms"] < 1e6 < row["coded_ms"] and row["link_gbps"] > 0
    return [[one.raw for one in found], found[-1].bits_per_weight >= 16]


def received(group: Any, weights: Weights) -> list[Any]:
    decode, applied = StepCode.decode, GroupSource.applied
    seconds = [0.0]

    def slow(*given: Any) -> None:
        seconds[0] = 1000.0
        decode(*given)

    def say(source: GroupSource, apply_s: float, decode_s: float) -> None:
        assert (decode_s > 0.0) >= (seconds[0] > 0.0)
        applied(source, apply_s, seconds[0])
        seconds[0] = 0.0

    StepCode.decode, GroupSource.applied = slow, say  # type: ignore[method-assign, assignment]
    try:
        receiver = WeightReceiver(group)
        right = []
        for number in range(VERSIONS):
            weights.step(number, 0.5)
            receiver.update()
            right.append(same(receiver, weights.values))
        return right
    finally:
        StepCode.decode, GroupSource.applied = decode, applied  # type: ignore[method-assign]


def test_a_sender_changes_to_raw(on_ranks: RunRanks) -> None:
    sent, right = on_ranks(2, over_a_group)
    assert sent == [[False] * (PATIENCE + 1) + [True] * 3, True] and right == [True] * VERSIONS


def raw_stream() -> bool:
    weights, stream = Weights(), io.BytesIO()
    publisher = weights.publisher(Stream(stream, (0,)), codec="raw")
    for number in range(2):
        weights.step(number)
        summary = publisher.publish()
    receiver = drain(WeightReceiver(io.BytesIO(stream.getvalue())))
    with pytest.raises(ConfigError, match="publish.codec: found 'zip'; expected one of auto"):
        weights.publisher(Stream(io.BytesIO(), (0,)), codec="zip")
    return same(receiver, weights.values) and summary.bits_per_weight > 14


def test_raw_versions_are_exact(on_ranks: RunRanks) -> None:
    assert on_ranks(1, raw_stream) == [True]
