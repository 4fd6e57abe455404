"""Draft tokens on two stages: one training call, greedy answers, fewer round trips, errors."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hybridcomp
from hybridcomp.errors import ConfigError, PeerError
from hybridcomp.generation import GenerationFigures
from hybridcomp.generation.draft import DraftModule, DraftSizes, block_mask
from hybridcomp.generation.drafting import TRIED, DraftFigures, DraftPicker
from hybridcomp.generation.past import PackedPass, SequencePart
from hybridcomp.generation.picking import Sampling
from tests.generation import generating_jobs as jobs
from tests.ranks import RunRanks
from tests.selection import by_day

LENGTH, TOKENS, PROMPTS = 32, 16, 6


def text(rows: int, seed: int) -> Tensor:
    """Return sequences (rows, LENGTH) in which each token has two likely successors."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(jobs.VOCAB, (rows, LENGTH), generator=generator)
    noise = torch.rand(rows, LENGTH, generator=generator)
    for at in range(2, LENGTH):
        other = (ids[:, at - 2] % 2 == 0) ^ (noise[:, at] < 0.2)
        follows = (5 * ids[:, at - 1] + torch.where(other, 1, 17)) % jobs.VOCAB
        ids[:, at] = torch.where(noise[:, at] > 0.95, ids[:, at], follows)
    return ids


