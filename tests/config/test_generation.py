"""The block's key ``generate``: accepted values, errors and description."""

from __future__ import annotations

from typing import Any

import pytest

from hybridcomp.config import CompressionConfig, describe
from hybridcomp.errors import ConfigError
from hybridcomp.patches.rules import ds_check

EIGHT = {"codec": "blockint", "bits": 8}


def test_messages_are_native_unless_it_says_so() -> None:
    training = {"pp": {"codec": "blockint", "bits": 2}, "tp": EIGHT, "min_bytes": 10}
    block = CompressionConfig.parse({**training, "generate": {}})
    assert block.generate is not None
    within = CompressionConfig.parse(block.generate.block(block.min_bytes))
    assert set(within.codecs().values()) == {None} and within.min_bytes == 10
    block = CompressionConfig.parse({**training, "generate": {"pp": EIGHT, "min_bytes": 0}})
    assert block.generate is not None
    within = CompressionConfig.parse(block.generate.block(block.min_bytes))
    encoded = {name for (name, _), codec in within.codecs().items() if codec is not None}
    assert encoded == {"pp"} and within.min_bytes == 0 and within.ledger.sample_every == 0


def test_it_may_stand_alone() -> None:
    block = CompressionConfig.parse({"generate": {"pp": "fp16", "in_flight": 3, "batch": 4}})
    (line,) = [line for line in describe(block) if line.startswith("generate")]
    assert line.split(maxsplit=1)[1] == "pp fp16; batches of 4, 3 in flight, room 4096"
    assert CompressionConfig.parse({"generate": {"pp": EIGHT}}).digest() != block.digest()
    block = CompressionConfig.parse({"generate": {"weights_gb": 1.5}})
    assert any(line.endswith(", weights of 1.5 GB at most") for line in describe(block))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"pp": {"codec": "blockint", "bits": 11}}, "compression.generate.pp.bits: found 11"),
        ({"pp": {"bits": 8}}, "compression.generate.pp.codec: found nothing"),
        ({"pp": {**EIGHT, "guard": "none"}}, "compression.generate.pp.guard: "),
        ({"tp": "topk"}, "compression.generate.tp.codec: "),
        ({"in_flight": 0}, "compression.generate.in_flight: found 0"),
        ({"in_flight": "all"}, 'compression.generate.in_flight: found "all"'),
        ({"batch": 0}, "compression.generate.batch: found 0"),
        ({"room": 1}, "compression.generate.room: found 1"),
        ({"rooms": 1}, "compression.generate.rooms: .*did you mean 'room'"),
        ({"weights_gb": 0}, "compression.generate.weights_gb: found 0"),
        ({"min_bytes": -1}, "compression.generate.min_bytes: found -1"),
    ],
)
def test_mistakes_name_the_key(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        CompressionConfig.parse({"generate": given})


def test_a_job_without_stages_is_told() -> None:
    whole = {"train_batch_size": 1}
    block = CompressionConfig.parse({"generate": {"pp": EIGHT}})
    assert ds_check.check(block, whole, pipeline=True) == []
    assert ds_check.check(block, whole, pipeline=False, slices=True) == []
    with pytest.raises(ConfigError, match=r"compression\.generate: found a model that is no Pipe"):
        ds_check.check(block, whole, pipeline=False)
    block = CompressionConfig.parse({"generate": {}, "on_unsupported": "native"})
    (said,) = ds_check.check(block, whole, pipeline=False)
    assert said.startswith("compression.generate does nothing here")
