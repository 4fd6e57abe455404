"""``zero``: the gather of parameters, as whole values or as changes since the last gather.

With a secondary copy every node holds all parameters once, sharded over its ranks. Then only the
changes of the copy cross between nodes, and the ranks of a node gather parameters from the copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from hybridcomp.codecs.registry import CODECS
from hybridcomp.config.codec_settings import Count, Strict, Under, codec_field
from hybridcomp.config.dimension import MeasuredConfig
from hybridcomp.config.error_messages import expecting, problem

#: codec that sends a whole secondary copy
COPIED: dict[str, Any] = {"codec": "expcode"}
ENCODED: dict[str, Any] = {"codec": "blockint", "bits": 8}


class CopyConfig(Strict):
    """Configure a secondary copy that is kept encoded, in half the memory of a bf16 copy."""

    bits: Literal[8] = Field(
        description="Bits a value, by blockint. The passes compute with the decoded copy."
    )


class FrozenConfig(Strict):
    """Configure weights without gradients that are gathered once and kept encoded on every rank."""

    on: Literal["device", "host"] = Field("device", description="Where they are kept.")
    bits: Literal[4, 8] | None = Field(
        None,
        description="Bits a value of matrices, by blockint, which passes then compute with. "
        "Default: exact, by expcode.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_place(cls, data: Any) -> Any:
        return {"on": data} if isinstance(data, str) else data


class ParameterConfig(MeasuredConfig):
    """Gather of updated parameters (ZeRO 1 and 2) or of parameters before their use (ZeRO 3)."""

    under: ClassVar[Under] = "zero"

    codec: str | None = codec_field("zero")
    delta: bool = Field(
        False,
        description="Send what changed since the last gather: 4 bits then cost about 1e-3 of a "
        "weight instead of 8e-2, and mpc saves twice as much. Takes a copy of each "
        "rank's share of the parameters. Not at ZeRO 3.",
    )
    resync_every: Count = Field(
        0,
        description="Optimizer steps between exact gathers with delta, or between whole copies "
        "with secondary. 0 (default): only at first, after loading, on request, and"
        " where ranks differ.",
    )
    secondary: Annotated[
        Literal["exact", "native"] | CopyConfig,
        expecting('expected "exact", "native" or {"bits": 8}'),
    ] = Field(
        "native",
        description="ZeRO 3 and FSDP2 over several nodes: each node keeps a copy of the "
        "parameters, cut over its ranks, and receives once what a step changed. "
        "exact: a 16-bit copy, updated without loss; at ZeRO 3 that of "
        'zero_hpz_partition_size, by default a node\'s ranks. {"bits": 8}: a copy of'
        " half the memory, with which the passes compute. native (default): none, "
        "or DeepSpeed's own. Replaces `codec`.",
    )

    frozen: Annotated[
        Literal["gathered"] | FrozenConfig,
        expecting(
            'expected "gathered", "device", "host" or an object of "on", "device" or "host", and '
            '"bits", 4 or 8'
        ),
    ] = Field(
        "gathered",
        description='ZeRO 3 and FSDP2: weights without gradients. device, host or {"on": '
        '"host", "bits": 4}: gathered once, kept encoded on every rank, and '
        "gathered anew if they change. gathered (default): before each use.",
    )

    @property
    def keeps_frozen(self) -> FrozenConfig | None:
        """Return how frozen weights are kept; None if they are gathered before each use."""
        return self.frozen if isinstance(self.frozen, FrozenConfig) else None

    @property
    def acts(self) -> bool:
        return self.keeps_frozen is not None

    @property
    def remark(self) -> str:
        return self._sent + ("" if self.keeps_frozen is None else ", frozen ones once")

    @property
    def _sent(self) -> str:
        every = self.resync_every
        if self.keeps_copy:
            whole = f", whole every {every} steps" if every else ""
            return f", once to each node, of what changed in its secondary copy{whole}"
        if not self.delta:
            return ""
        return ", of what changed" + (f", exact every {every} steps" if every else "")

    @property
    def keeps_copy(self) -> bool:
        return self.secondary != "native"

    def agreed(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"delta": self.delta, "resync_every": self.resync_every}
        if self.keeps_copy:
            exact = self.secondary == "exact"
            settings["secondary"] = self.secondary if exact else {"bits": 8}
        if self.keeps_frozen is not None:
            settings["frozen"] = self.keeps_frozen.model_dump()
        return settings

    @model_validator(mode="before")
    @classmethod
    def _implies_codec(cls, data: Any) -> Any:
        """Fill in the codec that sends a whole secondary copy, unless the user wrote one.

        ``_check_copy`` refuses any other codec.
        """
        if not isinstance(data, Mapping) or data.get("codec") is not None:
            return data
        secondary = data.get("secondary")
        if secondary == "exact" or isinstance(secondary, (Mapping, CopyConfig)):
            sent = COPIED if secondary == "exact" else ENCODED
            return {**data, **sent}
        return {**data, "codec": "none"} if data.get("frozen", "gathered") != "gathered" else data

    @model_validator(mode="before")
    @classmethod
    def _implies_delta(cls, data: Any) -> Any:
        """Fill in ``delta`` for a codec that only encodes deltas, unless the user wrote it."""
        settings = {"codec": data} if isinstance(data, str) else data
        if not isinstance(settings, Mapping) or not isinstance(settings.get("codec"), str):
            return data
        codec = CODECS.get(settings["codec"])
        return data if codec is None or not codec.references else {"delta": True, **settings}

    @property
    def steps(self) -> bool:
        """Return whether the codec encodes steps from the last gather, for 16-bit weights only."""
        codec = self.built() if self.codec else None
        return codec is not None and codec.references

    def _check_codecs(self) -> None:
        codec = self.built()
        self._check_measured(codec)
        if codec is not None and codec.references and not self.delta:
            todo = f"{codec.name} always sends what changed since the last gather; remove it"
            raise problem("delta", False, todo)
        if self.delta:
            if codec is None:
                todo = "none sends exact parameters; name a codec or remove it"
                raise problem("delta", True, todo)
            self._check_converges(codec, "delta")
        if self.keeps_copy:
            self._check_copy()
        if self.resync_every and not (self.delta or self.keeps_copy):
            todo = "only deltas are resynchronized; add delta or remove it"
            raise problem("resync_every", self.resync_every, todo)

    def _check_copy(self) -> None:
        """Refuse keys that would have no effect together with ``secondary``."""
        if self.delta:
            todo = "a secondary copy takes steps by itself, and keeps nothing else; remove it"
            raise problem("delta", True, todo)
        sent = COPIED if self.secondary == "exact" else ENCODED
        if self.given() != sent:
            todo = (
                f"with secondary {'exact' if sent is COPIED else '{bits: 8}'} the copy is sent by "
                f"{sent['codec']} and steps by stepcode; remove the codec and its settings"
            )
            raise problem("codec", self.codec or self.given(), todo)
        if self.ramp is not None:
            todo = "a copy is encoded in one way in all steps; remove it"
            raise problem("ramp", self.ramp.model_dump(by_alias=True), todo)
