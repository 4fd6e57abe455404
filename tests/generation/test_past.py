"""Passes over packed tokens equal single sequences; trees equal their paths."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybridcomp.errors import ConfigError
from hybridcomp.generation import KeyStore, PackedPass, SequencePart, StageRunner
from hybridcomp.nn.slices import KVCache
from tests.generation.generating_jobs import HEADS, LAYERS, VOCAB, greedy, prompts, whole_model

CPU = torch.device("cpu")


def runners(model: Any, cuts: Sequence[int], room: int = 64) -> list[StageRunner]:
    """Return the stages of a model split after ``cuts``."""
    edges = [0, *cuts, len(model.layers)]
    last = len(edges) - 2
    return [
        StageRunner(model.layers[a:b], KeyStore(room), CPU, is_first=n == 0, is_last=n == last)
        for n, (a, b) in enumerate(zip(edges[:-1], edges[1:], strict=True))
    ]


def through(
    stages: Sequence[StageRunner], *parts: SequencePart, ended: Sequence[int] = ()
) -> Tensor:
    """Return logits of a pass through all stages, described by a hop's JSON."""
    passed = PackedPass(parts, tuple(ended))
    passed = PackedPass.from_json(json.loads(json.dumps(passed.as_json())))
    values = None
    for stage in stages:
        values = stage(passed, values)
    assert values is not None
    return values


@pytest.mark.parametrize("cuts", [(), (1, 2, 4)])
def test_packed_passes_are_whole_passes(cuts: tuple[int, ...]) -> None:
    model, asked = whole_model(), prompts(5)
    stages = runners(model, cuts)
    want = [greedy(model, prompt, 4)[1] for prompt in asked]
    parts = [SequencePart(n, tuple(prompt)) for n, prompt in enumerate(asked)]
    for step in range(4):
        logits = through(stages, *parts)
        for row, rows in zip(logits, want, strict=True):
            torch.testing.assert_close(row, rows[step], atol=1e-5, rtol=1e-5)
        parts = [SequencePart(n, (int(row.argmax()),)) for n, row in enumerate(logits)]


def test_prompts_in_pieces_and_other_sequences_beside_them() -> None:
    model, (long, other) = whole_model(), prompts(2, seed=3)
    long = (long * 4)[:20]
    stages = runners(model, (3,))
    through(stages, SequencePart(0, tuple(long[:7]), wants=0))
    logits = through(stages, SequencePart(1, tuple(other)), SequencePart(0, tuple(long[7:])))
    for row, prompt in zip(logits, (other, long), strict=True):
        torch.testing.assert_close(row, greedy(model, prompt, 1)[1][0], atol=1e-5, rtol=1e-5)


def test_a_tree_sees_what_its_paths_see_and_leaves_what_is_kept() -> None:
    """Nodes 0-1-2 and 0-3 and 4 after a prompt; then the path 0-3 continues."""
    model, (prompt,) = whole_model(), prompts(1, seed=1)
    stages = runners(model, (2, 4))
    through(stages, SequencePart(0, tuple(prompt)))
    tokens, parents = (5, 6, 7, 8, 9), (-1, 0, 1, 0, -1)
    logits = through(stages, SequencePart(0, tokens, wants=5, parents=parents))
    for node, row in enumerate(logits):
        path, at = list[int](), node
        while at >= 0:
            path.insert(0, tokens[at])
            at = parents[at]
        torch.testing.assert_close(row, greedy(model, prompt + path, 1)[1][0], atol=1e-5, rtol=1e-5)
    (after,) = through(stages, SequencePart(0, (11,), kept=(0, 3)))
    want = greedy(model, [*prompt, 5, 8, 11], 1)[1][0]
    torch.testing.assert_close(after, want, atol=1e-5, rtol=1e-5)
    assert {stage.store.lengths[0] for stage in stages} == {len(prompt) + 3}
    (after,) = through(stages, SequencePart(0, (12,), kept=()))  # drops a token
    want = greedy(model, [*prompt, 5, 8, 12], 1)[1][0]
    torch.testing.assert_close(after, want, atol=1e-5, rtol=1e-5)


def test_any_trees_are_their_paths() -> None:
    model, draw = whole_model(), random.Random(0)
    for case in range(8):
        (prompt,) = prompts(1, 8, seed=case)
        stages = runners(model, (3,))
        through(stages, SequencePart(0, tuple(prompt)))
        text, kept = list(prompt), None
        for _ in range(3):
            count = draw.randint(1, 6)
            tokens = tuple(draw.randrange(VOCAB) for _ in range(count))
            parents = tuple(draw.randrange(-1, at) for at in range(count))
            logits = through(
                stages, SequencePart(0, tokens, wants=count, parents=parents, kept=kept)
            )
            node, path = draw.randrange(count), list[int]()
            chosen = node
            while node >= 0:
                path.insert(0, node)
                node = parents[node]
            text += [tokens[at] for at in path]
            want = greedy(model, text, 1)[1][0]
            torch.testing.assert_close(logits[chosen], want, atol=1e-5, rtol=1e-5)
            kept = tuple(path)


