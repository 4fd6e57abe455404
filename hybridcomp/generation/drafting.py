"""Verify a draft's tokens on the last stage: accept the right ones, and draft the next tree.

Sampling is greedy, so every answer is the one that the target alone would give.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.generation.draft import DraftModule, Pair
from hybridcomp.generation.past import KeyStore, PackedPass, SequencePart
from hybridcomp.generation.picking import Picked, Sampling
from hybridcomp.generation.stage_runner import StageRunner
from hybridcomp.generation.tree import Tree, accepted, linearised, width_for

#: whether to draft sibling candidates (CaPE): always, never, or if that is faster
Cape = bool | Literal["auto"]
#: sequence passes of each variant, with and without siblings, before ``auto`` decides
TRIED = 24


@dataclass
class DraftFigures:
    """Passes and tokens of drafting on the last stage, added up over calls of ``generate``.

    Attributes:
        passes: passes of sequences through all stages, without those of the prompts.
        tokens: answer tokens from these passes; without drafts one per pass.
        verified: tree nodes that these passes verified.
    """

    passes: int = 0
    tokens: int = 0
    verified: int = 0

    @property
    def tokens_a_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0


@dataclass
class _Sequence:
    """A sequence: its tokens, the draft's keys and values, and the time of its last pass."""

    tokens: list[int]
    known: list[Pair] | None = None
    wide: bool = False
    seen_at: float = 0.0
    rounds: int = 0


@dataclass
class _Trial:
    """Tokens and seconds of passes without (index 0) and with (index 1) sibling candidates."""

    tokens: list[int] = field(default_factory=lambda: [0, 0])
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    passes: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, wide: bool, tokens: int, seconds: float) -> None:
        self.tokens[wide] += tokens
        self.seconds[wide] += seconds
        self.passes[wide] += 1

    @property
    def verdict(self) -> bool | None:
        """Return whether siblings yield more tokens per second; None: too few passes yet."""
        if min(self.passes) < TRIED:
            return None
        narrow, wide = (t / max(s, 1e-9) for t, s in zip(self.tokens, self.seconds, strict=True))
        return wide > narrow


class DraftPicker:
    """The last stage's picker that verifies trees and drafts the next ones (``Picker``)."""

    def __init__(
        self, module: DraftModule, sampling: Sampling, gamma: int, cape: Cape,
        figures: DraftFigures, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._module, self._sampling, self._gamma = module, sampling, gamma
        self._cape, self._figures, self._clock = cape, figures, clock
        self._sequences: dict[int, _Sequence] = {}
        self._trial = _Trial()
        self._store: KeyStore | None = None

    def begin(self, runner: StageRunner) -> None:
        """Set the ``runner`` whose keys and values are read, before its first pass."""
        self._store = runner.store

    @property
    def chosen(self) -> bool | None:
        """Return whether trees get sibling candidates; None while ``auto`` compares."""
        return self._trial.verdict if self._cape == "auto" else self._cape

    def __call__(self, passed: PackedPass, logits: Tensor) -> list[Picked]:
        """Accept the tokens of each part that the target would pick, and draft its next tree."""
        self._check(logits)
        for sequence in passed.ended:
            self._sequences.pop(sequence, None)
        rows = torch.split(logits, [part.wants for part in passed.parts])
        return [self._one(part, own) for part, own in zip(passed.parts, rows, strict=True)]

    def _check(self, logits: Tensor) -> None:
        """Raise ConfigError if the draft was trained for another model."""
        sizes, store = self._module.sizes, self._store
        want: tuple[int, ...] = (sizes.vocabulary,)
        have: tuple[int, ...] = (logits.shape[1],)
        if sizes.cross:
            assert store is not None, "begun"
            key, _ = store.of(next(iter(store.lengths)), store.layers[-1])
            want += sizes.target_heads, sizes.head_width
            have += key.shape[0], key.shape[2]
        if want != have:
            named = "vocabulary, heads of keys and their width"
            todo = f"the model has {have}; train a draft of this model"
            raise ConfigError("generate: draft", Shown(f"one for ({named}) {want}"), todo)

    @torch.no_grad()
    def _one(self, part: SequencePart, logits: Tensor) -> Picked:
        choices = logits[:, : self._sampling.vocabulary].double().cpu().argmax(-1).tolist()
        now = self._clock()
        if part.parents is None:  # a prompt
            self._sequences[part.sequence] = known = _Sequence(list(part.tokens))
            path: list[int] = list(range(len(part.tokens)))
            answer, kept = [choices[-1]], None
        else:
            known = self._sequences[part.sequence]
            tree = Tree(part.tokens, part.parents)
            path = accepted(tree, choices)
            answer = [*(tree.tokens[node] for node in path[1:]), choices[path[-1]]]
            kept = tuple(path)
            self._figures.passes += 1
            self._figures.tokens += len(answer)
            self._figures.verified += len(tree.tokens)
            self._trial.add(known.wide, len(answer), now - known.seen_at)
        known.tokens += answer
        chosen = self.chosen
        known.wide = known.rounds % 2 == 1 if chosen is None else chosen
        known.rounds, known.seen_at = known.rounds + 1, now
        tree = self._drafted(known, self._verified(part, path))
        return Picked(tuple(answer), tree.tokens, tree.parents, kept)

    def _verified(self, part: SequencePart, path: Sequence[int]) -> list[Pair] | None:
        """Return the target's keys and values of the accepted tokens, (1, H, M, D)."""
        if not self._module.sizes.cross:
            return None
        store = self._store
        assert store is not None, "begun"
        start = store.lengths[part.sequence] - len(part.tokens)
        places = [*range(start), *(start + node for node in path)]
        return [
            _of(store, part.sequence, layer, places) for layer in top_layers(store, self._module)
        ]

    def _drafted(self, known: _Sequence, target: list[Pair] | None) -> Tree:
        """Return the tree that follows the last token of a sequence."""
        have = known.known[0][0].shape[2] if known.known else 0
        device = self._module.head.weight.device
        tokens, pairs, levels = known.tokens[have:], known.known, list[list[int]]()
        whole = len(known.tokens)
        for _ in range(self._gamma):
            seen = None
            if target is not None:
                at = torch.arange(have, have + len(tokens), device=device)
                seen = at[:, None] >= torch.arange(target[0][0].shape[2], device=device)
            ids = torch.tensor([tokens], device=device)
            logits, pairs = self._module(ids, have, pairs, target, seen)
            shares = logits[0, -1, : self._sampling.vocabulary].softmax(-1)
            width = width_for(float(shares.max())) if known.wide else 1
            levels.append(shares.topk(min(width, len(shares))).indices.tolist())
            have, tokens = have + len(tokens), [levels[-1][0]]
        assert pairs is not None
        # drop the keys of drafted tokens: accepted ones are recomputed with the target's keys
        known.known = [(key[:, :, :whole], value[:, :, :whole]) for key, value in pairs]
        return linearised(known.tokens[-1], levels)


def top_layers(store: KeyStore, module: DraftModule) -> list[Hashable]:
    """Return the target's layers that the draft's layers attend to, in the draft's order."""
    return store.layers[-module.sizes.layers :]


def _of(store: KeyStore, sequence: int, layer: Hashable, places: Sequence[int]) -> Pair:
    """Return a layer's held keys and values at ``places`` (ascending), (1, H, M, D)."""
    key, value = store.of(sequence, layer)
    if places[-1] == len(places) - 1:
        return key[None, :, : len(places)], value[None, :, : len(places)]
    return key[None, :, places], value[None, :, places]
