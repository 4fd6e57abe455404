"""Shared engine of every upstream's rules: the consequence of a rule that applies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.patches.rules.engine import Rule, Verdict, absent, hold

BITS = {"codec": "blockint", "bits": 8}


def rule(verdict: Verdict, **more: Any) -> Rule[bool]:
    """Return a rule about tp that applies to the job ``True``."""
    return Rule(
        verdict, ("tp",), "a switch", "it passes by", "turn it off", lambda job: job, **more
    )


def held(verdict: Verdict, block: dict[str, Any], job: bool = True, **more: Any) -> list[str]:
    return list(hold(CompressionConfig.parse(block), [(rule(verdict, **more), job)]))


@pytest.mark.parametrize("verdict", ["refuse", "bypass", "absent"])
def test_what_cannot_act_is_an_error(verdict: Verdict) -> None:
    with pytest.raises(ConfigError, match=r"compression\.tp.*a switch.*turn it off") as caught:
        held(verdict, {"tp": BITS})
    assert ('"on_unsupported": "native"' in str(caught.value)) == (verdict != "refuse")


@pytest.mark.parametrize("verdict", ["bypass", "absent"])
def test_it_may_stay_native(verdict: Verdict) -> None:
    block = {"tp": BITS, "on_unsupported": "native"}
    assert held(verdict, block) == ["tp native: a switch: it passes by"]
    with pytest.raises(ConfigError):
        held("refuse", block)


def test_notes_are_said_and_nothing_else_happens() -> None:
    assert held("note", {"tp": BITS}) == ["tp: a switch: it passes by"]


@pytest.mark.parametrize("verdict", ["refuse", "bypass", "absent", "note"])
def test_rules_that_are_not_about_the_block_are_silent(verdict: Verdict) -> None:
    assert held(verdict, {"dp": BITS}) == []
    assert held(verdict, {"tp": BITS}, job=False) == []
    assert held(verdict, {"tp": BITS}, settings=lambda block: False) == []


def test_presets_may_name_what_a_job_lacks() -> None:
    assert held("absent", {"preset": "recommended"}) == []
    with pytest.raises(ConfigError):
        held("absent", {"preset": "recommended", "tp": BITS})
    assert absent([(rule("absent"), True)]) == {"tp"}
    assert absent([(rule("absent"), False), (rule("bypass"), True)]) == frozenset()


def test_what_only_the_preset_chose_stops_no_job_that_may_stay_native() -> None:
    """The user named no codec, and accepts native traffic where none fits."""
    refused = rule("refuse")
    block = CompressionConfig.parse({"preset": "recommended", "on_unsupported": "native"})
    assert block.active("tp")
    told = "tp native: a switch: it passes by; the preset chose that codec"
    assert list(hold(block, [(refused, True), (refused, True)])) == [told]
    assert not block.active("tp") and block.active("dp") and "tp" not in block.measured()
    assert block.policy().codecs["tp", "forward"] is None
    written = {"preset": "recommended", "tp": BITS, "on_unsupported": "native"}
    both = replace(refused, dimensions=("dp", "tp"))  # dp is the preset's
    for other, one in ((written, refused), (written, both), ({"preset": "recommended"}, refused)):
        with pytest.raises(ConfigError, match="compression.tp: found a switch"):
            list(hold(CompressionConfig.parse(other), [(one, True)]))
