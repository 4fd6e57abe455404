"""One dimension of the block: its codec, settings and directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.quantized_residual import BITS
from hybridcomp.codecs.registry import CODECS
from hybridcomp.config.codec_settings import (
    GRADIENT_CODEC,
    NONE,
    PARAMETER_CODEC,
    CodecSettings,
    Strict,
    build_codec,
    codec_schema,
    settings_of,
    with_settings,
)
from hybridcomp.config.error_messages import problem
from hybridcomp.config.ramp import RampConfig, movable, moving, rungs
from hybridcomp.dimensions import DIRECTIONS, MEASURED, MEASURED_EARLY, ROWS, Direction, listed
from hybridcomp.policy import Limits, Rung

#: dimensions that may keep residuals
FED_BACK = tuple(name for name, row in ROWS.items() if row.keeps_residuals)
#: dimensions that are timed during the run
_LATE = tuple(name for name in MEASURED if name not in MEASURED_EARLY)


class FeedbackConfig(Strict):
    """Add what one reduction left out to the next one, and keep it in few bits."""

    bits: Literal[4, 8, 16, 32] = Field(
        32,
        description="Bits of a value that was left out. 32 (default): fp32. 8 and 4: integers with "
        "a step for every 32 values, 1.06 and 0.56 bytes a value; what they leave out themselves "
        "is at most half a step. 16: bf16. Fewer: less memory, smaller checkpoints.",
    )


class GuardConfig(Strict):
    """Samples tell when a dimension falls back to native for the rest of the run."""

    error: float | None = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="Largest relative L2 error of one encoding, over the job. At 1 a message "
        "arrives as wrong as if zeros had been sent. null: not looked at.",
    )
    residual: float | None = Field(
        20.0,
        gt=0,
        allow_inf_nan=False,
        description=f"{listed(FED_BACK)} with error feedback: largest norm of what is left out, "
        "over the norm of the gradients. Residuals that grow without end pass it. null: not looked "
        "at.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, data: Any) -> Any:
        if data == NONE:
            return {"error": None, "residual": None}
        if not isinstance(data, (Mapping, GuardConfig)):
            raise problem("", data, 'expected limits, such as {"error": 0.5}, or "none"')
        return data


class DimensionConfig(CodecSettings):
    """A dimension with one direction."""

    #: directions that may have their own codecs
    ways: ClassVar[tuple[Direction, ...]] = DIRECTIONS[:1]

    guard: GuardConfig = Field(
        GuardConfig(),
        description="Limits of the sampled error and of the residuals; beyond one of them the "
        'dimension is native for the rest of the run, on all ranks. "none": no limits.',
    )

    ramp: RampConfig | None = Field(
        None,
        description="Start with a milder setting than the one written, which holds from step "
        "`steps` on: early gradients are the most sensitive.",
    )

    def settings(self, direction: Direction) -> dict[str, Any]:
        """Return codec and codec settings of ``direction``."""
        return self.given()

    def rungs_of(self, direction: Direction) -> tuple[Rung, ...]:
        """Return the codecs of the ramp in ``direction``; none where no setting moves there."""
        settings = self.settings(direction)
        if self.ramp is None or moving(settings) is None:
            return ()
        return rungs(settings, self.ramp.start, self.ramp.steps, lambda s: build_codec(s, ""))

    def codec_of(self, direction: Direction) -> Codec | None:
        """Build the codec of ``direction``; None for native."""
        return build_codec(self.settings(direction), "")

    @model_validator(mode="after")
    def _can_act(self) -> DimensionConfig:
        self._check_codecs()
        ramps = [self.rungs_of(way) for way in self.ways]  # either may be wrong
        if self.ramp is not None and not any(ramps):
            *first, last = movable()
            listed = f"{', '.join(first)} or {last}"
            todo = f"moves {listed}, and none of them is written; write one"
            raise problem("ramp", self.ramp.model_dump(by_alias=True), todo)
        if "guard" in self.model_fields_set:
            self._check_guard()
        return self

    def limits(self) -> Limits:
        """Return the limits that the guard checks here: none for lossless codecs."""
        if not self._lossy():
            return Limits(None, None)
        return Limits(self.guard.error, self.guard.residual if self.feeds_back else None)

    def _lossy(self) -> bool:
        codecs = [self.codec_of(direction) for direction in self.ways]
        return any(codec is not None and not codec.lossless for codec in codecs)

    @property
    def feeds_back(self) -> bool:
        """Return whether residuals are kept."""
        return False

    @property
    def acts(self) -> bool:
        """Return whether the dimension changes a job although no message has a codec."""
        return False

    @property
    def remark(self) -> str:
        """Return what a line about the dimension says behind its codec; "" for nothing."""
        return ""

    def agreed(self) -> dict[str, Any]:
        """Return the settings beside codecs, ramp and guard on which the ranks have to agree."""
        return {}

    def _check_guard(self) -> None:
        written = self.guard.model_fields_set
        if not self._lossy() and (self.guard.error or self.guard.residual):
            todo = f"{self.codec or NONE} loses nothing, there is nothing to guard; remove it"
            raise problem("guard", self.guard.model_dump(exclude_unset=True), todo)
        if "residual" in written and self.guard.residual and not self.feeds_back:
            todo = f"only {listed(FED_BACK)} with error_feedback keeps residuals; remove it"
            raise problem("guard.residual", self.guard.residual, todo)

    def _check_codecs(self) -> None:
        build_codec(self.given(), "")

    def _check_converges(self, codec: Codec, key: str) -> None:
        """Refuse a codec whose error grows when its residual is fed back into the next message."""
        why = codec.diverges()
        if why is not None:
            raise problem(key, True, f"diverges {why}")


class MeasuredConfig(DimensionConfig):
    """A dimension that can turn itself off where the link is faster than its codec."""

    when: Literal["always", "auto"] | None = Field(
        None,
        description="always, or auto (default: the block's `when`): messages are timed natively "
        "and encoded, on all ranks, and where encoding is not faster (one machine, a fast network) "
        "the dimension stays native for the run. "
        f"{listed(MEASURED_EARLY)}: at start-up. {listed(_LATE)}: after the first step, which is "
        "native, with messages as large as those that it sent. Takes a second "
        "or two a dimension. Where it was close, ten or eighteen steps of the run are then "
        "compared in both ways, and may change it once.",
    )

    def _check_measured(self, codec: Codec | None) -> None:
        if self.when in (None, "always"):
            return
        if codec is None:
            raise problem("when", self.when, "none is native anyway; remove it, or name a codec")
        if codec.gradients_only:
            why = f"what {codec.name} takes depends on the matrices and is not measured"
            todo = f"{why}; remove it"
            raise problem("when", self.when, todo)


#: settings of codecs that reduce gradients themselves instead of encoding messages
_REDUCTIONS = settings_of(gradients_only=True)
_ALWAYS = " ".join(
    f"{name} always does so." for name, codec in CODECS.items() if codec.gradients_only
)
if TYPE_CHECKING:
    _Declared = MeasuredConfig
else:
    _Declared = with_settings(MeasuredConfig, _REDUCTIONS)


class GradientConfig(_Declared):
    """Gradient reduction over the data-parallel group."""

    more: ClassVar[tuple[str, ...]] = tuple(_REDUCTIONS)

    codec: str | None = Field(
        None,
        description=GRADIENT_CODEC,
        json_schema_extra=codec_schema(GRADIENT_CODEC, "dp"),
    )
    error_feedback: bool | FeedbackConfig = Field(
        False,
        description="Add what one reduction left out to the next one. true: costs one fp32 value a "
        'gradient element of memory; {"bits": 8} a byte. Makes 4 bits and fewer usable. '
        f"{_ALWAYS}",
    )

    @field_validator("error_feedback", mode="before")
    @classmethod
    def _one_of_its_forms(cls, data: Any) -> Any:
        """Refuse other forms here: pydantic would say what is wrong with each of the two."""
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
        """Return whether residuals are kept."""
        return bool(self.error_feedback) or self._reduces

    @property
    def residual_bits(self) -> int:
        """Return the bits of a residual's value; 32: fp32, which is also the answer without any."""
        found = self.error_feedback
        return found.bits if isinstance(found, FeedbackConfig) else 32

    @property
    def remark(self) -> str:
        """Say that residuals are kept, and in how many bits where these are fewer than 32."""
        few = f" in {self.residual_bits} bits" if self.residual_bits != 32 else ""
        return f", error feedback{few}" if self.feeds_back else ""

    def agreed(self) -> dict[str, Any]:
        """Return whether residuals are kept, as each message carries them, and in how many bits."""
        few = {"residual_bits": self.residual_bits} if self.residual_bits != 32 else {}
        return {"error_feedback": self.feeds_back, **few}

    @property
    def _reduces(self) -> bool:
        """Return whether the codec reduces gradients itself instead of encoding messages."""
        codec = CODECS.get(self.codec) if self.codec is not None else None
        return codec is not None and codec.gradients_only

    def limits(self) -> Limits:
        """Return the guard's limits; a low rank's large residuals only if the user limits them."""
        found = super().limits()
        if self._reduces and "residual" not in self.guard.model_fields_set:
            return Limits(found.error, None)
        return found

    def codec_of(self, direction: Direction) -> Codec | None:
        """Build the codec; None for native."""
        return build_codec(self.settings(direction), "", under="dp")

    def _check_codecs(self) -> None:
        codec = build_codec(self.given(), "", under="dp")
        self._check_measured(codec)
        refused = "error_feedback" in self.model_fields_set and not self.error_feedback
        if refused and codec is not None and codec.gradients_only:
            todo = f"{codec.name} does not converge without; remove it, or name another codec"
            raise problem("error_feedback", False, todo)
        if not self.error_feedback:
            return
        if codec is None or codec.lossless:
            raise problem(
                "error_feedback",
                True,
                f"{codec or NONE} leaves nothing out to feed back; remove it",
            )
        self._check_converges(codec, "error_feedback")


