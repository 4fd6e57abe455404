"""The expert-parallel all-to-all: identical with native and lossless codecs, both directions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from hybridcomp.channels import Channels, channels_of
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import ConfigError
from hybridcomp.patches.ds.layers import moe
from tests.ranks import RunRanks, Trained
from tests.selection import by_day
from tests.training.moe_trainer import EXPERTS, TOKENS, WIDTH, Job, exchange_rows, run
from tests.training.pipe_trainer import Outcome

BLOCKS: dict[str, dict[str, Any] | None] = {
    "native": None,
    "none": {"ep": "none"},
    "mpc": {"ep": "mpc", "min_bytes": 0},
    "blockint": {"ep": {"codec": "blockint", "bits": 8}, "min_bytes": 0},
    "forward": {
        "ep": {"forward": {"codec": "blockint", "bits": 8}, "backward": "none"},
        "min_bytes": 0,
    },
}
JOBS = {
    "plain": Job(steps=8),
    "bf16 zero": Job(bf16=True, zero=1, steps=8),
    "checkpoint": Job(checkpoint=True, steps=8),
    "nan": Job(nan_step=2, steps=4),
}


CASES = {(job, block): replace(JOBS[job], block=BLOCKS[block]) for job in JOBS for block in BLOCKS}


@pytest.fixture(scope="module")
def results() -> Iterator[Trained]:
    with Trained(2, run, CASES) as trained:
        yield trained


def ledger(outcome: Outcome) -> dict[str, tuple[int, int, int]]:
    return {way: (n, raw, wire) for name, way, n, raw, wire in outcome.messages if name == "ep"}


EXACT = [key for key in CASES if key[0] != "nan" and key[1] in ("none", "mpc")]
LOSSY = [key for key in CASES if key[0] != "nan" and key[1] in ("blockint", "forward")]


@pytest.mark.parametrize(
    ("job", "block"), by_day(EXACT, [("plain", "none"), ("plain", "mpc"), ("checkpoint", "none")])
)
def test_identical(job: str, block: str, results: Trained) -> None:
    for native, found in zip(results[job, "native"], results[job, block], strict=True):
        assert native.losses == found.losses
        assert native.parameters == found.parameters
        assert ledger(found)


@pytest.mark.parametrize(
    ("job", "block"), by_day(LOSSY, [("plain", "blockint"), ("plain", "forward")])
)
def test_lossy_ends_near(job: str, block: str, results: Trained) -> None:
    native, found = results[job, "native"][0].losses, results[job, block][0].losses
    assert native != found
    assert found[-1] == pytest.approx(native[-1], rel=0.02)
    assert found[-1] < found[0]


def test_nan_stays_visible(results: Trained) -> None:
    for native, found in zip(results["nan", "native"], results["nan", "blockint"], strict=True):
        assert [math.isnan(x) for x in native.losses] == [math.isnan(x) for x in found.losses]
        assert any(math.isnan(x) for x in found.losses)


def test_ledger_against_closed_form(results: Trained) -> None:
    steps = JOBS["plain"].steps
    capacity = math.ceil(TOKENS / EXPERTS * 1.5)
    half = EXPERTS * capacity * WIDTH // 2  # bytes for the other of two ranks
    raw = 2 * steps * half * 4
    payload = half + half // 32 + -(-half // 1024)
    wire = 2 * steps * -(-payload // 16) * 16
    for rank in range(2):
        found = ledger(results["plain", "blockint"][rank])
        assert found == {"forward": (2 * steps, raw, wire), "backward": (2 * steps, raw, wire)}
        found = ledger(results["plain", "forward"][rank])
        assert found == {"forward": (2 * steps, raw, wire), "backward": (2 * steps, raw, raw)}
        found = ledger(results["plain", "none"][rank])
        assert found == {"forward": (2 * steps, raw, raw), "backward": (2 * steps, raw, raw)}
    # a recomputed forward pass dispatches and combines again
    found = ledger(results["checkpoint", "none"][0])
    steps = JOBS["checkpoint"].steps
    assert (found["forward"][0], found["backward"][0]) == (4 * steps, 2 * steps)


class AutoEPMoELayer(torch.nn.Module):
    """Minimal layer for ``attached``."""

    def __init__(self, comm_backend: str, ep_size: int) -> None:
        super().__init__()
        self.comm_backend, self.ep_size = comm_backend, ep_size


class Own(AutoEPMoELayer):
    """A layer that a user derives."""


@pytest.mark.parametrize("way", ["error", "native"])
def test_deepep(way: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    channels = Channels(CompressionConfig.parse({"ep": "mpc", "on_unsupported": way}))
    for harmless in (AutoEPMoELayer("comm", 2), AutoEPMoELayer("deepep", 1), Own("comm", 2)):
        engine = SimpleNamespace(module=torch.nn.Sequential(harmless))
        moe.attached(engine, channels)
        assert channels_of(harmless) is channels
    assert not capsys.readouterr().out
    engine = SimpleNamespace(module=torch.nn.Sequential(AutoEPMoELayer("deepep", 2)))
    if way == "error":
        with pytest.raises(ConfigError, match=r"compression\.ep.*deepep"):
            moe.attached(engine, channels)
    else:
        moe.attached(engine, channels)
        assert "DeepEP" in capsys.readouterr().out


@pytest.mark.skipif(find_spec(moe.AUTO_EP) is None, reason="this DeepSpeed has no AutoEP")
@pytest.mark.parametrize("codec", ["none", "mpc", "blockint"])
def test_unequal_rows(module_ranks: RunRanks, codec: str) -> None:
    # min_bytes does not apply to unequal messages
    ranks = module_ranks(2, exchange_rows, {"ep": codec, "min_bytes": 1 << 30})
    for rank, found in enumerate(ranks):
        raw = {"forward": (40, 17)[rank] * WIDTH * 4, "backward": (17, 40)[rank] * WIDTH * 4}
        for untagged, ours, native in zip(
            found["untagged"], found["ours"], found["native"], strict=True
        ):
            assert torch.equal(untagged, native)
            if codec == "blockint":
                assert not torch.equal(ours, native)
                assert torch.allclose(ours, native, atol=0.03)
            else:
                assert torch.equal(ours, native)
        assert found["zeros"] == 0.0
        for direction, (messages, raw_nbytes, wire) in found["ledger"].items():
            assert (messages, raw_nbytes) == (1, raw[direction])
            if codec == "none":
                assert wire == raw_nbytes
            if codec == "blockint":
                assert wire < 0.3 * raw_nbytes
