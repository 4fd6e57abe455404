"""One dimension of the block: its codec, settings and directions."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from hybridcomp.codecs.base import Codec
from hybridcomp.config.codec_settings import NONE, CodecSettings, Positive, Strict, build_codec
from hybridcomp.config.error_messages import problem
from hybridcomp.config.policy import Limits, Rung
from hybridcomp.config.ramp import RampConfig, movable, moving, rungs
from hybridcomp.dimensions import DIRECTIONS, MEASURED, MEASURED_EARLY, ROWS, Direction, listed

#: dimensions that may keep residuals
FED_BACK = tuple(name for name, row in ROWS.items() if row.keeps_residuals)
#: measured dimensions that are timed only during the run, not before it
_LATE = tuple(name for name in MEASURED if name not in MEASURED_EARLY)


class GuardConfig(Strict):
    """Limit sampled errors; a dimension that exceeds a limit is native for the rest of the run."""

    error: Positive | None = Field(
        1.0,
        description="Largest relative L2 error of one encoding, over the job. 1: as wrong "
        "as zeros. null: no limit.",
    )
    residual: Positive | None = Field(
        20.0,
        description=f"{listed(FED_BACK)} with error feedback: largest norm of the residuals "
        "over that of the gradients. Residuals that diverge pass it. null: no limit.",
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
        description="Limits of the sampled error and of the residuals; beyond one the dimension"
        ' stays native on all ranks. "none": no limits.',
    )

    ramp: RampConfig | None = Field(
        None, description="Start with a milder setting and reach the written one at step `steps`."
    )

    def settings(self, direction: Direction) -> dict[str, Any]:
        """Return codec and codec settings of ``direction``."""
        return self.given()

    def rungs_of(self, direction: Direction) -> tuple[Rung, ...]:
        """Return the codecs of the ramp in ``direction``; empty if no setting is ramped there."""
        settings = self.settings(direction)
        if self.ramp is None or moving(settings) is None:
            return ()
        build = functools.partial(build_codec, prefix="", under=self.under)
        return rungs(settings, self.ramp.start, self.ramp.steps, build)

    def codec_of(self, direction: Direction) -> Codec | None:
        return build_codec(self.settings(direction), "", under=self.under)

    @model_validator(mode="after")
    def _can_act(self) -> DimensionConfig:
        self._check_codecs()
        ramps = [
            self.rungs_of(way) for way in self.ways
        ]  # building the ramps raises if the settings of any direction are wrong
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
        """Return whether the dimension has an effect although none of its messages has a codec."""
        return False

    @property
    def remark(self) -> str:
        """Return the text after the codec in a line that describes the dimension, or ""."""
        return ""

    def agreed(self) -> dict[str, Any]:
        """Return the settings, beyond codecs, ramp and guard, on which the ranks must agree."""
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
        self.built()

    def _check_feedback(self, codec: Codec | None) -> None:
        if codec is None or codec.lossless:
            todo = f"{codec or NONE} leaves nothing out to feed back; remove it"
            raise problem("error_feedback", True, todo)
        self._check_converges(codec, "error_feedback")

    def _check_converges(self, codec: Codec, key: str) -> None:
        """Refuse error feedback or deltas if the codec's errors would grow or only add noise."""
        if codec.unbiased:
            todo = "leaves nothing out in the mean, and its noise would only come back; remove it"
            raise problem(key, True, f"{codec} {todo}")
        why = codec.diverges()
        if why is not None:
            raise problem(key, True, f"diverges {why}")


class MeasuredConfig(DimensionConfig):
    """A dimension that can turn itself off if the link is faster than its codec."""

    when: Literal["always", "auto"] | None = Field(
        None,
        description=f"Default: the block's `when`. always: compress. auto: time messages "
        f"natively and encoded on all ranks, for a second or two a dimension, and "
        f"stay native where encoding is not faster. {listed(MEASURED_EARLY)}: at "
        f"start-up. {listed(_LATE)}: after the first step, which is native. A close "
        f"result is settled by ten or eighteen steps of the run in both ways.",
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
