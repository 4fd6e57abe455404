"""Dimensions whose messages have several directions, each with its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from hybridcomp.config.codec_settings import NONE, CodecSettings, build_codec
from hybridcomp.config.dimension import DimensionConfig, MeasuredConfig
from hybridcomp.config.error_messages import problem
from hybridcomp.dimensions import DIRECTIONS, KINDS, Direction

#: codecs for files of optimizer states
STATE_CODECS = ("expcode", "mpc")


class DirectionConfig(CodecSettings):
    """Settings that differ in one direction. Without ``codec`` the dimension's codec is kept."""


class StatesConfig(DirectionConfig):
    """The codec of files of optimizer states."""

    EXAMPLE: ClassVar[str] = '{"codec": "expcode"}'

    @model_validator(mode="after")
    def _names_its_codec(self) -> StatesConfig:
        if self.codec is None:
            name, value = next(iter(self.given().items()), ("codec", None))
            raise problem(name, value, 'states name a codec of their own, such as "expcode"')
        return self


class SplitConfig(DimensionConfig):
    """A dimension, each of whose directions (``ways``) may have its own settings.

    Directions in ``apart`` are native unless they have their own settings.
    """

    apart: ClassVar[tuple[Direction, ...]] = ()

    def settings(self, direction: Direction) -> dict[str, Any]:
        """Return codec and codec settings of ``direction``, its override merged in."""
        override: DirectionConfig | None = getattr(self, direction)
        if direction in self.apart:
            return {"codec": NONE} if override is None else override.given()
        if override is None:
            return self.given()
        if override.codec is not None:
            return override.given()
        return {**self.given(), **override.given()}

    def _check_codecs(self) -> None:
        ways = [direction for direction in self.ways if direction not in self.apart]
        overrides = [getattr(self, direction) for direction in ways]
        *first, last = ways
        every = f"{', '.join(first)} and {last} {'both' if len(first) == 1 else 'all'}"
        for name, value in self.given().items():
            if all(o is not None and (o.codec or name in o.given()) for o in overrides):
                todo = f"never used: {every} name their codec or {name}; remove it"
                raise problem(name, value, todo)
        for direction in self.ways:
            override = getattr(self, direction)
            own = set() if override is None else set(override.given())
            build_codec(self.settings(direction), direction, own)


class ActivationConfig(SplitConfig):
    """Activations in the forward pass, their gradients in the backward pass."""

    ways: ClassVar[tuple[Direction, ...]] = DIRECTIONS

    forward: DirectionConfig | None = Field(
        None, description="What differs for activations (forward pass)."
    )
    backward: DirectionConfig | None = Field(
        None, description="What differs for gradients of activations (backward pass)."
    )


class MeshConfig(SplitConfig):
    """Two-dimensional tensor parallelism; settings are per kind of message, not per direction."""

    ways: ClassVar[tuple[Direction, ...]] = KINDS

    activations: DirectionConfig | None = Field(
        None, description="What differs for activations, in both passes."
    )
    weights: DirectionConfig | None = Field(
        None, description="What differs for weights, in both passes."
    )
    gradients: DirectionConfig | None = Field(
        None, description="What differs for gradients of activations and weights, which are summed."
    )


class TensorConfig(MeasuredConfig, ActivationConfig):
    """Collectives of tensor-parallel layers; ``PipelineConfig`` inherits the same keys."""

    def _check_codecs(self) -> None:
        super()._check_codecs()
        self._check_measured(self.codec_of("forward") or self.codec_of("backward"))


class PipelineConfig(TensorConfig):
    """Sends between pipeline stages."""

    scatter_gather: bool = Field(
        False,
        description="Megatron-core without sequence parallelism: every tensor rank sends its "
        "part of a message, and the receivers gather them; also with codec none. An"
        " error under DeepSpeed, which has pipe_partitioned.",
    )

    @property
    def remark(self) -> str:
        return ", cut among tensor ranks" if self.scatter_gather else ""

    def agreed(self) -> dict[str, Any]:
        return {"scatter_gather": self.scatter_gather}


class OffloadConfig(ActivationConfig):
    """Copies between a device and its host (ZeRO-Offload), and files of states on NVMe."""

    ways: ClassVar[tuple[Direction, ...]] = (*DIRECTIONS, "states")
    apart: ClassVar[tuple[Direction, ...]] = ("states",)

    when: Literal["always", "auto"] = Field(
        "always",
        description="always (default), or auto: the first steps take turns natively, with encoded "
        "gradients, and with encoded parameters too; the fastest way on the slowest rank stays.",
    )
    sums: Literal["auto", "device", "host"] = Field(
        "auto",
        description="Where gradients of several micro-batches are summed. device: they cross once "
        "a step, for 2 bytes of device memory a value in bf16. host: each crosses. auto (default): "
        "device if a tenth of its memory stays free in the first backward pass.",
    )
    forward: DirectionConfig | None = Field(
        None, description="What differs for updated parameters, host to device."
    )
    backward: DirectionConfig | None = Field(
        None, description="What differs for gradients, device to host."
    )
    states: StatesConfig | None = Field(
        None,
        description="ZeRO-Infinity (offload_optimizer.device nvme): the codec of files of "
        "optimizer states, expcode or mpc. Each file is checked, and replaced "
        "whole. Default: DeepSpeed's own files.",
    )

    @model_validator(mode="before")
    @classmethod
    def _states_alone(cls, data: Any) -> Any:
        """Make host copies native if the block names only the codec of state files."""
        if isinstance(data, Mapping) and set(data) == {"states"}:
            return {"codec": NONE, **data}
        return data

    def agreed(self) -> dict[str, Any]:
        return {"when": self.when, "sums": self.sums}

    def _check_codecs(self) -> None:
        super()._check_codecs()
        codecs = {way: self.codec_of(way) for way in DIRECTIONS}
        if self.when == "auto" and not any(codecs.values()):
            raise problem("when", self.when, "none is native anyway; remove it, or name a codec")
        if self.sums != "auto" and codecs["backward"] is None:
            todo = "native gradients are added up as DeepSpeed does; remove it, or name a codec"
            raise problem("sums", self.sums, todo)
        states = self.codec_of("states")
        if states is not None and states.name not in STATE_CODECS:
            todo = f"optimizer states are kept without loss: {' or '.join(STATE_CODECS)}"
            raise problem("states", states.spec, todo)