def trained() -> Any:
    """Return the whole model trained on such text."""
    model = jobs.whole_model()
    with torch.no_grad():
        for layer in model.layers:
            for name, weight in layer.named_parameters():
                if "norm" not in name:
                    weight.div_(1.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(150):
        ids = text(16, step)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return model.eval()


def engine_of(model: Any, batch: int) -> Any:
    """Return a pipeline of two stages with the weights of ``model``."""
    hybridcomp.install()
    engine = jobs.engine(pp=2, block={"preset": "none", "generate": {"batch": batch}})
    module = engine.module
    for at, layer in enumerate(module.forward_funcs):
        layer.load_state_dict(model.layers[module._local_start + at].state_dict())
    return engine


def drafted(folder: Path, kind: str) -> Any:
    """Return answers and figures of a draft at batch 1 and 4, greedy's, and its agreement."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        torch.save(trained(), folder / "model.pt")
    dist.barrier()
    model = torch.load(folder / "model.pt", weights_only=False)
    prompts = [row[: 6 + n % 5].tolist() for n, row in enumerate(text(PROMPTS, 999))]
    want = [jobs.greedy(model, prompt, TOKENS)[0] for prompt in prompts]
    rows: dict[str, Any] = {}
    agreement: dict[str, float] = {}
    for batch in (4, 1):
        engine = engine_of(model, batch)
        if batch == 4:
            before = [p.detach().clone() for p in engine.module.parameters()]
            draft = hybridcomp.train_draft(engine, text(800, 5), kind=kind)  # type: ignore[arg-type]
            agreement = draft.agreement
            assert (draft.module is not None) == (dist.get_rank() == 1)
            draft.save(folder / "draft")
            same = zip(before, engine.module.parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in same), "the engine stays as it is"
            dist.barrier()
        draft = hybridcomp.Draft.load(folder / "draft")
        for cape in (False, True):
            figures, trips = DraftFigures(), GenerationFigures()
            answers = hybridcomp.generate(
                engine, prompts, tokens=TOKENS, draft=draft, cape=cape, drafted=figures,
                figures=trips,
            )  # fmt: skip
            equal = sum(a.tolist() == b for a, b in zip(answers, want, strict=True))
            rows[f"{cape} {batch}"] = equal, figures.tokens_a_pass, figures.verified, trips.hops
    return rows, agreement


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize("kind", by_day(["glide", "plain"], ["glide"]))
def test_every_answer_is_greedys(module_ranks: RunRanks, kind: str, tmp_path: Path) -> None:
    (first, _), (rows, agreement) = module_ranks(2, drafted, tmp_path, kind)
    assert [equal for equal, *_ in rows.values()] == [PROMPTS] * 4
    assert agreement[kind] > 0.3
    for batch in (1, 4):
        narrow, wide = rows[f"False {batch}"], rows[f"True {batch}"]
        assert 1.3 < narrow[1] < wide[1] <= 6, "tokens a pass"
        assert wide[2] > narrow[2] / 2, "nodes"
    hops, a_pass = first["False 1"][3], rows["False 1"][1]
    trips = PROMPTS * (1 + (TOKENS - 1) / a_pass)  # the prompt, then one per pass
    assert hops == pytest.approx(trips, rel=0.15) and hops < 0.7 * PROMPTS * TOKENS


def refusals() -> list[str]:
    engine = jobs.engine(pp=2)
    sizes = DraftSizes(jobs.VOCAB, 16, 4, 1, jobs.HEADS, 8, cross=True)
    said = []

    def tried(call: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            call()
        said.append(str(caught.value))

    draft = hybridcomp.Draft(DraftModule(sizes), {})
    other = hybridcomp.Draft(DraftModule(DraftSizes(99, 16, 4, 1, 2, 8, cross=True)), {})
    asked = [[1, 2, 3]]
    tried(lambda: hybridcomp.generate(engine, asked, tokens=4, draft=draft, temperature=0.5))
    tried(lambda: hybridcomp.generate(engine, asked, tokens=4, draft=draft, cape="maybe"))  # type: ignore[arg-type]
    tried(lambda: hybridcomp.train_draft(engine, [[1, 2, 3]] * 40))
    tried(lambda: hybridcomp.train_draft(engine, text(40, 0), kind="best"))  # type: ignore[arg-type]
    tried(lambda: hybridcomp.train_draft(engine, text(40, 0), loss="mse"))  # type: ignore[arg-type]
    with pytest.raises((ConfigError, PeerError)) as caught:
        hybridcomp.generate(engine, asked, tokens=4, draft=other)
    said.append(str(caught.value))
    return said


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
def test_what_drafts_cannot_do(module_ranks: RunRanks) -> None:
    first, said = module_ranks(2, refusals)
    assert first[:5] == said[:5], "one line on all ranks"
    assert "rank 1: generate: draft: found" in first[5]
    assert "temperature 0.5; drafts are verified against the most likely token" in said[0]
    assert "generate: cape" in said[1]
    assert "40 sequences of [3] tokens" in said[2]
    assert 'expected "better", "glide" or "plain"' in said[3]
    assert 'expected "target" or "text"' in said[4]
    assert "(99, 2, 8)" in said[5] and "the model has (61, 4, 8); train a draft" in said[5]


@pytest.mark.parametrize("cross", [True, False])
def test_passes_in_pieces_are_whole_passes(cross: bool) -> None:
    sizes = DraftSizes(31, 16, 2, 2, 3, 8, cross)
    module = DraftModule(sizes)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(4)
    ids = torch.randint(31, (1, 9), generator=torch.Generator().manual_seed(1))
    target = [(torch.randn(1, 3, 9, 8), torch.randn(1, 3, 9, 8)) for _ in range(2)]
    seen = block_mask(9, 3, 2)
    given = target if cross else None
    whole, _ = module(ids, target=given, seen=seen)
    first, known = module(ids[:, :4], target=given, seen=seen[:4])
    second, known = module(ids[:, 4:5], 4, known, given, seen[4:5])
    third, _ = module(ids[:, 5:], 5, known, given, seen[5:])
    torch.testing.assert_close(torch.cat([first, second, third], 1), whole, atol=1e-4, rtol=1e-4)
    other, _ = module(ids, target=[(k + 1, v) for k, v in target], seen=seen)
    assert torch.equal(other, whole) != cross, "a plain draft does not look"


def test_kinds_have_as_many_parameters() -> None:
    both = [
        sum(p.numel() for p in DraftModule(DraftSizes(61, 48, 2, 2, 2, 48, cross)).parameters())
        for cross in (True, False)
    ]
    assert both[0] == pytest.approx(both[1], rel=0.01)


def test_blocks_see_what_was_verified_before_them() -> None:
    seen = block_mask(8, 3, 2).int().tolist()
    assert [sum(row) for row in seen] == [1, 2, 2, 2, 2, 5, 5, 5]


@pytest.mark.parametrize(("slower", "chosen"), [(1.05, True), (4.0, False)])
def test_auto_takes_the_way_that_brings_more_tokens_a_second(slower: float, chosen: bool) -> None:
    """The target always picks the draft's second choice, so siblings gain a token."""
    module = DraftModule(DraftSizes(11, 8, 2, 1, 2, 4, cross=False))
    now = [0.0]
    picker = DraftPicker(module, Sampling(), 2, "auto", DraftFigures(), lambda: now[0])
    part = SequencePart(0, (1, 2))
    logits = torch.eye(11)[[3]]
    for _ in range(2 * TRIED + 2):
        (picked,) = picker(PackedPass((part,)), logits)
        wide = len(picked.tokens) > 3
        now[0] += slower if wide else 1.0
        second = picked.tokens[3] if wide else (picked.tokens[1] + 1) % 11
        part = SequencePart(0, picked.tokens, 1, len(picked.tokens), picked.parents, picked.kept)
        logits = torch.eye(11)[[second] * len(picked.tokens)]
    assert picker.chosen is chosen
