"""Mixture of experts under DeepSpeed: each expert is published once, by its checkpoint name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("deepspeed")

import hybridcomp
from hybridcomp.errors import ConfigError
from hybridcomp.patches.ds.expert_weights import ExpertLayers
from hybridcomp.publishing import WeightReceiver
from tests.publishing.made import error_of, same
from tests.ranks import run_ranks
from tests.training import auto_ep_trainer, moe_trainer
from tests.training.in_turn import start_deepspeed

STEPS = 2
#: AutoEP trainings, with checkpoint names of an expert's three matrices, and of a layer
AUTO = [
    (auto_ep_trainer.Job(2, "qwen3_moe"), ("gate_proj", "up_proj", "down_proj"), "mlp"),
    (auto_ep_trainer.Job(3, "mixtral"), ("w1", "w3", "w2"), "block_sparse_moe"),
]


def saved_by(engine: Any, folder: Path) -> dict[str, Tensor]:
    """Return the tensors of DeepSpeed's checkpoint, including experts."""
    engine.save_checkpoint(str(folder), tag="here")
    dist.barrier()
    found: dict[str, Tensor] = {}
    for path in sorted((folder / "here").glob("*model_states.pt")):
        state = torch.load(path, weights_only=False)
        found |= state.get("module", state)
    return {name: one for name, one in found.items() if ".gate.gate." not in name}


def native(folder: Path, zero: int) -> list[str]:
    """Train with deepspeed.moe and publish; return differences from DeepSpeed's checkpoint."""
    engine = moe_trainer.make_engine(job := moe_trainer.Job(bf16=True, zero=zero))
    publisher = hybridcomp.publish(engine, folder / "weights")
    receiver = WeightReceiver(folder / "weights")
    wrong = []
    for step in range(STEPS):
        moe_trainer.train_step(engine, job, step)
        summary = publisher.publish()
        receiver.update()
        state = saved_by(engine, folder / f"checkpoint{step}")
        experts = [name for name in state if "deepspeed_experts." in name]
        if not same(receiver, state) or summary.full != (step == 0) or len(experts) != 16:
            wrong.append(f"step {step}: {summary} {sorted(state)}")
        dist.barrier()
    told = error_of(lambda: hybridcomp.publish(engine, folder / "hf", names="hf"))
    wrong += [] if "publish.names: found 'hf'" in told else [told]
    engine.destroy()
    return wrong


def expected_names(
    before: dict[str, Tensor], matrices: tuple[str, ...], layer: str
) -> dict[str, Tensor]:
    """Return the model's tensors by Hugging Face's checkpoint names."""
    found = {}
    for name, one in before.items():
        told = name.replace(".mlp.", f".{layer}.")
        stem, _, kind = told.rpartition(".")
        if kind == "gate_up_proj":
            for which, half in enumerate(one.chunk(2, 1)):
                for number, matrix in enumerate(half):
                    found[f"{stem}.{number}.{matrices[which]}.weight"] = matrix
        elif kind == "down_proj":
            for number, matrix in enumerate(one):
                found[f"{stem}.{number}.{matrices[2]}.weight"] = matrix
        else:
            found[told] = one
    return found


def automatic(
    folder: Path, job: auto_ep_trainer.Job, matrices: tuple[str, ...], layer: str
) -> list[str]:
    """Publish under both names before and after training; return the differences."""
    engine, before = auto_ep_trainer.make_engine(job)
    publishers = {one: hybridcomp.publish(engine, folder / one, names=one) for one in ("own", "hf")}
    receivers = {one: WeightReceiver(folder / one) for one in publishers}
    wrong, kept = [], torch.empty(0)
    for step in range(STEPS):
        for name, publisher in publishers.items():
            publisher.publish()
            receivers[name].update()
        own, hf = (dict(receiver.tensors()) for receiver in receivers.values())
        if step == 0 and not same(receivers["hf"], expected_names(before, matrices, layer)):
            wrong.append(f"at first: {sorted(hf)}")
        gate, _, down = (hf[f"model.layers.1.{layer}.experts.3.{one}.weight"] for one in matrices)
        experts = "model.layers.1.mlp.experts."
        if not torch.equal(gate, own[f"{experts}w1.3"]) or not torch.equal(
            down, own[f"{experts}w2.3"]
        ):
            wrong.append(f"step {step}: other values under other names")
        # at stage 3 its checkpoints have partitions
        if job.stage < 3 and not same(receivers["own"], saved_by(engine, folder / str(step))):
            wrong.append(f"step {step}: another checkpoint")
        if step and torch.equal(gate, kept):
            wrong.append("nothing was trained")
        kept = gate.clone()
        dist.barrier()
        auto_ep_trainer.train_step(engine, step)
    engine.destroy()
    return wrong


def published(folder: Path, zero: int) -> list[str]:
    """Return the differences under deepspeed.moe and AutoEP."""
    start_deepspeed()
    wrong = native(folder / "native", zero)
    for job, matrices, layer in AUTO:
        wrong += automatic(folder / job.family, job, matrices, layer)
    return wrong


@pytest.mark.parametrize(
    ("world_size", "zero"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.nightly)]
)
def test_experts_have_their_names_in_checkpoints(
    tmp_path: Path, world_size: int, zero: int
) -> None:
    """On four ranks two hold the same experts, and each publishes a part of them."""
    found = run_ranks(world_size, published, tmp_path, zero, timeout=600.0)
    assert found == [[]] * world_size


def test_experts_that_nothing_numbers_are_refused() -> None:
    layers = ExpertLayers(nn.Sequential(nn.Linear(2, 2)), str)
    assert [one.name for one in layers.of("0.weight", (2, 2), False)] == ["0.weight"]
    with pytest.raises(ConfigError, match="publish: found 0.weight; ranks have different experts"):
        layers.of("0.weight", (2, 2), True)
