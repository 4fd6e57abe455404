"""Decoders as chains of layers, with the cuts that their sizes allow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hybridcomp.tools.plan.models import decoder_layers
from hybridcomp.tools.plan.models.model import BatchShape, ModelLayer
from hybridcomp.tools.plan.models.sizes import DecoderSizes


@dataclass(frozen=True)
class Decoder(DecoderSizes):
    """A decoder of these sizes, as the planner cuts it."""

    @property
    def depth(self) -> int:
        return self.blocks + 2

    @property
    def repeated(self) -> range:
        return range(1, self.blocks + 1)

    @property
    def is_chain(self) -> bool:
        return True

    @cached_property
    def parameters(self) -> float:
        """Parameters of the whole model; a tied weight counts once."""
        whole = self.layers(BatchShape(1, 1))
        total = sum(layer.parameters + layer.expert_parameters for layer in whole)
        return total - self.shared(BatchShape(1, 1))

    def refuses(self, shape: BatchShape) -> str | None:
        if self.heads % shape.tensor or (self.kv_heads % shape.tensor and
                                         shape.tensor % self.kv_heads):  # fmt: skip
            return (
                f"tensor {shape.tensor} does not divide {self.heads} heads "
                f"({self.kv_heads} of keys)"
            )
        for name, size in (("intermediate", self.intermediate), ("hidden", self.hidden)):
            if size % shape.tensor:
                return f"tensor {shape.tensor} does not divide {name} {size}"
        if shape.ring:
            if shape.length % (2 * shape.context):
                return f"a ring of {shape.context} ranks cuts the length into pairs of chunks"
        elif self.heads % (shape.tensor * shape.context) or shape.length % shape.context:
            return f"context {shape.context} divides neither heads {self.heads} nor the length"
        if shape.expert > 1 and (not self.experts or self.experts % shape.expert):
            return f"expert {shape.expert} does not divide {self.experts} experts"
        if shape.mesh > 1 and (reason := self._refuses_mesh(shape)):
            return reason
        if shape.slices > shape.length or (shape.slices > 1 and self.experts):
            return f"{shape.slices} slices: more than tokens, or of a mixture of experts"
        if shape.sequence and (shape.tensor == 1 or shape.length % shape.tensor):
            return "sequence parallelism needs tensor ranks that divide the length"
        return None

    def _refuses_mesh(self, shape: BatchShape) -> str | None:
        """Say why a mesh of this side cannot cut the layers; None where it can."""
        q = shape.mesh
        if self.experts or self.parallel:
            return "a mesh cuts neither experts nor parallel attention"
        sizes = {"heads": self.heads, "heads of keys": self.kv_heads, "hidden": self.hidden / q,
                 "intermediate": self.intermediate, "samples": shape.micro_batch}  # fmt: skip
        wrong = [name for name, size in sizes.items() if size % q]
        return f"mesh {q} does not divide {wrong[0]}" if wrong else None

    def layers(self, shape: BatchShape) -> tuple[ModelLayer, ...]:
        return decoder_layers.layers(self, shape)