def test_stores_hold_what_was_seen_and_forget_what_has_ended() -> None:
    model, asked = whole_model(), prompts(3)
    (stage,) = runners(model, ())
    through([stage], *(SequencePart(n, tuple(prompt)) for n, prompt in enumerate(asked)))
    assert stage.store.lengths == {n: len(prompt) for n, prompt in enumerate(asked)}
    block = model.layers[LAYERS]
    key, value = stage.store.of(1, block)
    assert key.shape == value.shape == (HEADS, len(asked[1]), 8)
    through([stage], SequencePart(1, (3,)), ended=(0, 2))
    assert stage.store.lengths == {1: len(asked[1]) + 1}
    with pytest.raises(KeyError):
        stage.store.of(0, block)


def test_no_sequence_grows_out_of_its_room() -> None:
    (stage,) = runners(whole_model(), (), room=4)
    through([stage], SequencePart(0, (1, 2, 3, 4)))
    with pytest.raises(ConfigError, match=r"sequence 0 of 5 tokens; room is 4"):
        through([stage], SequencePart(0, (5,)))


def test_grouped_heads_and_a_scale_of_the_layer() -> None:
    class Grouped(nn.Module):
        def forward(self, values: Tensor, past: Any) -> Tensor:
            query = values.view(1, -1, 4, 8).transpose(1, 2)
            key = query[:, :2]
            out: Tensor = past.attend(self, query, key, 2 * key, scale=0.5)
            return out.transpose(1, 2).flatten(2)

    values = torch.randn(1, 6, 32)
    stage = StageRunner([Grouped()], KeyStore(8), CPU, is_first=False, is_last=False)
    stage(PackedPass((SequencePart(0, (0,) * 4),)), values[:, :4])
    mixed = stage(PackedPass((SequencePart(0, (0,) * 2),)), values[:, 4:])
    query = values.view(1, 6, 4, 8).transpose(1, 2)
    key = query[:, :2].repeat_interleave(2, 1)
    want = F.scaled_dot_product_attention(query, key, 2 * key, is_causal=True, scale=0.5)
    torch.testing.assert_close(mixed, want.transpose(1, 2).flatten(2)[:, 4:])


def test_products_count_real_tokens_only() -> None:
    """46 % of a padded batch would be padding; no layer sees more rows than tokens."""
    model, rows = whole_model(), list[int]()
    lengths = [32, 20, 16, 12, 8, 16]  # 104 of 192
    for layer in model.layers[1:-2]:
        layer.up.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[1]))
    heads = list[int]()
    model.layers[-1].register_forward_pre_hook(lambda _, given: heads.append(given[0].shape[1]))
    (stage,) = runners(model, ())
    through([stage], *(SequencePart(n, (1,) * length) for n, length in enumerate(lengths)))
    assert rows == [sum(lengths)] * LAYERS
    assert heads == [len(lengths)]  # the head computes only requested rows


def test_a_layer_that_looks_around_without_past_is_refused() -> None:
    class Mixing(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return values.cumsum(1)

    class Cutting(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return values[:, 1:]

    for layer, match in (
        (Mixing(), "Mixing, which looks at other"),
        (Cutting(), "Cutting that"),
    ):
        stage = StageRunner([layer], KeyStore(8), CPU, is_first=False, is_last=False)
        with pytest.raises(ConfigError, match=match):
            stage.tried(torch.randn(1, 3, 4))
    stage = StageRunner([nn.Linear(4, 6)], KeyStore(8), CPU, is_first=False, is_last=False)
    assert stage.tried(torch.randn(1, 3, 4)).shape == (1, 3, 6)
    assert stage.store.lengths == {}


def test_a_layer_of_one_sequence_is_told_what_to_use() -> None:
    class Old(nn.Module):
        def forward(self, values: Tensor, past: Any) -> Tensor:
            moved: Tensor = values + past.start
            return moved

    stage = StageRunner([Old()], KeyStore(8), CPU, is_first=False, is_last=False)
    with pytest.raises(ConfigError, match=r"past\.start; .*past\.positions and past\.attend"):
        stage(PackedPass((SequencePart(0, (1,)),)), torch.randn(1, 1, 4))


def test_slices_of_a_sequence_have_the_same_past() -> None:
    """A layer that uses ``positions`` and ``attend`` can train in slices."""
    model, (prompt,) = whole_model(), prompts(1, seed=2)
    ids = torch.tensor([(prompt * 8)[:16]])
    past, out = KVCache(16), []
    for start, stop in ((0, 5), (5, 6), (6, 16)):
        values, here = ids[:, start:stop], past.at(start)
        for layer in model.layers:
            values = layer(values, here) if hasattr(layer, "qkv") else layer(values)
        out.append(values)
    torch.testing.assert_close(torch.cat(out, 1), model(ids), atol=1e-5, rtol=1e-5)