_REFERRING = " ".join(
    f"{name} always does so." for name, codec in CODECS.items() if codec.references
)


class ParameterConfig(MeasuredConfig):
    """Gather of updated parameters (ZeRO 1 and 2) or of parameters before their use (ZeRO 3)."""

    codec: str | None = Field(
        None,
        description=PARAMETER_CODEC,
        json_schema_extra=codec_schema(PARAMETER_CODEC, "zero"),
    )
    delta: bool = Field(
        False,
        description="Send what changed since the last gather: 4 bits then cost about 1e-3 of a "
        "weight instead of 8e-2, and a lossless codec (mpc) saves twice as much. Takes memory for "
        "a copy of each rank's own share of the parameters. Not at ZeRO 3, which keeps none. "
        f"{_REFERRING}",
    )
    resync_every: int = Field(
        0,
        ge=0,
        description="With delta: optimizer steps between gathers of exact parameters. 0 (default): "
        "only the first, after loading, on request, and where ranks differ.",
    )

    @property
    def remark(self) -> str:
        """Say that deltas are sent, and how often exact parameters."""
        if not self.delta:
            return ""
        every = self.resync_every
        return ", of what changed" + (f", exact every {every} steps" if every else "")

    def agreed(self) -> dict[str, Any]:
        """Return what gathers send, and in which steps it is exact."""
        return {"delta": self.delta, "resync_every": self.resync_every}

    @model_validator(mode="before")
    @classmethod
    def _implies_delta(cls, data: Any) -> Any:
        """Write ``delta`` beside a codec that encodes nothing else, unless the user wrote it."""
        found = {"codec": data} if isinstance(data, str) else data
        if not isinstance(found, Mapping) or not isinstance(found.get("codec"), str):
            return data
        codec = CODECS.get(found["codec"])
        return data if codec is None or not codec.references else {"delta": True, **found}

    def codec_of(self, direction: Direction) -> Codec | None:
        """Build the codec; None for native."""
        return build_codec(self.settings(direction), "", under="zero")

    @property
    def steps(self) -> bool:
        """Return whether the codec encodes steps from the last gather, of 16-bit weights only."""
        codec = self.codec_of("forward") if self.codec else None
        return codec is not None and codec.references

    def _check_codecs(self) -> None:
        codec = build_codec(self.given(), "", under="zero")
        self._check_measured(codec)
        if codec is not None and codec.references and not self.delta:
            todo = f"{codec.name} always sends what changed since the last gather; remove it"
            raise problem("delta", False, todo)
        if self.delta:
            if codec is None:
                todo = "none sends exact parameters; name a codec or remove it"
                raise problem("delta", True, todo)
            self._check_converges(codec, "delta")
        if self.resync_every and not self.delta:
            todo = "only deltas are resynchronized; add delta or remove it"
            raise problem("resync_every", self.resync_every, todo)
