"""Roll-outs in DeepSpeed's format, compared with its hybrid engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import hybridcomp
from tests.generation import generating_jobs as jobs
from tests.ranks import run_ranks

rollouts = pytest.importorskip("deepspeed.runtime.rollout")
PAD, EOS = 0, 53


def request() -> Any:
    """Return left-padded prompts of random lengths."""
    prompts = jobs.prompts(12, 10, seed=4)
    ids = torch.full((12, 10), PAD)
    masks = torch.zeros(12, 10, dtype=torch.int64)
    for row, mask, prompt in zip(ids, masks, prompts, strict=True):
        row[10 - len(prompt) :] = torch.tensor(prompt)
        mask[10 - len(prompt) :] = 1
    return rollouts.RolloutRequest(ids, masks)


class Generating:
    """Stand-in for a transformers model whose ``generate`` ignores padding."""

    def __init__(self) -> None:
        self.model = jobs.whole_model(tied=True)

    def generate(self, ids: Tensor, attention_mask: Tensor, **given: Any) -> Tensor:
        """Continue every row greedily."""
        assert not given["do_sample"]
        rows = []
        for row, mask in zip(ids, attention_mask.bool(), strict=True):
            answer, _ = jobs.greedy(self.model, row[mask].tolist(), given["max_new_tokens"])
            rows.append(torch.cat([row, torch.tensor(answer)]))
        return torch.stack(rows)


def fields(batch: Any) -> list[Any]:
    return [batch.input_ids.tolist(), batch.attention_mask.tolist(),
            batch.response_start_idx.tolist()]  # fmt: skip


def tokenizers() -> dict[str, Any]:
    return {"own": jobs.Tokenizer(eos=EOS), "pads": jobs.Tokenizer(pad=None, eos=[16, EOS])}


def rolled_out() -> dict[str, Any]:
    """Run roll-outs on two stages that share the embedding's weight."""
    engine = jobs.engine(1, 2, tied=True)
    batches: dict[str, Any] = {}
    for name, tokenizer in tokenizers().items():
        rollout = hybridcomp.rollout(engine, tokenizer)
        assert isinstance(rollout, rollouts.RolloutEngine)
        greedy = rollouts.SamplingConfig(7, temperature=0.0, n_samples_per_prompt=2)
        batches[name] = fields(rollout.generate(request(), greedy))
    sampling = rollouts.SamplingConfig(7, n_samples_per_prompt=2, continuous_batch_size=5)
    batches["texts"] = [fields(rollout.generate(request(), sampling))[0] for _ in range(2)]
    again = hybridcomp.rollout(engine, tokenizers()["pads"])
    again.generate(request(), greedy)
    batches["again"] = fields(again.generate(request(), sampling))[0]
    rollout.sync_weights(3)
    rollout.shutdown()
    no = jobs.Tokenizer(pad=None, eos=None)
    batches["no pad"] = jobs.refused(
        lambda: hybridcomp.rollout(engine, no).generate(request(), greedy)
    )
    return batches


def test_roll_outs_are_those_of_the_hybrid_engine() -> None:
    first, second = run_ranks(2, rolled_out)
    assert first == second
    greedy = rollouts.SamplingConfig(7, temperature=0.0, n_samples_per_prompt=2)
    for name, tokenizer in tokenizers().items():
        if isinstance(tokenizer.eos_token_id, list):
            tokenizer.pad_token_id = 16  # transformers accepts several
        engine = SimpleNamespace(module=Generating())
        want = rollouts.HybridEngineRollout(engine, tokenizer).generate(request(), greedy)
        assert first[name] == fields(want)
    ends = [sum(mask[10:]) for mask in first["own"][1]]
    assert min(ends) < 7 == max(ends)
    first_text, two = first["texts"]
    assert first_text != two and first["again"] == first_text  # each call has a seed
    assert "expected a pad or an EOS token" in first["no pad"]
