"""Presets: their resolved settings, and the effect of overrides."""

from __future__ import annotations

from typing import Any

import pytest

from hybridcomp.codecs import BlockInt, Bounded, Codec, Mpc, Zfp
from hybridcomp.config import describe, load_config
from hybridcomp.config.presets import overridden
from hybridcomp.dimensions import ROWS
from tests.config.common import parse


def test_preset_with_overrides() -> None:
    config = parse(
        {"preset": "recommended", "dp": {"error_feedback": True}, "zero": "mpc", "tp": "none"}
    )
    codecs = config.policy().codecs
    assert codecs["dp", "forward"] == BlockInt(4), "what the override does not name stays"
    assert config.error_feedback("dp")
    assert codecs["zero", "forward"] == Mpc()
    assert codecs["tp", "forward"] is None
    assert codecs["pp", "backward"] == BlockInt(8)
    assert config.explicit == {"dp", "zero", "tp"}
    fewer = parse({"preset": "recommended", "dp": {"bits": 3}})
    assert fewer.policy().codecs["dp", "forward"] == BlockInt(3)
    replaced = parse({"preset": "recommended", "zero": {"codec": "zfp", "rate": 8}})
    assert replaced.policy().codecs["zero", "forward"] == Zfp(8)
    way = parse({"preset": "recommended", "pp": {"backward": {"bits": 4}}}).policy().codecs
    assert (way["pp", "forward"], way["pp", "backward"]) == (BlockInt(8), BlockInt(4))
    both = parse({"preset": "recommended", "pp": {"forward": "mpc", "backward": "bf16"}})
    assert both.policy().codecs["pp", "forward"] == Mpc()


@pytest.mark.parametrize(
    ("ways", "codecs"),
    [
        ({"forward": {"bits": 4}, "backward": {"bits": 6}}, (BlockInt(4), BlockInt(6))),
        ({"forward": "none", "backward": {"bits": 4}}, (None, BlockInt(4))),
        ({"forward": {"error_bound": 0.1}}, (Bounded(0.1), BlockInt(8))),
    ],
)
def test_directions_replace_what_they_name(ways: Any, codecs: tuple[Codec | None, ...]) -> None:
    """The preset's bits are then used nowhere, which is no mistake of the user."""
    found = parse({"preset": "recommended", "tp": ways}).policy().codecs
    assert (found["tp", "forward"], found["tp", "backward"]) == codecs


def test_an_override_drops_levels_of_the_preset_that_do_not_go_with_it() -> None:
    preset = {"codec": "blockint", "bits": 4, "levels": "lloyd"}
    assert overridden(preset, {"error_feedback": True}) == {**preset, "error_feedback": True}
    assert overridden(preset, {"bits": 5}) == {"codec": "blockint", "bits": 5}
    random = {"codec": "blockint", "bits": 4, "rounding": "random"}
    assert overridden(preset, {"rounding": "random"}) == random
    written = {"bits": 5, "levels": "lloyd"}  # the user's settings are kept, and rejected
    assert overridden(preset, written) == {**preset, **written}


@pytest.mark.parametrize(
    ("preset", "dimension", "codec"),
    [
        ("naive-zfp", "dp", Zfp(8)),
        ("naive-mpc", "dp", Mpc()),
        ("mzhybrid", "dp", Zfp(8)),
        ("mzhybrid", "tp", Mpc()),
        ("zhybrid", "zero", Zfp(16)),
        ("recommended", "dp", BlockInt(4)),
        ("recommended", "ep", BlockInt(8)),
    ],
)
def test_presets_are_the_papers(preset: str, dimension: Any, codec: Codec) -> None:
    assert parse({"preset": preset}).policy().codecs[dimension, "forward"] == codec


def test_the_preset_that_compresses_nothing() -> None:
    config = parse({"preset": "none"})
    assert config.enabled and not any(config.policy().codecs.values())
    names = [name for name, row in ROWS.items() if not row.is_quiet]
    assert names[:7] == ["dp", "zero", "tp", "pp", "ep", "cp", "offload"]
    assert config.digest() == parse(dict.fromkeys(names, "none")).digest()
    assert describe(config)[0] == f"native        {', '.join(names)}"
    assert parse({"preset": "none", "dp": "bf16"}).active("dp")
    assert load_config({"compression": {"preset": "none"}}) is not None
    assert load_config({"compression": {"enabled": False}}) is None
