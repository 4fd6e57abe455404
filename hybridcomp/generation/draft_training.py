"""Train drafts on the target's forward passes over text; the last stage trains the drafts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybridcomp.generation.draft import DraftModule, DraftSizes, Pair, block_mask
from hybridcomp.generation.drafting import top_layers
from hybridcomp.generation.past import KeyStore, PackedPass
from hybridcomp.generation.picking import Picked
from hybridcomp.generation.stage_runner import StageRunner

#: fraction of the sequences that is held out of training to compare drafts
HELD_OUT = 1 / 16
#: passes of learning rate warm-up
WARM_UP = 30
GLIDE, PLAIN = "glide", "plain"


@dataclass(frozen=True)
class DraftSettings:
    """Settings of a draft and of its training.

    Attributes:
        layers, width: the draft's layers and hidden width; None: half of the width of the target's
            keys over all heads.
        kinds: "glide" (with cross-attention) or "plain" (without); several are trained together.
        gamma: tokens drafted at a time.
        lr: peak learning rate of AdamW, with cosine decay to a fiftieth.
        loss: what the draft learns: "target", the target's distribution, or "text", the next token.
        rope_base: see ``DraftSizes``.
        seed: seed of the initial weights and of each step's block borders (``block_mask``).
    """

    layers: int = 1
    width: int | None = None
    kinds: tuple[str, ...] = (GLIDE, PLAIN)
    gamma: int = 5
    lr: float = 2e-3
    loss: str = "target"
    rope_base: float = 10000.0
    seed: int = 0


class DraftTeacher:
    """A ``Picker`` that trains drafts on each pass, and ends the sequences of the pass.

    A pass has whole sequences of equal length; the logits are those of all of their tokens.

    Attributes:
        modules: the drafts by kind, once the first pass has shown the target's sizes.
    """

    def __init__(
        self, settings: DraftSettings, sequences: int, device: torch.device,
        average: Callable[[list[Tensor]], object],
    ) -> None:  # fmt: skip
        """``sequences``: number over all passes. ``average``: averages gradients over replicas."""
        self._settings, self._device, self._average = settings, device, average
        self._learned = max(1, round(sequences * (1 - HELD_OUT)))
        self.modules: dict[str, DraftModule] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._hits: dict[str, list[int]] = {kind: [0, 0] for kind in settings.kinds}
        self._random = torch.Generator().manual_seed(settings.seed)
        self._seen = 0
        self._store: KeyStore | None = None

    def begin(self, runner: StageRunner) -> None:
        """Read the keys and values of ``runner``, before its first pass."""
        self._store = runner.store

    @property
    def agreement(self) -> dict[str, float]:
        """Return for each kind the fraction of held-out tokens with the target's first choice."""
        return {kind: hit / max(1, count) for kind, (hit, count) in self._hits.items()}

    @property
    def best(self) -> DraftModule:
        agreement = self.agreement
        return self.modules[max(self.modules, key=lambda kind: agreement[kind])].eval()

    def __call__(self, passed: PackedPass, logits: Tensor) -> list[Picked]:
        """Train on a pass or, if it is held out, measure agreement; end all of its sequences."""
        tokens = torch.tensor([part.tokens for part in passed.parts], device=self._device)
        want = logits.detach().float().view(*tokens.shape, -1)
        if not self.modules:
            self._make(want.shape[-1])
        target = self._target(passed)
        if self._seen >= self._learned:
            self._measure(tokens, want, target)
        else:
            self._learn(tokens, want, target)
        self._seen += len(passed.parts)
        return [Picked((0,), (0,)) for _ in passed.parts]

    def _make(self, vocabulary: int) -> None:
        settings, store = self._settings, self._store
        assert store is not None, "begun"
        layers = store.layers
        key, _ = store.of(next(iter(store.lengths)), layers[-1])
        heads, size = key.shape[0], key.shape[2]
        width = settings.width or max(2 * heads, heads * size // 2 // (2 * heads) * 2 * heads)
        for kind in settings.kinds:
            sizes = DraftSizes(
                vocabulary, width, heads, min(settings.layers, len(layers)), heads, size,
                kind == GLIDE, settings.rope_base,
            )  # fmt: skip
            module = DraftModule(sizes, settings.seed).to(self._device)
            self.modules[kind] = module
            self._optimizers[kind] = torch.optim.AdamW(
                module.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0
            )

    def _target(self, passed: PackedPass) -> list[Pair]:
        """Return the keys and values of the target's top layers, (B, H, T, D) each."""
        store, module = self._store, next(iter(self.modules.values()))
        assert store is not None, "begun"
        target = []
        for layer in top_layers(store, module):
            pairs = [store.of(part.sequence, layer) for part in passed.parts]
            target.append((torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])))
        return target

    @torch.enable_grad()
    def _learn(self, tokens: Tensor, want: Tensor, target: list[Pair]) -> None:
        settings, length = self._settings, tokens.shape[1]
        done = self._seen / self._learned
        warm = (self._seen + len(tokens)) / (WARM_UP * len(tokens))
        share = min(warm, 0.5 * (1 + math.cos(math.pi * min(done, 1.0))) + 0.02)
        first = int(torch.randint(1, settings.gamma + 1, (), generator=self._random, device="cpu"))
        seen = block_mask(length, settings.gamma, first).to(self._device)
        for kind, module in self.modules.items():
            optimizer = self._optimizers[kind]
            optimizer.param_groups[0]["lr"] = settings.lr * share
            logits, _ = module(tokens, target=_for(module, target), seen=seen)
            if settings.loss == "text":
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            else:
                loss = F.cross_entropy(logits.flatten(0, 1), want.softmax(-1).flatten(0, 1))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._average([p.grad for p in module.parameters() if p.grad is not None])
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()

    @torch.no_grad()
    def _measure(self, tokens: Tensor, want: Tensor, target: list[Pair]) -> None:
        """Count equal first choices of draft and target, for each offset of the blocks."""
        gamma, length = self._settings.gamma, tokens.shape[1]
        choices = want.argmax(-1)
        for kind, module in self.modules.items():
            for first in range(1, gamma + 1):
                seen = block_mask(length, gamma, first).to(self._device)
                logits, _ = module(tokens, target=_for(module, target), seen=seen)
                equal = logits.argmax(-1) == choices
                self._hits[kind][0] += int(equal[:, first:].sum())
                self._hits[kind][1] += equal[:, first:].numel()


def _for(module: DraftModule, target: list[Pair]) -> list[Pair] | None:
    return target if module.sizes.cross else None
