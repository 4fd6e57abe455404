"""The block's key ``generate``: messages and memory of ``hybridcomp.generate``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from hybridcomp.config.codec_settings import (
    NONE,
    AtLeastOne,
    CodecSettings,
    Count,
    Positive,
    Strict,
)
from hybridcomp.config.error_messages import problem


class HopConfig(CodecSettings):
    """Configure how messages of one dimension are encoded while the job generates."""


class GenerateConfig(Strict):
    """Configure generation on the training ranks, to which the codecs of training do not apply."""

    pp: HopConfig = Field(
        HopConfig(codec=NONE),
        description="Hidden states between stages. Default: native, whatever the training's `pp` "
        "is.",
    )
    tp: HopConfig = Field(
        HopConfig(codec=NONE),
        description="Sums inside tensor-parallel layers. Default: native, likewise.",
    )
    min_bytes: Count | None = Field(
        None,
        description="Messages of fewer bytes stay native. Default: the block's. Decoded tokens "
        "are small messages: sequences x width values.",
    )
    in_flight: Literal["auto"] | int = Field(
        "auto", description="Batches under way at once. auto: twice the stages."
    )
    batch: AtLeastOne = Field(8, description="Sequences of a batch.")
    room: int = Field(4096, ge=2, description="Most tokens of a sequence, prompt and answer.")
    weights_gb: Positive | None = Field(
        None,
        description="GB (1e9 bytes) that a stage's weights may take on the device. Further layers "
        "wait in host memory, encoded without loss, and come back one ahead. Default: all stay.",
    )

    @field_validator("in_flight", mode="before")
    @classmethod
    def _some(cls, written: Any) -> Any:
        if written != "auto" and (type(written) is not int or written < 1):
            raise problem("", written, 'expected "auto" or a number of batches, at least 1')
        return written

    @field_validator("pp", "tp", mode="after")
    @classmethod
    def _codec(cls, hop: HopConfig) -> HopConfig:
        hop.built()
        return hop

    def summary(self) -> str:
        ways = [f"{name} {codec.spec}" for name, hop in (("pp", self.pp), ("tp", self.tp))
                if (codec := hop.built()) is not None]  # fmt: skip
        sent = ", ".join(ways) or "native messages"
        kept = "" if self.weights_gb is None else f", weights of {self.weights_gb:g} GB at most"
        held = f"batches of {self.batch}, {self.in_flight} in flight, room {self.room}"
        return f"{sent}; {held}{kept}"

    def block(self, min_bytes: int) -> dict[str, Any]:
        """Return the block of a training job that sends as this job does while it generates."""
        given = {"pp": self.pp.given(), "tp": self.tp.given(), "ledger": {"sample_every": 0}}
        least = min_bytes if self.min_bytes is None else self.min_bytes
        return {**given, "min_bytes": least, "hierarchy": "none"}
