"""The transformer block that is timed, with its FLOP and its bytes kept for backward.

Attention with causal mask and rotary positions, then a feed-forward layer of four times the width,
each with a norm before it and a residual connection around it. Shapes: B samples, T tokens, C
width, H heads, D = C / H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybridcomp.errors import ConfigError


@dataclass(frozen=True)
class BlockSize:
    """Sizes of a block and of its input."""

    batch: int
    length: int
    width: int
    head_width: int = 32

    @classmethod
    def parse(cls, text: str) -> BlockSize:
        """Parse ``8x128x256`` or, with heads, ``8x128x256x4``. Raises ConfigError."""
        try:
            batch, length, width, *heads = map(int, text.split("x"))
            (count,) = heads or [max(1, width // 32)]
        except ValueError:
            batch = length = width = count = 0
        if min(batch, length, width, count) < 1 or width % count or width // count % 2:
            todo = "expected BATCHxLENGTHxWIDTH or BATCHxLENGTHxWIDTHxHEADS, such as 8x128x256x4"
            raise ConfigError("--block", text, f"{todo}; heads have an even width")
        return cls(batch, length, width, width // count)

    @property
    def parameters(self) -> int:
        """Return the number of parameters in the block's matrices."""
        return 12 * self.width**2

    @property
    def flops(self) -> float:
        """Return the FLOP of a forward pass as FlopCounter counts: masked products in full."""
        tokens = self.batch * self.length
        return 24.0 * tokens * self.width**2 + 4.0 * tokens * self.length * self.width

    def describe(self) -> str:
        """Format the sizes for the note of a row."""
        return f"batch {self.batch}, length {self.length}, width {self.width}"


class TransformerBlock(nn.Module):
    """A transformer block: maps (B, T, C) to (B, T, C)."""

    cos: Tensor  # (T, D / 2), for every position and frequency, in the weights' dtype
    sin: Tensor

    def __init__(self, size: BlockSize) -> None:
        super().__init__()
        width = size.width
        self.heads = width // size.head_width
        angles = torch.outer(torch.arange(size.length), torch.rand(size.head_width // 2))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply attention, then the feed-forward layer."""
        batch, length, width = hidden.shape
        qkv = self.qkv(self.norm1(hidden)).view(batch, length, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        query, key = self._rotated(query), self._rotated(key)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = hidden + self.down(F.gelu(self.up(self.norm2(hidden))))
        return out

    def _rotated(self, values: Tensor) -> Tensor:
        """Rotate pairs of ``values`` (B, H, T, D) in fp32, as models do."""
        one, two = values.float().chunk(2, dim=-1)
        cos, sin = self.cos, self.sin
        return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1).to(values.dtype)


def kept_nbytes(block: nn.Module, hidden: Tensor) -> int:
    """Return the bytes of storages saved for backward of ``block(hidden)``, without parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    kept: dict[int, Tensor] = {}  # keeps the tensors alive, so that no address is reused

    def note(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = block(hidden)
    del out
    return sum(
        tensor.untyped_storage().nbytes() for where, tensor in kept.items() if where not in own
    )
