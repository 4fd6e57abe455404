"""``train_gpt.py --cuts`` and ``--recompute``: the same training in a plan's layout."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
import train_gpt
from gpt import layouts
from gpt.model import GPT, lm_loss
from gpt.weights import ModelConfig

from tests.ranks import RunRanks
from tests.training.in_turn import start_deepspeed

SIZES: dict[str, Any] = {"vocabulary": 64, "layers": 4, "width": 32, "heads": 2}


def pipelined(
    cuts: tuple[int, ...], recompute: tuple[tuple[int, int], ...] = ()
) -> tuple[list[float], list[str]]:
    """Return the losses of three steps, and this stage's layers."""
    pytest.importorskip("deepspeed")
    import deepspeed
    from gpt import loop, model

    start_deepspeed()  # without kernels that take a minute to build
    module = model.pipeline(ModelConfig(**SIZES, recompute=recompute), cuts, num_stages=2)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=list(module.parameters()), config=config
    )
    trainer = loop.PipeTrainer(engine)
    tokens = torch.arange(2 * 17).remainder(64).view(2, 17)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    losses = [trainer.step(iter([batch, batch])) for _ in range(3)]
    return losses, [type(layer).__name__ for layer in module.forward_funcs]


def test_stages_have_the_blocks_that_were_asked_for_and_losses_stay(module_ranks: RunRanks) -> None:
    pytest.importorskip("deepspeed")
    uneven = module_ranks(2, pipelined, (1, 3))
    assert uneven[0][1] == ["Embedding", "Block"]
    assert uneven[1][1] == ["Block", "Block", "Block", "FinalNorm", "Output"]
    twice = module_ranks(2, pipelined, (1, 3), ((0, 1), (1, 3)))
    assert twice[0][0] == uneven[0][0], "what is recomputed changes no bit"
    even = module_ranks(2, pipelined, ())
    assert even[0][0][0] == uneven[0][0][0], "a cut elsewhere is the same model"
    assert even[0][0] == pytest.approx(uneven[0][0], rel=1e-3), "sums of another alignment"


def test_recomputed_blocks_keep_less_and_change_no_bit() -> None:
    tokens = torch.arange(2 * 17).remainder(64).view(2, 17)
    found = []
    for recompute in ((), ((0, 1), (2, 3)), ((1, 4),)):
        model = GPT(ModelConfig(**SIZES, recompute=recompute))
        saved = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            saved += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = lm_loss(model(tokens[:, :-1]), tokens[:, 1:])
            kept = saved
            loss.backward()  # type: ignore[no-untyped-call]
        found.append((kept, [p.grad for p in model.parameters() if p.grad is not None]))
    (all_kept, plain), *others = found
    for some_kept, twice in others:
        assert some_kept < 0.75 * all_kept
        assert all(torch.equal(a, b) for a, b in zip(plain, twice, strict=True))
    assert others[1][0] < others[0][0], "three blocks that keep one input, of four"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pp", "2", "--cuts", "1,2"], "expected 2 numbers"),
        (["--pp", "2", "--cuts", "4"], "expected 2 numbers"),
        (["--recompute", "4"], "--recompute 4: expected a layer, 0 to 3"),
        (["--recompute", "0-2,2"], "--recompute 2: expected a layer, 3 to 3"),
        (["--recompute", "2-4"], "--recompute 2-4: expected a layer"),
    ],
)
def test_numbers_that_are_not_those_of_the_layers(words: list[str], said: str) -> None:
    arguments: argparse.Namespace = train_gpt.parse(["--deepspeed_config", "x.json", *words])
    with pytest.raises(layouts.ParallelismError, match=said):
        layouts.check_numbers(arguments)


def test_numbers_of_a_plan_are_read() -> None:
    words = ["--deepspeed_config", "x", "--pp", "2", "--cuts", "1,3", "--recompute", "none"]
    arguments = train_gpt.parse(words)
    layouts.check_numbers(arguments)
    assert arguments.cuts == (1, 3) and arguments.recompute == ()
    with pytest.raises(SystemExit):
        train_gpt.parse([*words, "--cuts", "1,x"])
