"""The block's key ``generate``: messages and memory of ``hybridcomp.generate``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from hybridcomp.codecs.base import Codec
from hybridcomp.config.codec_settings import NONE, CodecSettings, Strict, build_codec
from hybridcomp.config.error_messages import problem


class HopConfig(CodecSettings):
    """Configure how messages of one dimension are encoded while the job generates."""

    def codec_of(self) -> Codec | None:
        """Build the codec; None for native."""
        return build_codec(self.given(), "")


class GenerateConfig(Strict):
    """Configure generation on the training ranks; the training's own codecs do not apply to it."""

    pp: HopConfig = Field(
        HopConfig(codec=NONE),
        description="Hidden states between stages. Default: native, whatever the training's `pp` "
        "is.",
    )
    tp: HopConfig = Field(
        HopConfig(codec=NONE),
        description="Sums inside tensor-parallel layers. Default: native, likewise.",
    )
    min_bytes: int | None = Field(
        None,
        ge=0,
        description="Messages of fewer bytes stay native. Default: the block's. Decoded tokens "
        "are small messages: sequences x width values.",
    )
    in_flight: Literal["auto"] | int = Field(
        "auto",
        description="Batches under way at once. auto: twice the stages.",
    )
    batch: int = Field(8, ge=1, description="Sequences of a batch.")
    room: int = Field(
        4096,
        ge=2,
        description="Most tokens of a sequence, prompt and answer.",
    )

    @field_validator("in_flight", mode="before")
    @classmethod
    def _some(cls, found: Any) -> Any:
        if found != "auto" and (type(found) is not int or found < 1):
            raise problem("", found, 'expected "auto" or a number of batches, at least 1')
        return found

    @field_validator("pp", "tp", mode="after")
    @classmethod
    def _codec(cls, found: HopConfig) -> HopConfig:
        found.codec_of()
        return found

    def summary(self) -> str:
        """Return one line on the codecs of messages and the memory of sequences."""
        ways = [f"{name} {codec.spec}" for name, one in (("pp", self.pp), ("tp", self.tp))
                if (codec := one.codec_of()) is not None]  # fmt: skip
        sent = ", ".join(ways) or "native messages"
        return f"{sent}; batches of {self.batch}, {self.in_flight} in flight, room {self.room}"

    def block(self, min_bytes: int) -> dict[str, Any]:
        """Return the block of a job that would send as this one does while it generates."""
        given = {"pp": self.pp.given(), "tp": self.tp.given(), "ledger": {"sample_every": 0}}
        least = min_bytes if self.min_bytes is None else self.min_bytes
        return {**given, "min_bytes": least, "hierarchy": "none"}
