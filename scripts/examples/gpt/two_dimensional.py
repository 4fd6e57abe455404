"""Layers of the example on a mesh of q x q ranks (hybridcomp.nn.tp2d). Used from --tp2d 2 on.

Every weight is drawn whole and then sharded, so initial weights do not depend on the mesh. A mesh
is one replica: its rows shard the samples, its columns the features, heads and vocabulary (Optimus,
arXiv 2104.05343).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpt.weights import Draw, ModelConfig
from hybridcomp.nn import tp2d

#: this process's mesh, set by ``start``
_meshes: list[tp2d.Mesh] = []


def start(q: int) -> Any:
    """Create this rank's mesh, and DeepSpeed's topology over the same ranks.

    In the mesh and the topology, ranks of a mesh vary fastest, then replicas.
    """
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    _meshes[:] = [tp2d.Mesh(q)]
    replicas = dist.get_world_size() // (q * q)
    return PipeModelDataParallelTopology(num_pp=1, num_mp=q * q, num_dp=replicas)


def mesh() -> tp2d.Mesh:
    """Return the mesh of this rank."""
    return _meshes[0]


def linear(inputs: int, outputs: int, draw: Callable[[Tensor], None], parts: int = 1) -> nn.Module:
    """Return a linear layer without a bias; ``parts`` stacked matrices are sharded separately."""
    whole = nn.Linear(inputs, outputs, bias=False)
    draw(whole.weight)
    return tp2d.Linear(mesh(), whole, parts)


def norm(config: ModelConfig) -> nn.Module:
    """Return the norm of ``config``."""
    if config.norm == "rmsnorm":
        return tp2d.RMSNorm(mesh(), nn.RMSNorm(config.width, eps=1e-5))
    return tp2d.LayerNorm(mesh(), nn.LayerNorm(config.width))


class Embedding(tp2d.Embedding):
    """Map tokens (B, T) of the whole micro-batch to hidden states (B / q, T, C / q)."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        whole = nn.Embedding(config.vocabulary, config.width)
        Draw(config, number)(whole.weight)
        super().__init__(mesh(), whole)


class Output(tp2d.Linear):
    """Map hidden states (B / q, T, C / q) to logits (B / q, T, V / q)."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        whole = nn.Linear(config.width, config.vocabulary, bias=False)
        Draw(config, number)(whole.weight)
        super().__init__(mesh(), whole, vocabulary=config.vocabulary)


class TiedOutput(Embedding):
    """Return logits (B / q, T, V / q) with the weight that output and embedding share."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Project."""
        return tp2d.project(self, hidden)


def lm_loss(logits: Tensor, labels: Tensor, vocabulary: int) -> Tensor:
    """Return mean cross-entropy in nats, fp32, of this rank's logits and all labels (B, T)."""
    return tp2d.cross_entropy(logits, mesh().part(labels), mesh(), vocabulary)


def save_plain(model: nn.Module, path: Path) -> None:
    """Write the weights of the plain model; called by every rank of the job."""
    plain = tp2d.gather_state(model, mesh())
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(plain, path)
    dist.barrier()


def load_plain(model: nn.Module, path: Path) -> None:
    """Load weights of the plain model. Raises hybridcomp's ConfigError if they do not match."""
    tp2d.load_state(model, mesh(), torch.load(path, map_location="cpu", weights_only=True))
