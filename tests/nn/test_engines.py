"""The example with --cp under DeepSpeed, FSDP2 and DDP: losses of whole sequences, one ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import RunRanks
from tests.selection import by_day

VOCABULARY, LENGTH, STEPS = 61, 64, 3
SETTINGS: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 10_000,
}


@dataclass(frozen=True)
class Run:
    """A training: its engine, ranks per sequence, and ``cp`` settings."""

    engine: str
    cp: int = 2
    setting: Any = None


def _engine(run: Run, model: Any) -> tuple[Any, Any, Any]:
    """Return a trainer, its channels, and a function that ends it."""
    import deepspeed
    from gpt.loop import PlainTrainer
    from gpt.model import lm_loss
    from gpt.torch_engines import Engine, TorchTrainer

    import hybridcomp
    from hybridcomp.channels import channels_of

    block = {"cp": run.setting, "min_bytes": 0, "ledger": {"every": 1000}}
    if run.engine == "deepspeed":
        settings = dict(SETTINGS)
        if run.setting is not None:
            settings["compression"] = block
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=settings
        )
        return PlainTrainer(engine, lm_loss), channels_of(engine), engine.destroy
    kind: Any = run.engine
    torch_engine = Engine(kind, model, SETTINGS)
    channels = None
    if run.setting is not None:
        attached = hybridcomp.attach(torch_engine.model, block)
        assert attached is not None
        channels = attached.channels
    return TorchTrainer(torch_engine, lm_loss, SETTINGS), channels, lambda: None


def train(run: Run) -> tuple[list[float], dict[str, tuple[float, float]]]:
    """Return losses, and by direction the messages of ``cp`` with the native ones."""
    from gpt import context_parallel
    from gpt.data import Share
    from gpt.model import GPT
    from gpt.weights import ModelConfig

    from hybridcomp.session import process

    if run.cp > 1:
        context_parallel.start(run.cp, 1, 1)
    torch.manual_seed(0)
    model = GPT(ModelConfig(vocabulary=VOCABULARY, layers=2, width=32, heads=2, cp=run.cp))
    trainer, channels, end = _engine(run, model)
    share = Share(rank=0, world_size=1, micro_batch=2, micro_batches=1)  # all take the same samples
    if run.cp > 1:
        share = context_parallel.share(trainer.share)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)

        def cut(values: Tensor) -> Tensor:
            return share.cut(values.contiguous())

        losses.append(trainer.step(iter([(cut(tokens[:, :-1]), cut(tokens[:, 1:]))])))
    counted = {}
    if channels is not None:
        lent = process.current()  # the engine shares its session
        assert lent is not None and lent is channels
        for way in ("forward", "backward"):
            entry = lent.ledger.interval["cp", way]
            counted[way] = (entry.messages, entry.native)
        assert lent.step == STEPS
    end()
    del trainer, model
    process.configure(None)
    return losses, counted


def trainings(runs: list[Run]) -> list[tuple[list[float], dict[str, tuple[float, float]]]]:
    import hybridcomp
    from tests.training.in_turn import start_deepspeed

    start_deepspeed()
    hybridcomp.install()
    outcomes = [train(run) for run in runs]
    hybridcomp.uninstall()
    return outcomes


def refused() -> str:
    """Return the error of a block with ``cp`` for a model that shards no sequence."""
    import hybridcomp
    from hybridcomp.errors import ConfigError

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    try:
        hybridcomp.attach(model, {"cp": "expcode"})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("engine", by_day(["deepspeed", "fsdp2", "ddp"], ["deepspeed", "ddp"]))
def test_engines_train_over_sequences(module_ranks: RunRanks, engine: str) -> None:
    runs = [
        Run(engine, cp=1), Run(engine), Run(engine, setting="expcode"),
        Run(engine, setting={"codec": "blockint", "bits": 8}),
    ]  # fmt: skip
    layers = 2
    for dense, native, lossless, lossy in module_ranks(2, trainings, runs):
        assert native[0] == pytest.approx(dense[0], rel=2e-5)
        assert lossless[0] == native[0]
        assert lossy[0] != native[0] and lossy[0] == pytest.approx(native[0], rel=1e-2)
        for _, counted in (lossless, lossy):
            assert counted["forward"] == (2 * layers * STEPS, 0)
            assert counted["backward"] == (layers * STEPS, 0)


def test_a_model_without_a_ring_is_refused(module_ranks: RunRanks) -> None:
    for text in module_ranks(2, refused):
        assert "compression.cp" in text and "use hybridcomp.nn.RingAttention" in text
