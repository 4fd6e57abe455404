"""What a run says of its block when it starts."""

from __future__ import annotations

import torch

from tests.config.common import parse


def test_describe_states_bits_and_ratios() -> None:
    config = parse(
        {
            "dp": {"codec": "zfp", "rate": 8, "error_feedback": True},
            "pp": {"codec": "mpc", "backward": "none"},
            "start_step": 7,
        }
    )
    lines = config.describe()
    assert lines[0].startswith("dp  ")
    figures = "zfp(rate=8), 8 bits a value: 4x less than fp32, 2x less than bf16, error feedback"
    assert lines[0].endswith(f" {figures}")
    assert any(line.startswith("pp forward") and "lossless" in line for line in lines)
    assert any(line.split() == ["pp", "backward", "none"] for line in lines)
    assert any(line.startswith("native") and "zero, tp, ep, cp" in line for line in lines)
    assert "65536 bytes" in lines[-1]
    assert "before step 7" in lines[-1]


def test_notes_tell_what_saves_nothing() -> None:
    config = parse({"preset": "zhybrid"})
    assert config.notes(torch.float32) == []
    (note,) = config.notes(torch.bfloat16)
    assert note.startswith("zero, tp, pp: zfp(rate=16) takes 16 bits a value and saves nothing")
    assert "zhybrid is made for fp32" in note
    assert parse({"preset": "recommended"}).notes(torch.float16) == []
