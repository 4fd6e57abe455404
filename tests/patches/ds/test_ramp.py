"""Ramps in training: sender and receiver change their codec between the same steps."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from hybridcomp.channels import channels_of
from tests.ranks import RunRanks
from tests.selection import by_day

if find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.training import in_turn, pipe_trainer
from tests.training.trainer import Job, digests, make_engine, train_step

STEPS = 8


def used(channels: Any, dimension: str, direction: str = "forward") -> list[str]:
    return list(channels.ledger.used.get((dimension, direction), {}))


def gradients(stage: int) -> tuple[list[list[str]], list[float], dict[str, str]]:
    """Return the gradients' codec in each step, the losses, the parameters."""
    ramp = {"from": 8, "steps": 6}
    dp = {"codec": "blockint", "bits": 4, "error_feedback": True, "ramp": ramp}
    job = Job(stage, block={"dp": dp, "min_bytes": 0})
    engine = make_engine(job)
    channels = channels_of(engine)
    assert channels is not None
    specs, losses = [], []
    for step in range(STEPS):
        channels.ledger.restart()
        losses.append(train_step(engine, job, step))
        specs.append(used(channels, "dp"))
    found = digests(engine)
    engine.destroy()
    return specs, losses, found


@pytest.mark.parametrize("stage", by_day([0, 2, 3], [2, 3]))
def test_gradients(module_ranks: RunRanks, stage: int) -> None:
    found = module_ranks(2, gradients, stage)
    for specs, losses, parameters in found:
        bits = [8, 8, 7, 6, 6, 5, 4, 4]
        assert specs == [[f"blockint(bits={n})"] for n in bits]
        assert losses[-1] < losses[0] and parameters == found[0][2]


def activations() -> tuple[list[float], list[tuple[list[str], list[str]]]]:
    import deepspeed

    import hybridcomp

    in_turn.start_deepspeed()
    hybridcomp.install()
    torch.manual_seed(0)
    pp = {
        "codec": "radix",
        "error_bound": 0.05,
        "backward": {"error_bound": 0.02},
        "ramp": {"from": 1e-3, "steps": 4},
    }
    job = pipe_trainer.Job(stages=2, block={"pp": pp, "min_bytes": 0})
    engine, *_ = deepspeed.initialize(
        model=pipe_trainer.build(job, []), config=pipe_trainer.ds_config(job, 1)
    )
    channels = channels_of(engine)
    assert channels is not None
    data = pipe_trainer.batches(job, 0)
    losses, specs = [], []
    for _ in range(STEPS):
        channels.ledger.restart()
        losses.append(float(engine.train_batch(data)))
        specs.append((used(channels, "pp"), used(channels, "pp", "backward")))
    engine.destroy()
    hybridcomp.uninstall()
    return losses, specs


def test_pipeline_stages_change_together(module_ranks: RunRanks) -> None:
    """A receiver whose codec differs from its sender's raises an error."""
    first, last = module_ranks(2, activations)
    assert first[0] == last[0] and first[0][-1] < first[0][0]
    sent = [step[0] for step in first[1]]  # the first stage sends activations
    assert len({tuple(specs) for specs in sent}) == 5 and sent[4:] == [sent[4]] * 4
    back = [step[1] for step in last[1]]
    assert len({tuple(specs) for specs in back}) == 5 and back[4:] == [back[4]] * 4
