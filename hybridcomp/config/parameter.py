"""``zero``: how parameters are gathered, whole or as what has changed since the last gather."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.registry import CODECS
from hybridcomp.config.codec_settings import PARAMETER_CODEC, build_codec, codec_schema
from hybridcomp.config.dimension import MeasuredConfig
from hybridcomp.config.error_messages import problem
from hybridcomp.dimensions import Direction

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
