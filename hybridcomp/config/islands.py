"""The dimension ``sync`` of the block: islands that train alone and meet now and then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from hybridcomp.codecs.base import Codec
from hybridcomp.config.codec_settings import (
    NONE,
    Strict,
    Under,
    codec_field,
    settings_of,
    with_settings,
)
from hybridcomp.config.dimension import DimensionConfig
from hybridcomp.config.error_messages import parsed, problem
from hybridcomp.config.presets import ISLAND_PRESETS, known_preset
from hybridcomp.config.rendezvous import RendezvousConfig


class OuterConfig(Strict):
    """The outer optimizer: SGD on the mean change of the islands' weights."""

    lr: float = Field(0.7, gt=0, allow_inf_nan=False, description="Learning rate.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum; 0: none, and no memory for it.")
    nesterov: bool = Field(True, description="Nesterov momentum. Without momentum it does nothing.")


if TYPE_CHECKING:
    _Declared = DimensionConfig
else:
    _Declared = with_settings(DimensionConfig, settings_of(sparse=True))


class IslandConfig(_Declared):
    """Islands of ranks that train by themselves and meet every ``every`` optimizer steps."""

    under: ClassVar[Under] = "sync"
    more: ClassVar[tuple[str, ...]] = tuple(settings_of(sparse=True))

    preset: str | None = Field(
        None,
        description="Settings to start from; the keys beside it override it.",
        json_schema_extra={"enum": [*ISLAND_PRESETS, None]},
    )
    codec: str | None = codec_field("sync")
    every: int = Field(30, ge=1, description="Optimizer steps from one meeting to the next.")
    islands: Literal["node"] | Annotated[int, Field(ge=1)] | RendezvousConfig = Field(
        "node",
        description="node: each node is an island. N: every N consecutive ranks. DeepSpeed "
        "takes the island as its data-parallel group, torch's wrappers get it by "
        "`hybridcomp.island_group`. An object: each island is a job of its own, "
        "[see below](#islands-that-are-jobs).",
    )
    error_feedback: bool = Field(
        False,
        description="Add what one message left out to the next.",
    )
    decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="With error_feedback: factor on what was left out. Below 1 it takes the "
        "place of momentum (SparseLoCo).",
    )
    outer: OuterConfig = Field(OuterConfig(), description="The outer optimizer.")
    fragments: int = Field(
        1,
        ge=1,
        description="Parts of the weights that meet in turn, each every `every` steps. More: "
        "shorter messages.",
    )
    delay: int = Field(
        0,
        ge=0,
        description="Steps from a meeting's start until its mean is taken. Below `every`.",
    )
    mix: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of an island's own weights that it keeps when it takes a mean.",
    )
    staleness: int = Field(
        0,
        ge=0,
        description="Meetings that an island may be ahead of the slowest.",
    )

    outlier: float | None = Field(
        None,
        gt=1,
        allow_inf_nan=False,
        description="Skip an island as if it had sent NaN if its message's norm is above that "
        "many times the median of three or more islands. Default: never.",
    )

    @field_validator("islands", mode="before")
    @classmethod
    def _one_of(cls, found: Any) -> Any:
        number = isinstance(found, int) and not isinstance(found, bool) and found > 0
        if isinstance(found, RendezvousConfig):
            return found
        if isinstance(found, Mapping):
            return parsed(RendezvousConfig, found, "islands")
        if not number and found != "node":
            todo = 'expected "node", the number of consecutive ranks of each, or {"rendezvous": '
            raise problem("", found, f'{todo}"tcp://host:port"}}')
        return found

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, data: Any) -> Any:
        """Merge the preset; without a codec messages are native."""
        found = {"codec": data} if isinstance(data, str) else data
        if not isinstance(found, Mapping):
            return data
        name = found.get("preset")
        if name is not None:
            found = _merged(ISLAND_PRESETS[known_preset(name, ISLAND_PRESETS)], found)
        native = "codec" not in found and "error_bound" not in found
        return {"codec": NONE, **found} if native else found

    @property
    def acts(self) -> bool:
        """Return whether there are islands: any key other than ``"codec": "none"`` was written."""
        return bool(self.model_fields_set - {"codec"}) or self.codec not in (None, NONE)

    @property
    def jobs(self) -> RendezvousConfig | None:
        """Return the rendezvous of islands that are separate jobs; None for parts of one job."""
        return self.islands if isinstance(self.islands, RendezvousConfig) else None

    @property
    def late(self) -> int:
        """Return the steps from sending the message of a meeting to applying its mean."""
        return self.staleness * self.every or self.delay

    def fragment_at(self, clock: int) -> int | None:
        """Return the fragment that meets at step ``clock``, None if none does."""
        offsets, step = self._offsets, clock % self.every
        return offsets.index(step) if step in offsets else None

    @property
    def _offsets(self) -> list[int]:
        """Return for each fragment the step within ``every`` at which it meets."""
        return [self.every * index // self.fragments for index in range(self.fragments)]

    @property
    def most_under_way(self) -> int:
        """Return the most meetings that may be pending when another begins."""
        if self.staleness:
            return self.staleness * self.fragments - 1
        met = self._offsets
        return max(
            sum((at - ago) % self.every in met for ago in range(1, self.delay)) for at in met
        )

    @property
    def remark(self) -> str:
        """Return words on when islands meet, and how they apply a mean."""
        if not self.acts:
            return ""
        whose = "nodes" if self.islands == "node" else f"islands of {self.islands} rank(s)"
        if self.jobs is not None:
            whose = f"jobs at {self.jobs.rendezvous}"
        outer, parts = self.outer, [f"every {self.every} steps between {whose}"]
        nesterov = "Nesterov " if outer.nesterov and outer.momentum else ""
        parts += [f"outer {nesterov}SGD lr {outer.lr:g} momentum {outer.momentum:g}"]
        parts += ["error feedback"] if self.error_feedback else []
        for name, default in (("decay", 1.0), ("fragments", 1), ("delay", 0), ("mix", 0.0)):
            value = getattr(self, name)
            parts += [f"{name} {value:g}"] if value != default else []
        parts += [f"at most {self.staleness} meeting(s) ahead"] if self.staleness else []
        parts += [f"outliers above {self.outlier:g} x the median"] if self.outlier else []
        return ", " + ", ".join(parts)

    def agreed(self) -> dict[str, Any]:
        """Return all settings that decide when islands meet and how they apply a mean."""
        if not self.acts:
            return {}
        names = (
            "every", "islands", "error_feedback", "decay", "fragments", "delay", "mix", "staleness",
            "outlier",
        )  # fmt: skip
        found = {name: getattr(self, name) for name in names}
        if self.jobs is not None:
            found["islands"] = self.jobs.model_dump()
        return {**found, **self.outer.model_dump()}

    def _check_codecs(self) -> None:
        codec = self.built()
        self._check_feedback(codec)
        if self.jobs is not None:
            self._check_jobs()
        if self.fragments > self.every:
            todo = f"fragments meet in turn within every = {self.every} steps; lower it"
            raise problem("fragments", self.fragments, todo)
        if self.delay >= self.every:
            todo = f"a mean has to be taken before the next meeting, in {self.every} steps"
            raise problem("delay", self.delay, f"{todo}; lower it, or use staleness")
        for name in ("delay", "mix") if self.staleness else ():
            if value := getattr(self, name):
                todo = "with staleness a mean is taken at a later meeting and own progress is kept"
                raise problem(name, value, f"{todo}; remove it, or staleness")

    def _check_jobs(self) -> None:
        """Refuse settings that islands cannot have if they are separate jobs."""
        if self.ramp is not None:
            todo = "islands that join count other steps, so their codecs would differ; remove it"
            raise problem("ramp", self.ramp.model_dump(by_alias=True), todo)

    def _check_feedback(self, codec: Codec | None) -> None:
        if codec is not None and codec.sparse and not self.error_feedback:
            raise problem(
                "error_feedback", False, f"{codec.name} does not converge without; set it to true"
            )
        if self.error_feedback:
            if codec is None or codec.lossless:
                todo = f"{codec or NONE} leaves nothing out to feed back; remove it"
                raise problem("error_feedback", True, todo)
            self._check_converges(codec, "error_feedback")
        elif self.decay != 1.0:
            raise problem("decay", self.decay, "only error_feedback decays; add it or remove decay")


def _merged(preset: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the written keys into a preset's.

    A written codec replaces the preset's codec together with its settings. A lossless codec drops
    error feedback.
    """
    found = dict(preset)
    if "codec" in written or "error_bound" in written:
        for name in ("codec", "bits", "density"):
            found.pop(name, None)
        if written.get("codec") == NONE:
            found.pop("error_feedback", None)
            found.pop("decay", None)
    outer = written.get("outer")
    if isinstance(outer, Mapping) and "outer" in found:
        written = {**written, "outer": {**found["outer"], **outer}}
    return {**found, **written}
