"""The block's key ``gathered``: how ``hybridcomp.gathered`` holds all weights on every rank."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from hybridcomp.codecs.base import Codec
from hybridcomp.config.codec_settings import CodecSettings, Positive, build_codec, codec_field
from hybridcomp.config.error_messages import problem

#: codec used unless one is written
STEPS = "stepcode"


class GatheredConfig(CodecSettings):
    """Configure the gather of weights for a roll-out, and the copy kept for the next gather."""

    codec: str | None = codec_field("zero", f"Default: {STEPS}. ")
    keep: Literal["device", "host"] = Field(
        "device", description=f"{STEPS}: where the weights of the last gather are kept."
    )
    limit_gb: Positive | None = Field(
        None,
        description="GB (1e9 bytes) that a rank may take for the gathered weights and their "
        "buffers; more is refused. Default: the memory that is free.",
    )

    def codec_of(self) -> Codec | None:
        return build_codec(self.given() or {"codec": STEPS}, "", under="zero")

    @model_validator(mode="after")
    def _can_act(self) -> GatheredConfig:
        codec = self.codec_of()
        if "keep" in self.model_fields_set and (codec is None or not codec.references):
            todo = f"only {STEPS} keeps the weights of the last gather; remove it"
            raise problem("keep", self.keep, todo)
        return self

    def agreed(self) -> dict[str, Any]:
        codec = self.codec_of()
        spec = "none" if codec is None else codec.spec
        return {"codec": spec, "keep": self.keep, "limit_gb": self.limit_gb}
