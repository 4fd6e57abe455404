"""Modules on a mesh that replace those of ``torch.nn`` and are made from the whole layers.

Every rank builds the whole layer with the same weights and keeps its part. Parameters keep the
whole layer's names and are marked as sharded (``tensor_model_parallel``), which DeepSpeed's and
megatron-core's gradient norms need.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.nn.tp2d.layouts import MatrixCut, Output, Table, Vector, WeightCut
from hybridcomp.nn.tp2d.mesh import Mesh, fail_unless
from hybridcomp.nn.tp2d.norms import normed
from hybridcomp.nn.tp2d.products import linear, looked_up, projected, spread


class Cut(nn.Module):
    """A module whose parameters are sharded over a mesh.

    Attributes:
        mesh: the ranks.
        layouts: the cut of each parameter, by name.
    """

    centred: ClassVar[bool] = True

    def __init__(self, mesh: Mesh, layouts: Mapping[str, WeightCut]) -> None:
        super().__init__()
        self.mesh, self.layouts = mesh, dict(layouts)

    def _keep(self, name: str, whole: Tensor | None) -> None:
        """Register this rank's part of ``whole`` as the parameter ``name``."""
        if whole is None:
            self.register_parameter(name, None)
            return
        mesh = self.mesh
        part = self.layouts[name].cut(whole.detach(), mesh.q, mesh.row, mesh.column)
        parameter = nn.Parameter(part, requires_grad=whole.requires_grad)
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.register_parameter(name, parameter)

    def _spread(self, part: Tensor | None) -> Tensor | None:
        return None if part is None else spread(part, self.mesh)


class Linear(Cut):
    """``nn.Linear`` on a mesh: (..., inputs / q) to (..., outputs / q)."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, mesh: Mesh, whole: nn.Linear, parts: int = 1, vocabulary: int | None = None
    ) -> None:
        """Keep this rank's part of ``whole``.

        Args:
            mesh: the ranks.
            whole: the whole layer, equal on all ranks.
            parts: number of stacked matrices that are cut separately, such as 3 for query, key and
                value.
            vocabulary: vocabulary size if the outputs are logits of words; it is padded to a
                multiple of q, and allows no parts. None: the outputs are not logits.

        Raises ConfigError if the sizes cannot be cut, and on ``parts`` of logits.
        """
        if parts < 1 or (vocabulary is not None and parts > 1):
            given = Shown(f"Linear(parts={parts}, vocabulary={vocabulary})")
            raise ConfigError("tp2d", given, "expected one part or more, and one of logits")
        matrix: WeightCut = MatrixCut(parts) if vocabulary is None else Output(vocabulary)
        super().__init__(mesh, {"weight": matrix, "bias": Vector(parts)})
        self._keep("weight", whole.weight)
        self._keep("bias", whole.bias)

    def forward(self, values: Tensor) -> Tensor:
        """Multiply by SUMMA; see ``products.LinearFunction``."""
        out = linear(values, self.weight, self.mesh)
        bias = self._spread(self.bias)
        return out if bias is None else out + bias.to(out.dtype)


class Embedding(Cut):
    """``nn.Embedding`` on a mesh: tokens of the batch (B, ...) to (B / q, ..., features / q)."""

    weight: Tensor

    def __init__(self, mesh: Mesh, whole: nn.Embedding) -> None:
        """Keep this rank's part of ``whole``, its ``padding_idx`` and ``scale_grad_by_freq``.

        Raises ConfigError if q does not divide the sizes, and on ``max_norm`` and ``sparse``.
        """
        _refuse(whole)
        super().__init__(mesh, {"weight": Table(whole.num_embeddings)})
        self.num_embeddings, self.padding_idx = whole.num_embeddings, whole.padding_idx
        self.scale_grad_by_freq = whole.scale_grad_by_freq
        self._keep("weight", whole.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up the tokens of this mesh row's samples.

        Raises ConfigError if q does not divide the batch, and fails like ``nn.Embedding`` on tokens
        beyond the table: with an IndexError on a CPU, a device-side assertion on a GPU. All ranks
        fail, since every rank has the whole batch.
        """
        _check_tokens(tokens, self.num_embeddings)
        own = self.mesh.part(tokens)
        scales = None
        if self.padding_idx is not None or self.scale_grad_by_freq:
            scales = self.mesh.part(self._scales(tokens))
        return looked_up(own, self.weight, self.mesh, scales)

    def _scales(self, tokens: Tensor) -> Tensor:
        """Return each token's gradient factor, from counts of tokens in the whole batch."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        scales = torch.ones(tokens.shape, dtype=wide, device=tokens.device)
        if self.scale_grad_by_freq:
            often = scales.new_zeros(self.num_embeddings)
            often.index_add_(0, tokens.reshape(-1), scales.view(-1))
            scales = 1 / often[tokens]
        if self.padding_idx is not None:
            scales = scales.masked_fill(tokens == self.padding_idx, 0.0)
        return scales


def _refuse(whole: nn.Embedding) -> None:
    """Raise ConfigError on options of an embedding that its parts cannot support."""
    for name, value in (("max_norm", whole.max_norm), ("sparse", whole.sparse)):
        if value:
            given = Shown(f"nn.Embedding({name}={value})")
            raise ConfigError("tp2d", given, f"a table on a mesh has no {name}; leave it out")


def _check_tokens(tokens: Tensor, count: int) -> None:
    """Fail as torch does if a token is not in a table of ``count`` rows."""
    inside = (tokens >= 0) & (tokens < count)
    fail_unless(inside.all(), f"tokens of a vocabulary of {count} words")


class LayerNorm(Cut):
    """``nn.LayerNorm`` on a mesh, over the last dimension: (..., features / q) to the same."""

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, mesh: Mesh, whole: nn.LayerNorm | nn.RMSNorm) -> None:
        """Keep this rank's part of ``whole``.

        Raises ConfigError if q^2 does not divide the features, or if it normalizes more than the
        last dimension.
        """
        if len(whole.normalized_shape) != 1:
            given = Shown(f"{type(whole).__name__}({list(whole.normalized_shape)})")
            raise ConfigError("tp2d", given, "only the last dimension is cut; normalize over that")
        super().__init__(mesh, {"weight": Vector(), "bias": Vector()})
        self.eps = whole.eps
        self._keep("weight", whole.weight)
        self._keep("bias", getattr(whole, "bias", None))

    def forward(self, values: Tensor) -> Tensor:
        """Normalize, exchanging a few numbers per token; see ``norms.NormFunction``."""
        weight, bias = self._spread(self.weight), self._spread(self.bias)
        eps = torch.finfo(values.dtype).eps if self.eps is None else self.eps
        return normed(values, weight, bias, self.mesh, eps, self.centred)


class RMSNorm(LayerNorm):
    """``nn.RMSNorm`` on a mesh, over the last dimension."""

    centred = False


def project(table: Embedding, hidden: Tensor) -> Tensor:
    """Return logits (..., V / q) from an embedding's weights, for models that tie the two."""
    return projected(hidden, table.weight, table.mesh)
