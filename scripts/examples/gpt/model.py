"""A small GPT: rotary positions, pre-normalization, causal attention, GELU.

The same layers form a plain module or a ``PipelineModule``. Every layer draws its weights from a
separate generator, seeded with the run's seed and the layer's number, so initial weights do not
depend on the form or the layout.

Shapes: B samples, T tokens, C width, H heads, D = C / H, V vocabulary.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpt.parts import column, make_norm, megatron, mesh, row
from gpt.weights import Draw, ModelConfig


@functools.lru_cache(maxsize=8)
def rotary_table(length: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of all positions, fp32, (T, D/2) each (arXiv 2104.09864).

    They are not buffers, which DeepSpeed would cast to bf16, where position 257 equals 256.
    """
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of ``values`` (..., T, D) by the angles of their positions."""
    first, second = values.float().chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(values.dtype)


class Embedding(nn.Module):
    """Map tokens (B, T) to hidden states (B, T, C)."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocabulary, config.width))
        Draw(config, number)(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up."""
        return F.embedding(tokens, self.weight)


class Block(nn.Module):
    """Attention and MLP, each after a norm and with a residual connection."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.heads = config.heads // (config.tp * config.tp2d)  # on this rank
        self.head_width = config.width // config.heads
        width, draw = config.width, Draw(config, number)
        self.norm1 = make_norm(config)
        self.qkv = column(config, width, 3 * width, draw, parts=3)
        self.attention_out = row(config, width, width, draw)
        self.norm2 = make_norm(config)
        self.up = column(config, width, 4 * width, draw)
        self.down = row(config, 4 * width, width, draw)
        self.cp = config.cp
        self.ring = _ring().attention() if config.cp > 1 else None
        self.number = number - 1  # layer 0 is the embedding
        self.segment: list[Block] = []  # recomputed together in backward, led by this block
        self.is_led = False  # recomputed with the first block of its segment

    def forward(self, hidden: Tensor, past: Any = None, leads: bool = True) -> Tensor:
        """Map (B, T, C) to (B, T, C).

        ``past``: preceding tokens, for token slices (``hybridcomp.nn.slices``) and generation.
        ``leads``: False if called by the first block of a segment.
        """
        if past is not None:
            return self._run(hidden, past)
        if not (leads and self.segment):
            return hidden if leads and self.is_led else self._run(hidden)
        if not torch.is_grad_enabled():
            return self._all(hidden)
        out: Tensor = checkpoint(self._all, hidden, use_reentrant=False)
        return out

    def _all(self, hidden: Tensor) -> Tensor:
        for block in self.segment:
            hidden = block(hidden, leads=False)
        return hidden

    def _run(self, hidden: Tensor, past: Any = None) -> Tensor:
        hidden = hidden + self._attend(self.norm1(hidden), past)
        out: Tensor = hidden + self.down(F.gelu(self.up(self.norm2(hidden))))
        return out

    def _attend(self, hidden: Tensor, past: Any) -> Tensor:
        batch, length, _ = hidden.shape
        qkv = self.qkv(hidden).view(batch, length, 3, self.heads, self.head_width)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        cos, sin = self._angles(length, hidden.device, past)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if past is not None:
            mixed = past.attend(self, query, key, value)
        elif self.ring is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = self.ring(query, key, value)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return out

    def _angles(self, length: int, device: torch.device, past: Any) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of this rank's token positions."""
        if past is not None:
            cos, sin = rotary_table(past.room, self.head_width, device)
            places = past.positions(length, device)
            return cos[places], sin[places]
        if self.ring is None:
            return rotary_table(length, self.head_width, device)
        places = _ring().places(length, device)
        cos, sin = rotary_table(length * self.cp, self.head_width, device)
        return cos[places], sin[places]


class FinalNorm(nn.Module):
    """Norm before the output layer."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.norm = make_norm(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        out: Tensor = self.norm(hidden)
        return out


class Output(nn.Module):
    """Map hidden states (B, T, C) to logits (B, T, V)."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocabulary, config.width))
        Draw(config, number)(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Project."""
        return project(self, hidden)


def project(layer: nn.Module, hidden: Tensor) -> Tensor:
    """Return logits (B, T, V) with the weight of ``layer``, which may be the embedding."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return F.linear(hidden, weight)


def lm_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return mean cross-entropy in nats, fp32, of logits (B, T, V) and labels (B, T)."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class GPT(nn.Module):
    """Plain module: tokens (B, T) to logits (B, T, V), of which a tensor rank has its shard."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        every = enumerate(kinds(config))
        self.layers = nn.ModuleList(kind(config, n) for n, kind in every)
        join(self.layers, config)
        if config.tied:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Run all layers."""
        hidden = tokens
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def pipeline(config: ModelConfig, blocks: Sequence[int] = (), **cut: Any) -> Any:
    """Return the layers as a ``PipelineModule``; ``cut`` is its ``num_stages`` or ``topology``.

    ``blocks``: number of blocks per stage; the first stage also has the embedding, the last norm
    and output. By default stages balance parameters.
    """
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    every = kinds(config)
    specs = [LayerSpec(kind, config, n) for n, kind in enumerate(every)]
    if config.tied:
        table = ("embedding", every[0], config, 0)
        specs[0] = TiedLayerSpec(*table, tied_weight_attr="weight")
        specs[-1] = TiedLayerSpec(
            *table, forward_fn=_vocabulary(config).project, tied_weight_attr="weight"
        )
    loss_fn = loss_of(config)
    found = _module(blocks)(specs, loss_fn=loss_fn, partition_method="parameters", **cut)
    join(found.forward_funcs, config)
    return found


def join(layers: Iterable[Any], config: ModelConfig) -> None:
    """Give the first block of each recomputed segment the segment's blocks on this stage."""
    here = {layer.number: layer for layer in layers if isinstance(layer, Block)}
    for start, stop in config.recompute:
        inside = [here[number] for number in range(start, stop) if number in here]
        for index, block in enumerate(inside):
            block.segment, block.is_led = ([] if index else inside), bool(index)


def _module(blocks: Sequence[int]) -> Any:
    """Return PipelineModule; with ``blocks`` a subclass, since PipelineModule lacks such stages."""
    from deepspeed.pipe import PipelineModule

    if not blocks:
        return PipelineModule
    stops = [0, *(1 + stop for stop in accumulate(blocks))]
    stops[-1] += 2

    class Cut(PipelineModule):  # type: ignore[misc]
        def _partition_layers(self, method: str = "uniform") -> None:
            self.parts = stops
            stage = self._topo.get_coord(self.global_rank).pipe
            self._set_bounds(start=stops[stage], stop=stops[stage + 1])

    return Cut


def loss_of(config: ModelConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the ``lm_loss`` that fits this model's sharding of the logits."""
    found: Callable[[Tensor, Tensor], Tensor] = _vocabulary(config).lm_loss
    if config.tp2d > 1:
        found = functools.partial(_vocabulary(config).lm_loss, vocabulary=config.vocabulary)
    return found


def kinds(config: ModelConfig) -> list[type[nn.Module]]:
    """Return the layer classes in order; each takes ``config`` and its number."""
    ends = _vocabulary(config)
    output = ends.TiedOutput if config.tied and config.tp2d > 1 else ends.Output
    return [ends.Embedding, *[Block] * config.layers, FinalNorm, output]


def _vocabulary(config: ModelConfig) -> Any:
    """Return the Python module with this model's Embedding, Output, project and lm_loss."""
    if config.tp2d > 1:
        return mesh()
    return sys.modules[__name__] if config.tp == 1 else megatron()


def _ring() -> Any:
    from gpt import context_parallel  # imports hybridcomp, otherwise not needed

    return context_parallel
