"""DeepSpeed checkpoints that a job with another block saved again under the same tag."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridcomp.errors import CheckpointError
from tests.ranks import RunRanks

pytest.importorskip("deepspeed")

from tests.training.test_checkpoint import make_engine, train

DELTAS: dict[str, Any] = {"zero": {"codec": "blockint", "bits": 4, "delta": True}}
NO_FEEDBACK: dict[str, Any] = {"dp": {"codec": "blockint", "bits": 8}}


def weights_of(engine: Any) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in engine.module.parameters()]


def saved_without_hybridcomp(folder: str) -> tuple[float, int, bool, str]:
    """Load a checkpoint last saved by a plain job; return residual norm, step, equal weights."""
    from hybridcomp.channels import channels_of

    engine = make_engine(1, block=DELTAS)
    train(engine, 0, 3, 0)
    engine.save_checkpoint(folder, tag="last")
    plain = make_engine(1, block={"enabled": False})
    plain.load_checkpoint(folder, tag="last")
    train(plain, 3, 6, 0)
    plain.save_checkpoint(folder, tag="last")
    again = make_engine(1, block=DELTAS)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        again.load_checkpoint(folder, tag="last")
    channels = channels_of(again)
    assert channels is not None
    alike = all(map(torch.equal, weights_of(again), weights_of(plain)))
    return channels.residuals.norm(), channels.step, alike, told.getvalue()


def test_what_an_older_save_left_is_not_taken_over(module_ranks: RunRanks, tmp_path: Path) -> None:
    (*found, told), (*other, _) = module_ranks(2, saved_without_hybridcomp, str(tmp_path))
    assert found == other == [0.0, 6, True]
    assert "is of step 3, and the checkpoint beside it of step 6" in told
    assert "no parameter references of 2 ranks at step 6; the first gather is exact" in told


def saved_without_feedback(folder: str) -> tuple[str, str]:
    """Return the error of a job whose state and residuals are from different steps.

    And the output of a load of what a job without error feedback has saved.
    """
    engine = make_engine(1)
    train(engine, 0, 2, 0)
    engine.save_checkpoint(folder, tag="kept")
    engine.save_checkpoint(folder, tag="last")
    other = make_engine(1, block=NO_FEEDBACK)
    other.load_checkpoint(folder, tag="last")
    other.save_checkpoint(folder, tag="last")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        other.load_checkpoint(folder, tag="last")
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        path = Path(folder, "kept", "hybridcomp_state.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "step": 7}))
    torch.distributed.barrier()
    before = weights_of(engine)
    with pytest.raises(CheckpointError) as told:
        engine.load_checkpoint(folder, tag="kept")
    assert all(map(torch.equal, weights_of(engine), before))
    return str(told.value), printed.getvalue()


def test_a_save_without_residuals_removes_those_of_the_one_before(
    module_ranks: RunRanks, tmp_path: Path
) -> None:
    for told, printed in module_ranks(2, saved_without_feedback, str(tmp_path)):
        assert "lacks files" not in printed, "its guard had given nothing up"
        assert "hybridcomp_residuals_rank_00000.pt (step 2)" in told
        assert "hybridcomp_state.json (step 7) were not saved together" in told
    residuals = "hybridcomp_residuals_rank_*.pt"
    assert not list((tmp_path / "last").glob(residuals))
    assert len(list((tmp_path / "kept").glob(residuals))) == 2
