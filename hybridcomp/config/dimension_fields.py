"""Give the block a key for each row of ``hybridcomp.dimensions``, after its first keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field, create_model

from hybridcomp.config.codec_settings import NONE, Strict
from hybridcomp.config.dimension import DimensionConfig
from hybridcomp.config.directional import (
    ActivationConfig,
    MeshConfig,
    OffloadConfig,
    PipelineConfig,
    TensorConfig,
)
from hybridcomp.config.gradient import GradientConfig
from hybridcomp.config.islands import IslandConfig
from hybridcomp.config.parameter import ParameterConfig
from hybridcomp.config.presets import NAMES
from hybridcomp.dimensions import ROWS, Settings

#: model of a dimension's keys, by the name in its row
MODELS: Mapping[Settings, type[DimensionConfig]] = {
    "plain": DimensionConfig,
    "gradients": GradientConfig,
    "parameters": ParameterConfig,
    "activations": ActivationConfig,
    "tensor": TensorConfig,
    "pipeline": PipelineConfig,
    "offload": OffloadConfig,
    "mesh": MeshConfig,
    "islands": IslandConfig,
}


class Beginning(Strict):
    """Keys of the block that precede its dimensions."""

    enabled: bool = Field(True, description="false: everything is native, as without the block.")
    preset: str | None = Field(
        None,
        description="Settings to start from; the keys beside it override it.",
        json_schema_extra={"enum": [*NAMES, None]},
    )
    plan: str | None = Field(
        None,
        min_length=1,
        description="With `preset` planned: the `plan.json` that `hybridcomp plan` wrote, relative "
        "to the working directory. A job of another layout is refused.",
    )


def with_dimensions(base: type[BaseModel]) -> type[BaseModel]:
    """Return ``base`` with a field for each dimension, which is native by default."""
    fields: dict[str, Any] = {}
    for name, row in ROWS.items():
        model = MODELS[row.settings]
        default = Field(model(codec=NONE), description=f"{row.about} Default: native.")
        fields[name] = (model, default)
    return create_model("DimensionFields", __base__=base, **fields)


if TYPE_CHECKING:

    class DimensionFields(Beginning):
        """Dimensions that other code reads by name; others are read through their rows."""

        dp: GradientConfig = GradientConfig()
        zero: ParameterConfig = ParameterConfig()
        tp: TensorConfig = TensorConfig()
        pp: PipelineConfig = PipelineConfig()
        ep: ActivationConfig = ActivationConfig()
        cp: ActivationConfig = ActivationConfig()
        offload: OffloadConfig = OffloadConfig()
        tp2d: MeshConfig = MeshConfig()
        sync: IslandConfig = IslandConfig()
        embed: ActivationConfig = ActivationConfig()
else:
    DimensionFields = with_dimensions(Beginning)
