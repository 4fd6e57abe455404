"""Ramps: the codec of a message at each step."""

from __future__ import annotations

from typing import Any

import torch

from hybridcomp.config import describe
from hybridcomp.config.policy import Traffic
from hybridcomp.dimensions import DIRECTIONS
from tests.config.common import parse


def specs_of(block: dict[str, Any], dimension: Any, direction: Any = "forward") -> list[str]:
    """Return a message's codec in every step up to 12, run by run."""
    policy = parse({**block, "min_bytes": 0}).policy()
    codecs = [
        policy.choose(Traffic(dimension, direction, torch.float32, 1 << 20, 2, step))
        for step in range(12)
    ]
    return [codec.spec if codec is not None else "none" for codec in codecs]


def test_ramp_of_bits_and_rates() -> None:
    bits = {"dp": {"codec": "blockint", "bits": 4, "ramp": {"from": 8, "steps": 8}}}
    assert specs_of({**bits, "start_step": 2}, "dp") == [
        *["none"] * 2,
        *[f"blockint(bits={n})" for n in (8, 8, 7, 7, 6, 6, 5, 5, 4, 4)],
    ]
    rate = {"pp": {"codec": "zfp", "rate": 8, "ramp": {"from": 16, "steps": 3}}}
    taken = specs_of(rate, "pp", "backward")
    assert taken[0] == "zfp(rate=16)" and taken[3:] == ["zfp(rate=8)"] * 9
    config = parse(bits)
    levels = [[2, "blockint(bits=8)"], [4, "blockint(bits=7)"], [6, "blockint(bits=6)"]]
    assert config.flat()["compression.dp.forward.ramp"] == [*levels, [8, "blockint(bits=5)"]]
    assert config.digest() != parse({"dp": {"codec": "blockint", "bits": 4}}).digest()
    (line,) = [line for line in describe(config) if line.startswith("ramp")]
    assert line.endswith("dp: from blockint(bits=8) in 4 levels, as written from step 8")


def test_a_ramp_leaves_out_levels_that_need_the_last_number_of_bits() -> None:
    dp = {"codec": "blockint", "bits": 4, "levels": "lloyd", "ramp": {"from": 6, "steps": 2}}
    taken = specs_of({"dp": dp}, "dp", "forward")
    assert taken[:2] == ["blockint(bits=6)", "blockint(bits=5)"]
    assert set(taken[2:]) == {"blockint(bits=4, levels=lloyd)"}


def test_ramp_of_bounds() -> None:
    """From the mild to the written bound in 8 equal ratios, in each direction to its own."""
    block = {
        "tp": {
            "error_bound": 1e-2,
            "backward": {"error_bound": 1e-3},
            "ramp": {"from": 1e-4, "steps": 8},
        }
    }
    ramps = parse(block).policy().ramps
    for way, end in zip(DIRECTIONS, (1e-2, 1e-3), strict=True):
        bounds = [getattr(rung.codec, "error_bound") for rung in ramps["tp", way]]  # noqa: B009
        assert len(bounds) == 8 and bounds[0] == 1e-4
        ratios = [b / a for a, b in zip(bounds, [*bounds[1:], end], strict=True)]
        assert all(abs(ratio - (end / 1e-4) ** (1 / 8)) < 0.02 for ratio in ratios)
    taken = specs_of(block, "tp")
    assert len(set(taken)) > 4 and taken[8:] == [taken[8]] * 4
