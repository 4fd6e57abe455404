"""The block's key ``pipeline``: corrections that fit the versions, and agreement of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from hybridcomp.config import CompressionConfig, describe
from hybridcomp.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "key", "fragment"),
    [
        ({"versions": 3}, "versions", 'expected "flush", 2, "stash" or 1'),
        ({"correction": "look_ahead"}, "correction", 'set pipeline.versions to "stash" or 2 or 1'),
        ({"versions": "stash", "correction": "spike"}, "correction", "versions to 1"),
        ({"versions": 2, "correction": "momentum"}, "correction", "look_ahead"),
        ({"versions": 2, "momentum": 0.9}, "momentum", "only correction"),
        ({"versions": 1, "anneal": 10}, "anneal", "only correction"),
        ({"warmup": 10}, "warmup", "remove it"),
        ({"slack": 1}, "slack", "remove it"),
        ({"version": 2}, "version", "unknown"),
    ],
)
def test_bad_settings(settings: dict[str, Any], key: str, fragment: str) -> None:
    with pytest.raises(ConfigError) as raised:
        CompressionConfig.parse({"preset": "none", "pipeline": settings})
    assert str(raised.value).startswith(f"compression.pipeline.{key}: ")
    assert fragment in str(raised.value) and "\n" not in str(raised.value)


def test_islands_have_no_pipeline() -> None:
    block = {"sync": {"islands": 2}, "pipeline": {"versions": "stash"}}
    words = (
        r'^compression.pipeline.versions: found "stash"; islands of sync train no PipelineModule'
    )
    with pytest.raises(ConfigError, match=words):
        CompressionConfig.parse(block)
    CompressionConfig.parse({**block, "enabled": False})


def test_ranks_agree_on_it() -> None:
    plain = CompressionConfig.parse({"preset": "none"})
    flush = CompressionConfig.parse({"preset": "none", "pipeline": {"versions": "flush"}})
    two = CompressionConfig.parse({"pipeline": {"versions": 2}})  # needs no dimension
    assert plain.digest() == flush.digest() != two.digest()
    assert two.flat()["compression.pipeline.versions"] == 2
    assert any("without a flush (experimental): two versions" in line for line in describe(two))
    assert not any("flush" in line for line in describe(flush))
