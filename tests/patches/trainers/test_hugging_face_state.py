"""The Trainer callback's state in checkpoints, with the Trainer or a stand-in."""

from __future__ import annotations

import contextlib
import io
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hybridcomp
from hybridcomp.patches.trainers.figures import reporters
from tests.ranks import run_ranks

#: without error feedback: the state to keep is the progress of the warm-up
BLOCK: dict[str, Any] = {
    "dp": {"codec": "blockint", "bits": 8}, "start_step": 4, "min_bytes": 0,
    "ledger": {"every": 99},
}  # fmt: skip


def callback_of(model: nn.Module, resume_from: Path | None) -> Any:
    """Return the callback of a Trainer that has wrapped ``model``."""
    if find_spec("transformers") is None:
        stand_in: Any = ModuleType("transformers")
        stand_in.__spec__ = ModuleSpec("transformers", None)
        stand_in.Trainer, stand_in.TrainerCallback = object, object
        sys.modules["transformers"] = stand_in
    from hybridcomp.patches.trainers.hugging_face import HybridcompCallback

    trainer = SimpleNamespace(is_deepspeed_enabled=False, model_wrapped=model)
    return HybridcompCallback(trainer, BLOCK, resume_from)


def resumed(folder: Path) -> tuple[list[int], str]:
    """Train three steps, save, and continue with other models; return the counted steps.

    A model of an earlier Trainer stays attached.
    """
    args, control = SimpleNamespace(world_size=2, output_dir=str(folder)), SimpleNamespace()
    found, said = [], io.StringIO()
    earlier = DistributedDataParallel(nn.Linear(64, 64))
    callback_of(earlier, None).on_train_begin(args, SimpleNamespace(global_step=0), control)
    parts = [(0, 3, None), (3, 2, None), (2, 1, None), (5, 1, folder / "checkpoint-3")]
    for done, steps, resume_from in parts:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(64, 64))
        callback, state = callback_of(model, resume_from), SimpleNamespace(global_step=done)
        with contextlib.redirect_stdout(said):
            callback.on_train_begin(args, state, control)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(torch.ones(4, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        state.global_step = done + steps
        callback.on_save(args, state, control)
        (attached,) = reporters(model)
        found.append(attached.channels.step)
        hybridcomp.detach(model)
        if done == 0:  # the resumed process has one model only
            hybridcomp.detach(earlier)
    return found, said.getvalue()


def test_a_resumed_run_goes_on_counting_steps(tmp_path: Path) -> None:
    (steps, said), (others, _) = run_ranks(2, resumed, tmp_path)
    assert steps == others == [3, 5, 1, 2]  # the third part saved checkpoint-3 anew
    assert (tmp_path / "checkpoint-5" / "hybridcomp").is_dir()
    assert "checkpoint-2/hybridcomp is not there: steps are counted from 0, residuals start" in said
