"""Shared engine of every upstream's rules: the consequence of a rule that applies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybridcomp.config import CompressionConfig, describe, idle_notes
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


def test_a_bypassed_dimension_is_native_in_the_block_unless_part_of_it_is_encoded() -> None:
    """What is said to be native is listed, measured, guarded and counted as native."""
    for is_part in (False, True):
        tp = {**BITS, "when": "auto", "guard": {"error": 0.5}}
        block = CompressionConfig.parse({"tp": tp, "on_unsupported": "native"})
        (told,) = hold(block, [(rule("bypass", is_part=is_part), True)])
        assert told.startswith("tp partly native: " if is_part else "tp native: ")
        assert block.active("tp") is is_part and not idle_notes(block)
        assert ("tp" in block.measured()) is is_part and ("tp" in block.limits()) is is_part
        listed = next(line for line in describe(block) if "tp" in line.split("(")[0])
        assert listed.startswith("tp " if is_part else "native")


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
