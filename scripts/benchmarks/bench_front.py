#!/usr/bin/env python3
"""Time steps of a model whose front half is frozen: computed each time, and kept on the host.

bench_front.py [--width 128] [--tokens 64] [--epochs 10] [--codec expcode]

An embedding and six transformer blocks, of which three and the embedding are frozen, on one core.
Each batch is trained on both ways in turn, so that whatever else the machine does falls on both.
Prints the medians of CPU time and of wall-clock time, and what the front itself took.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import hybridcomp

BLOCKS, FROZEN, HEADS, VOCABULARY, SAMPLES, BATCH = 6, 3, 4, 64, 96, 16


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        shape = (*values.shape[:2], 3, HEADS, -1)
        query, key, value = self.qkv(self.norms[0](values)).view(shape).permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.out(found.transpose(1, 2).flatten(2))
        changed: Tensor = self.down(gelu(self.up(self.norms[1](values))))
        return values + changed


def times(options: argparse.Namespace, dtype: torch.dtype) -> list[tuple[float, float, float]]:
    """Return per step: CPU and wall-clock seconds computed over those kept; the front's share."""
    torch.manual_seed(0)
    width = options.width
    blocks = nn.ModuleList([nn.Embedding(VOCABULARY, width), *map(Block, [width] * BLOCKS)])
    head = nn.Linear(width, VOCABULARY).to(dtype)
    blocks.to(dtype)[: FROZEN + 1].requires_grad_(False)
    trained = [one for one in (*blocks.parameters(), *head.parameters()) if one.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    tokens = torch.randint(VOCABULARY, (SAMPLES, options.tokens))
    front = hybridcomp.FrozenFront(list(blocks), options.codec)

    @torch.no_grad()
    def computed(at: Tensor) -> Tensor:
        values = tokens[at]
        for block in blocks[: FROZEN + 1]:
            values = block(values)
        return values

    def step(at: Tensor, hidden_of: Callable[[Tensor], Tensor]) -> tuple[float, float, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        values = hidden_of(at)
        within = time.process_time() - cpu
        for block in blocks[FROZEN + 1 :]:
            values = block(values)
        loss = cross_entropy(head(values).flatten(0, 1).float(), tokens[at].roll(1, 1).flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        return time.process_time() - cpu, time.perf_counter() - wall, within

    found = []
    for epoch in range(options.epochs + 1):  # the first fills the front
        for at in torch.split(torch.randperm(SAMPLES), BATCH):
            one, other = step(at, computed), step(at, lambda at: front(at, tokens[at])[0])
            if epoch:
                found.append((one[0] / other[0], one[1] / other[1], other[2] / other[0]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--codec", default="expcode")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        cpu, wall, share = zip(*times(options, dtype), strict=True)
        print(
            f"{dtype}: CPU {median(cpu):.2f}, wall {median(wall):.2f} times as fast as computed; "
            f"the front takes {median(share):.3f} of a step's CPU time", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
