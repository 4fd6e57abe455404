"""A small model that predicts a target's next tokens, with or without reading its keys.

GliDe's block (Du et al., GliDe with a CaPE, ICML 2024): self-attention, then cross-attention to the
keys and values of a top layer of the target (already rotated, not projected again), then the MLP.
Draft layer i of n attends to target layer L - n + i of L. Unlike the published code, the block has
a norm before the cross-attention. A plain draft has no cross-attention but a wider MLP, so that
drafts of both kinds have equally many parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybridcomp.job import saved

#: keys and values (B, H, T, D)
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class DraftSizes:
    """Sizes of a draft.

    Attributes:
        vocabulary: size of the target's logits.
        width, heads, layers: the draft's.
        target_heads, head_width: shape of the target's keys and values.
        cross: whether the draft attends to the target's keys and values.
        rope_base: base of the rotary embedding (rotate-half, as in Llama and GPT-NeoX), in the
            draft's self-attention and in its cross-attention to the target.
    """

    vocabulary: int
    width: int
    heads: int
    layers: int
    target_heads: int
    head_width: int
    cross: bool
    rope_base: float = 10000.0

    @property
    def inner(self) -> int:
        """Return the MLP's width; a plain draft's MLP gets the parameters of cross-attention."""
        inner = 8 * self.width // 3
        return inner if self.cross else inner + 2 * self.target_heads * self.head_width // 3


class DraftLayer(nn.Module):
    """One layer of a draft."""

    def __init__(self, sizes: DraftSizes) -> None:
        super().__init__()
        width, crossing = sizes.width, sizes.target_heads * sizes.head_width
        self.sizes = sizes
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3 if sizes.cross else 2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, width, bias=False)
        if sizes.cross:
            self.cross_q = nn.Linear(width, crossing, bias=False)
            self.cross_out = nn.Linear(crossing, width, bias=False)

    def forward(
        self, hidden: Tensor, positions: Tensor, known: Pair | None, target: Pair | None,
        seen: Tensor | None,
    ) -> tuple[Tensor, Pair]:  # fmt: skip
        """Return hidden states (B, T, C), and the layer's keys and values of all tokens so far.

        Args:
            positions: positions (T,) of the new tokens.
            known: the layer's keys and values of the earlier tokens; None: there are none.
            target: keys and values of the target's layer, (B, H, M, D).
            seen: mask (T, M), true where a new token may attend to a token of ``target``.
        """
        batch, count, _ = hidden.shape
        qkv = self.qkv(self.norms[0](hidden)).view(batch, count, 3, self.sizes.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        query, key = (_rotated(heads, positions, self.sizes.rope_base) for heads in (query, key))
        if known is not None:
            key, value = torch.cat([known[0], key], 2), torch.cat([known[1], value], 2)
        before = key.shape[2] - count
        causal = torch.ones(count, key.shape[2], dtype=torch.bool, device=hidden.device)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=causal.tril(before))
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        if self.sizes.cross:
            assert target is not None
            hidden = hidden + self._looked(hidden, positions, target, seen)
        gate, up = self.gate_up(self.norms[-1](hidden)).chunk(2, -1)
        return hidden + self.down(F.silu(gate) * up), (key, value)

    def _looked(
        self, hidden: Tensor, positions: Tensor, target: Pair, seen: Tensor | None
    ) -> Tensor:
        """Attend to the target's keys and values; return (B, T, C)."""
        shape = (*hidden.shape[:2], self.sizes.target_heads, self.sizes.head_width)
        query = self.cross_q(self.norms[1](hidden)).view(shape).transpose(1, 2)
        query = _rotated(query, positions, self.sizes.rope_base)
        keys, values = (heads.to(query.dtype) for heads in target)
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen)
        out: Tensor = self.cross_out(mixed.transpose(1, 2).flatten(2))
        return out


class DraftModule(nn.Module):
    """Embedding, layers and head of a draft, in fp32."""

    def __init__(self, sizes: DraftSizes, seed: int = 0) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(DraftLayer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02, generator=generator)

    def forward(
        self, tokens: Tensor, first: int = 0, known: Sequence[Pair] | None = None,
        target: Sequence[Pair] | None = None, seen: Tensor | None = None,
    ) -> tuple[Tensor, list[Pair]]:  # fmt: skip
        """Return logits (B, T, V), and each layer's keys and values of all tokens so far.

        Args:
            tokens: ids (B, T), at positions from ``first`` on.
            known: keys and values that the previous call returned.
            target: keys and values of the target's top layers, one pair for each draft layer.
            seen: mask (T, M), true where a new token may attend to a token of ``target``.
        """
        positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        hidden, kept = self.embedding(tokens), []
        for at, layer in enumerate(self.layers):
            looked = None if target is None else target[at]
            hidden, pair = layer(hidden, positions, None if known is None else known[at], looked,
                                 seen)  # fmt: skip
            kept.append(pair)
        return self.head(self.norm(hidden)), kept


@dataclass(frozen=True)
class Draft:
    """Hold the result of ``hybridcomp.train_draft``, for ``hybridcomp.generate(draft=...)``.

    Attributes:
        module: the draft, on the ranks of the last stage (only they draft); None on other ranks.
        agreement: for each kind ("glide", "plain") the fraction of held-out tokens for which draft
            and target had the same first choice; on the last stage.
    """

    module: DraftModule | None
    agreement: dict[str, float]

    def save(self, path: str | Path) -> None:
        """Write the draft to a file; call it on one rank of the last stage per file system."""
        if self.module is not None:
            state = {
                "format": saved.FORMAT, "sizes": asdict(self.module.sizes),
                "agreement": self.agreement, "weights": self.module.state_dict(),
            }  # fmt: skip
            saved.write(Path(path), state)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> Draft:
        """Read a draft from a file. Raises CheckpointError if the file is damaged."""
        stored: dict[str, Any] = saved.read(Path(path))
        for key in ("sizes", "agreement", "weights"):
            saved.expect(Path(path), stored, key, lambda value: isinstance(value, dict))
        module = DraftModule(DraftSizes(**stored["sizes"]))
        module.load_state_dict(stored["weights"])
        return cls(module.to(device).eval(), stored["agreement"])


def block_mask(length: int, gamma: int, first: int) -> Tensor:
    """Return the training mask of cross-attention to the target's tokens, (length, length) bool.

    As in drafting, a token sees the target's tokens up to the end of the previous block. Blocks
    have ``gamma`` tokens; the first block has ``first`` tokens and a causal mask inside.
    """
    at = torch.arange(length, device="cpu")
    block = (at - first).div(gamma, rounding_mode="floor") + 1
    seen = block[:, None] > block[None, :]
    seen[:first] = at[:first, None] >= at[None, :]
    return seen


def _rotated(values: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotate the pairs (i, i + D/2) of ``values`` (B, H, T, D) by their positions' angles."""
    size = values.shape[-1]
    steps = torch.arange(0, size, 2, dtype=torch.float64, device=values.device) / size
    angles = (positions[:, None].double() * base**-steps).float()
    cos, sin = angles.cos().to(values.dtype), angles.sin().to(values.dtype)
    first, second = values.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
