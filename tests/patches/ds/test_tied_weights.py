"""Tied weights on fakes: who reduces, and the order relative to the data-parallel sum."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.pipe import schedule

from hybridcomp.channels import ATTRIBUTE, NAME, Channels
from hybridcomp.channels.residuals.pieces import Piece
from hybridcomp.collectives import Handle, Meter
from hybridcomp.config import CompressionConfig
from hybridcomp.patches.ds.pipeline import tied_weights
from tests.ranks import RunRanks
from tests.stand_ins.process_groups import fake_group
from tests.training.in_turn import digest, start_deepspeed
from tests.training.pipe_trainer import Job, batches, build, ds_config

LOSSY = {"codec": "blockint", "bits": 4}


class FakeEngine(SimpleNamespace):
    """Minimal engine for the patched instructions; ``log`` records calls."""

    def __init__(self, block: dict[str, Any] | None, **flags: Any) -> None:
        weight = torch.nn.Parameter(torch.ones(4, 8))
        weight.grad = torch.arange(32.0).view(4, 8).t().contiguous().t()  # not contiguous
        setattr(weight, NAME, "tied_modules.embed.weight")
        defaults = {
            "is_data_parallel": True,
            "using_bf16_optimizer": False,
            "zero_optimization": lambda: False,
            "log": [],
            "weight": weight,
        }
        super().__init__(**{**defaults, **flags})
        group = fake_group()
        self.module = SimpleNamespace(
            get_tied_weights_and_groups=lambda: [(weight, group)],
            tied_comms={"embed": {}},
            _synchronize_tied_weights=lambda: self.log.append("broadcast"),
        )
        if block is not None:
            setattr(self, ATTRIBUTE, Channels(CompressionConfig.parse({"min_bytes": 0, **block})))


def run(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run the end of a batch; return the log."""

    def all_reduce(self: Any, channel: Any, codec: Any) -> Handle:
        tensor = self.load(codec)
        assert tensor.is_contiguous() and tensor.dim() == 1
        assert self.pieces() == [Piece("tied_modules.embed.weight#tied", 0, 32)]
        assert self.native_nbytes(2) == 128
        tensor.mul_(2)
        engine.log.append(f"coded {channel.dimension}")
        return Handle(iter(()), Meter(), async_op=False)  # type: ignore[arg-type]

    monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: 2)
    monkeypatch.setattr("torch.distributed.get_rank", lambda group=None: 0)
    monkeypatch.setattr("hybridcomp.channels.AllReduce.send", all_reduce)
    instructions = tied_weights.make_instruction_map(
        {
            schedule.ReduceTiedGrads: lambda self: self.log.append("tied"),
            schedule.ReduceGrads: lambda self: self.log.append("grads"),
            schedule.OptimizerStep: lambda self, lr_kwargs=None: self.log.append("step"),
        }
    )
    for kind in (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep):
        instructions[kind](engine)
    found: list[Any] = engine.log
    return found


def is_zero() -> bool:
    return True


@pytest.mark.parametrize(
    ("block", "flags", "expected"),
    [
        (None, {}, ["tied", "grads", "step"]),
        ({"dp": "none"}, {}, ["tied", "grads", "step"]),
        # lossless, or one replica of each stage: upstream's order
        ({"dp": "mpc"}, {}, ["coded dp", "grads", "step"]),
        ({"dp": LOSSY}, {"is_data_parallel": False}, ["coded dp", "grads", "step"]),
        # whole gradients: the tied sum comes last
        ({"dp": LOSSY}, {}, ["grads", "coded dp", "step"]),
        ({"dp": LOSSY, "min_bytes": 4096}, {}, ["grads", "tied", "step"]),
        (
            {"dp": LOSSY},
            {"using_bf16_optimizer": True, "zero_optimization": is_zero},
            ["grads", "coded dp", "step"],
        ),
        # slices of gradients, or gathered parameters: a broadcast after the step
        ({"dp": LOSSY}, {"zero_optimization": is_zero}, ["coded dp", "grads", "step", "broadcast"]),
        ({"zero": LOSSY}, {"zero_optimization": is_zero}, ["tied", "grads", "step", "broadcast"]),
        ({"zero": LOSSY}, {"using_bf16_optimizer": True}, ["tied", "grads", "step", "broadcast"]),
        ({"dp": "mpc"}, {"zero_optimization": is_zero}, ["coded dp", "grads", "step"]),
        ({"zero": LOSSY}, {}, ["tied", "grads", "step"]),
    ],
)  # fmt: skip
def test_order(
    block: dict[str, Any] | None,
    flags: dict[str, Any],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine(block, **flags)
    weight = engine.weight
    grad = torch.arange(32.0).view(4, 8)
    if flags.get("using_bf16_optimizer"):
        weight._hp_grad, weight.grad = weight.grad, None
    assert run(engine, monkeypatch) == expected
    found = weight._hp_grad if flags.get("using_bf16_optimizer") else weight.grad
    assert torch.equal(found, grad * (2 if "coded dp" in expected else 1))
    if block is not None:
        entry = getattr(engine, ATTRIBUTE).ledger.interval["dp", "forward"]
        # the channel, a fake here, records encoded messages
        native = 128 if "tied" in expected else 0
        broadcast = 128 if "broadcast" in expected else 0
        assert (entry.raw_nbytes, entry.wire_nbytes) == (native, native + broadcast)


def test_weight_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine({"dp": LOSSY}, is_data_parallel=False)
    engine.weight.grad = None
    assert run(engine, monkeypatch) == ["tied", "grads", "step"]  # upstream skips it too


def fill_again(zero: dict[str, Any], folder: Path) -> tuple[list[str], int]:
    """Return digests of this rank's tied weight, after steps, a save, and a load; and how many
    gathers of the steps were native.
    """
    import deepspeed

    import hybridcomp

    start_deepspeed()
    hybridcomp.install()
    job = Job(tied=True, bf16=True, zero=1, block={"dp": LOSSY, "zero": zero, "min_bytes": 0})
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=build(job, []), config=ds_config(job, 2))
    data = batches(job, engine.grid.get_data_parallel_id())

    def tied() -> str:
        (found,) = (p for n, p in engine.module.named_parameters() if n.startswith("tied_modules"))
        return digest(found)

    for _ in range(3):
        engine.train_batch(data)
    digests, native = [tied()], getattr(engine, ATTRIBUTE).ledger.interval["zero", "forward"].native
    engine.save_checkpoint(str(folder))
    digests.append(tied())
    engine.load_checkpoint(str(folder))
    digests.append(tied())
    engine.destroy()
    return digests, int(native)


@pytest.mark.parametrize("delta", [False, True])
def test_replicas_whose_masters_drift_stay_equal(
    module_ranks: RunRanks, tmp_path: Path, delta: bool
) -> None:
    """Checkpoints fill the weights from the masters; deltas need what the gathers left there."""
    found = module_ranks(4, fill_again, {**LOSSY, "delta": delta}, tmp_path)
    assert len({one for digests, _ in found for one in digests}) == 1, found
    assert {native for _, native in found} == {int(delta)}  # the first gather of deltas is exact
