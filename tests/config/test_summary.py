"""The start-up summary of the block."""

from __future__ import annotations

import torch

from hybridcomp.config import describe, idle_notes, notes
from tests.config.common import parse


def test_describe_states_bits_and_ratios() -> None:
    config = parse(
        {
            "dp": {"codec": "zfp", "rate": 8, "error_feedback": True},
            "pp": {"codec": "mpc", "backward": "none"},
            "start_step": 7,
        }
    )
    lines = describe(config)
    assert lines[0].startswith("dp  ")
    figures = "zfp(rate=8), 8 bits a value: 4x less than fp32, 2x less than bf16, error feedback"
    assert lines[0].endswith(f" {figures}")
    assert any(line.startswith("pp forward") and "lossless" in line for line in lines)
    assert any(line.split() == ["pp", "backward", "none"] for line in lines)
    assert any(line.startswith("native") and "zero, tp, ep, cp" in line for line in lines)
    assert "65536 bytes" in lines[-1]
    assert "before step 7" in lines[-1]
    all_sizes = describe(parse({"dp": "bf16", "min_bytes": 0}))
    assert not any(line.startswith("also native") for line in all_sizes)


def test_notes_tell_what_saves_nothing() -> None:
    config = parse({"preset": "zhybrid"})
    assert notes(config, torch.float32) == []
    (note,) = notes(config, torch.bfloat16)
    assert note.startswith("zero, tp, pp: zfp(rate=16) takes 16 bits a value and saves nothing")
    assert "zhybrid is made for fp32" in note
    assert notes(parse({"preset": "recommended"}), torch.float16) == []
    for dtype in (torch.float64, torch.complex64):
        (note,) = notes(config, dtype)
        assert f"messages of {str(dtype)[6:]} stay native" in note
        assert notes(parse({"preset": "none"}), dtype) == []


def test_a_block_that_compresses_nothing_is_told() -> None:
    assert idle_notes(parse({"preset": "none"})) == [], "the user says so"
    (nothing,) = idle_notes(parse({"dp": "none", "tp": "none"}))
    assert "no dimension has a codec" in nothing and '"preset": "none"' in nothing
    huge = parse({"preset": "recommended", "min_bytes": 10**9})
    (note,) = idle_notes(huge)
    assert "min_bytes is 1000000000" in note and "default 65536" in note
    assert idle_notes(huge, largest_nbytes=2 * 10**9) == []
    usual = parse({"preset": "recommended"})
    assert idle_notes(usual) == []
    (small,) = idle_notes(usual, largest_nbytes=1000)
    assert "the largest message of this job has 1000, so nothing is compressed" in small
    (late,) = idle_notes(parse({"preset": "recommended", "start_step": 5_000_000}))
    assert "start_step is 5000000" in late
