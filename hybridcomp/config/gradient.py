"""``dp``: the reduction of gradients between data-parallel ranks, with error feedback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.quantized_residual import BITS
from hybridcomp.codecs.registry import CODECS
from hybridcomp.config.codec_settings import Strict, Under, codec_field, settings_of, with_settings
from hybridcomp.config.dimension import MeasuredConfig
from hybridcomp.config.error_messages import problem
from hybridcomp.config.policy import Limits

#: settings of codecs that reduce gradients themselves instead of encoding messages
_REDUCTIONS = settings_of(gradients_only=True)
_ALWAYS = " ".join(
    f"{name} always does so." for name, codec in CODECS.items() if codec.gradients_only
)
if TYPE_CHECKING:
    _Declared = MeasuredConfig
else:
    _Declared = with_settings(MeasuredConfig, _REDUCTIONS)


class FeedbackConfig(Strict):
    """Add the error of one reduction to the next, stored in few bits."""

    bits: Literal[4, 8, 16, 32] = Field(
        32,
        description="Bits of a residual's value. 32 (default): fp32. 16: bf16. 8 and 4: "
        "integers with a step for every 32 values, 1.06 and 0.56 bytes a value, off by at most "
        "half a step. Fewer: less memory, smaller checkpoints.",
    )


class GradientConfig(_Declared):
    """Gradient reduction over the data-parallel group."""

    under: ClassVar[Under] = "dp"
    more: ClassVar[tuple[str, ...]] = tuple(_REDUCTIONS)

    codec: str | None = codec_field("dp")
    error_feedback: bool | FeedbackConfig = Field(
        False,
        description="Add what one reduction left out to the next. true: 4 bytes of memory a "
        f'gradient element; {{"bits": 8}}: one. Makes 4 bits and fewer usable. {_ALWAYS}',
    )

    accumulate: Literal["native", "node"] = Field(
        "native",
        description="Where micro-batches are summed that upstream reduces one by one (DeepSpeed"
        " at ZeRO 2 and 3, fully_shard). native (default): over all ranks. node: in"
        " fp32 inside the node, and once between nodes, for 4 bytes a trained "
        "parameter divided by a node's ranks. Native messages then cross once, too.",
    )

    @field_validator("error_feedback", mode="before")
    @classmethod
    def _one_of_its_forms(cls, data: Any) -> Any:
        """Parse an object; refuse wrong types, for which pydantic would describe both forms."""
        if isinstance(data, (bool, FeedbackConfig)):
            return data
        if isinstance(data, Mapping) and set(data) <= {"bits"}:
            bits = data.get("bits", 32)
            if bits in BITS and not isinstance(bits, bool):
                return FeedbackConfig(bits=bits)
            raise problem("bits", bits, f"expected one of {', '.join(map(str, BITS))}")
        raise problem("", data, 'expected true or false, or {"bits": 8}')

    @property
    def feeds_back(self) -> bool:
        return bool(self.error_feedback) or self._reduces

    @property
    def residual_bits(self) -> int:
        """Return the bits per value of a residual; 32 (fp32) also if there are none."""
        feedback = self.error_feedback
        return feedback.bits if isinstance(feedback, FeedbackConfig) else 32

    @property
    def remark(self) -> str:
        few = f" in {self.residual_bits} bits" if self.residual_bits != 32 else ""
        once = ", micro-batches summed in the node" if self.accumulate == "node" else ""
        return (f", error feedback{few}" if self.feeds_back else "") + once

    def agreed(self) -> dict[str, Any]:
        few = {"residual_bits": self.residual_bits} if self.residual_bits != 32 else {}
        once = {"accumulate": "node"} if self.accumulate == "node" else {}
        return {"error_feedback": self.feeds_back, **few, **once}

    @property
    def _reduces(self) -> bool:
        """Return whether the codec reduces gradients itself instead of encoding messages."""
        codec = CODECS.get(self.codec or "")
        return codec is not None and codec.gradients_only

    def limits(self) -> Limits:
        """Return the guard's limits; low rank has no residual limit unless the user sets one."""
        usual = super().limits()
        if self._reduces and "residual" not in self.guard.model_fields_set:
            return Limits(usual.error, None)
        return usual

    def _check_codecs(self) -> None:
        codec = self.built()
        self._check_measured(codec)
        refused = "error_feedback" in self.model_fields_set and not self.error_feedback
        if refused and codec is not None and codec.gradients_only:
            todo = f"{codec.name} does not converge without; remove it, or name another codec"
            raise problem("error_feedback", False, todo)
        if self.accumulate == "node":
            self._check_accumulates(codec)
        if self.error_feedback:
            self._check_feedback(codec)

    def _check_accumulates(self, codec: Codec | None) -> None:
        """Refuse ``accumulate`` without a codec between nodes, or with a one-level codec."""
        if codec is None:
            todo = 'name the codec of what crosses, such as "expcode", which is exact; or remove it'
            raise problem("accumulate", "node", todo)
        if codec.gradients_only:
            todo = f"{codec.name} sums its factors over all ranks, in one level; remove it"
            raise problem("accumulate", "node", todo)
