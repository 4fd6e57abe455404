"""The dimension ``sync``: islands of ranks that train alone and periodically synchronize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from hybridcomp.config.codec_settings import (
    NONE,
    AtLeastOne,
    Count,
    Positive,
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
    lr: Positive = Field(0.7, description="Learning rate.")
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
    every: AtLeastOne = Field(30, description="Optimizer steps from one meeting to the next.")
    islands: Literal["node"] | AtLeastOne | RendezvousConfig = Field(
        "node",
        description="node: each node is an island. N: every N consecutive ranks. DeepSpeed "
        "takes the island as its data-parallel group, torch's wrappers get it by "
        "`hybridcomp.island_group`. An object: each island is a job of its own, "
        "[see below](#islands-that-are-jobs).",
    )
    error_feedback: bool = Field(False, description="Add what one message left out to the next.")
    decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="With error_feedback: factor on what was left out. Below 1 it takes the "
        "place of momentum (SparseLoCo).",
    )
    outer: OuterConfig = Field(OuterConfig(), description="The outer optimizer.")
    fragments: AtLeastOne = Field(
        1,
        description="Parts of the weights that meet in turn, each every `every` steps. More: "
        "shorter messages.",
    )
    delay: Count = Field(
        0, description="Steps from a meeting's start until its mean is taken. Below `every`."
    )
    mix: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Share of an island's own weights that it keeps when it takes a mean.",
    )
    staleness: Count = Field(0, description="Meetings that an island may be ahead of the slowest.")

    outlier: float | None = Field(
        None,
        gt=1,
        allow_inf_nan=False,
        description="Skip an island as if it had sent NaN if its message's norm is above that "
        "many times the median of three or more islands. Default: never.",
    )

    @field_validator("islands", mode="before")
    @classmethod
    def _one_of(cls, written: Any) -> Any:
        number = isinstance(written, int) and not isinstance(written, bool) and written > 0
        if isinstance(written, RendezvousConfig):
            return written
        if isinstance(written, Mapping):
            return parsed(RendezvousConfig, written, "islands")
        if not number and written != "node":
            todo = 'expected "node", the number of consecutive ranks of each, or {"rendezvous": '
            raise problem("", written, f'{todo}"tcp://host:port"}}')
        return written

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, data: Any) -> Any:
        """Merge the preset; without a codec messages are native."""
        settings = {"codec": data} if isinstance(data, str) else data
        if not isinstance(settings, Mapping):
            return data
        name = settings.get("preset")
        if name is not None:
            settings = _merged(ISLAND_PRESETS[known_preset(name, ISLAND_PRESETS)], settings)
        native = "codec" not in settings and "error_bound" not in settings
        return {"codec": NONE, **settings} if native else settings

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
        """Return the steps between sending a meeting's message and applying the meeting's mean."""
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
        if not self.acts:
            return {}
        names = (
            "every", "islands", "error_feedback", "decay", "fragments", "delay", "mix", "staleness",
            "outlier",
        )  # fmt: skip
        settings = {name: getattr(self, name) for name in names}
        if self.jobs is not None:
            settings["islands"] = self.jobs.model_dump()
        return {**settings, **self.outer.model_dump()}

    def _check_codecs(self) -> None:
        codec = self.built()
        if codec is not None and codec.sparse and not self.error_feedback:
            todo = f"{codec.name} does not converge without; set it to true"
            raise problem("error_feedback", False, todo)
        if self.error_feedback:
            self._check_feedback(codec)
        elif self.decay != 1.0:
            raise problem("decay", self.decay, "only error_feedback decays; add it or remove decay")
        if self.jobs is not None and self.ramp is not None:
            todo = "islands that join count other steps, so their codecs would differ; remove it"
            raise problem("ramp", self.ramp.model_dump(by_alias=True), todo)
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


def _merged(preset: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the written keys into a preset's.

    A written codec replaces the preset's codec together with its settings. A lossless codec drops
    error feedback.
    """
    settings = dict(preset)
    if "codec" in written or "error_bound" in written:
        for name in ("codec", "bits", "density"):
            settings.pop(name, None)
        if written.get("codec") == NONE:
            settings.pop("error_feedback", None)
            settings.pop("decay", None)
    outer = written.get("outer")
    if isinstance(outer, Mapping) and "outer" in settings:
        written = {**written, "outer": {**settings["outer"], **outer}}
    return {**settings, **written}
