"""A small language model, its greedy tokens, and batches of text."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH = 61, 96, 12


class Block(nn.Module):
    """Causal means of the tokens so far, and a layer whose rows the ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(2 * WIDTH, 131)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(131, WIDTH, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        normed = self.norm(values)
        counts = torch.arange(1, normed.shape[1] + 1, device=normed.device)
        seen = (normed.float().cumsum(1) / counts[:, None]).to(normed.dtype)
        mixed = torch.tanh(self.up(torch.cat([normed, seen], -1)))
        out: Tensor = values + self.down(self.drop(mixed))
        return out


class TinyText(nn.Module):
    """Embedding, blocks with dropout, and a tied head."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.embedding(tokens)
        for block in self.blocks:
            values = block(values)
        logits: Tensor = self.head(self.norm(values))
        return logits


def text(rank: int, step: int) -> Tensor:
    """Return the tokens of a batch, (8, LENGTH)."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    first = torch.randint(VOCABULARY, (8, 1), generator=generator)
    return (first + 7 * torch.arange(LENGTH)) % VOCABULARY


def greedy(model: nn.Module, rank: int, count: int = 8) -> list[list[int]]:
    """Return the most likely tokens after this rank's prompts."""
    tokens = text(rank, 12345)[:4, :3].to(next(model.parameters()).device)
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    answers: list[list[int]] = tokens.tolist()
    return answers
