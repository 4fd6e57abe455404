"""The block's key ``memory``: ZeRO 3's parameters on the device and states on the host."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from hybridcomp.config.codec_settings import Positive, Strict
from hybridcomp.config.error_messages import problem


class MemoryPolicy(Strict):
    """Configure when gathered parameters are released, and which states stay in host memory."""

    policy: Literal["static", "planned"] = Field(
        "static",
        description="static (default): ZeRO 3's settings as they are written. planned: "
        "prefetch_bucket_size, max_live_parameters and max_reuse_distance are "
        "searched on DeepSpeed's recorded step, so that parameters are gathered "
        "least often within `device_gb`.",
    )
    device_gb: Positive | None = Field(
        None,
        description="planned: GB (1e9 bytes) of a rank's device that the job may take. Default:"
        " what is free before the first step, less a twentieth. A CPU needs it, and"
        " counts gathered parameters alone.",
    )
    host_gb: Positive | None = Field(
        None,
        description="planned, with states on NVMe: GB of a node's memory that keep optimizer "
        "states, 16 bytes a parameter. Default: none.",
    )

    @property
    def planned(self) -> bool:
        return self.policy == "planned"

    @model_validator(mode="after")
    def _can_act(self) -> MemoryPolicy:
        for name in ("device_gb", "host_gb"):
            value: Any = getattr(self, name)
            if value is not None and not self.planned:
                raise problem(name, value, 'only "policy": "planned" reads it; write that, too')
        return self
