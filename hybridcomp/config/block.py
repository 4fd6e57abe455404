"""Model of the ``"compression"`` block: its keys, and the checks across them.

A dimension that the user writes with a codec replaces the preset's settings of this dimension;
without a codec it changes only the settings that it names. The same holds for ``forward`` and
``backward`` inside a dimension.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler

from hybridcomp.codecs.base import Codec
from hybridcomp.codecs.registry import CODECS
from hybridcomp.config import planned
from hybridcomp.config.async_pipeline import AsyncPipelineConfig
from hybridcomp.config.bounds import check_kept
from hybridcomp.config.codec_settings import NONE, AtLeastOne, Count, Strict
from hybridcomp.config.dimension import DimensionConfig, MeasuredConfig
from hybridcomp.config.dimension_fields import DimensionFields
from hybridcomp.config.error_messages import NOTHING, problem, translate
from hybridcomp.config.gathered import GatheredConfig
from hybridcomp.config.generation import GenerateConfig
from hybridcomp.config.hierarchy_level import (
    Units,
    Widths,
    check_hierarchy,
    codecs_of,
    read_hierarchy,
    widths_of,
)
from hybridcomp.config.ledger import LedgerConfig
from hybridcomp.config.memory_policy import MemoryPolicy
from hybridcomp.config.policy import Limits, Policy, Rung
from hybridcomp.config.presets import MEASURING, NATIVE, merged
from hybridcomp.config.publish import PublishConfig
from hybridcomp.dimensions import (
    DIMENSIONS,
    MEASURED,
    ROWS,
    TWO_LEVELS,
    Dimension,
    Direction,
    listed,
)

#: the key of the block in a ds_config.json
BLOCK = "compression"


class CompressionConfig(DimensionFields):
    """The block, with its preset merged in."""

    when: Literal["always", "auto"] | None = Field(
        None,
        description=f"Default of `when` in {listed(MEASURED)}: auto with preset "
        "recommended, else always.",
    )
    remember: bool = Field(
        True,
        description="Take over what the last run of this job on the same machines measured, by "
        "a file in the user's cache. false: measure in every run.",
    )
    min_bytes: Count = Field(
        65536,
        description="Messages of fewer bytes stay native. Lower it where bytes count more "
        "than latency.",
    )
    start_step: Count = Field(0, description="Optimizer steps before compression starts.")
    hierarchy: Literal["auto", "none"] | AtLeastOne | Units = Field(
        "auto",
        description=f"Two levels for {listed(TWO_LEVELS)} where a group spans nodes: native "
        f"inside a node, encoded between nodes, which then send one rank's bytes. "
        f"auto: nodes by the launcher's numbers (CROSS_RANK, GROUP_RANK), else by "
        f"host. N: every N consecutive ranks. none: one level. [8, 4]: three levels,"
        f" nodes of 8 ranks and sites (or switches) of 4 nodes, encoded between "
        f'sites. "auto" in a list: by the launcher, for switches Slurm\'s '
        f'SLURM_TOPOLOGY_ADDR. An object in a list, such as {{"size": 4, "codec": '
        f'"blockint", "bits": 8}}: dp\'s sums of this level are encoded, too.',
    )
    on_unsupported: Literal["error", "native"] = Field(
        "error",
        description="If a key cannot take effect. error: stop before training. native: say once"
        " what stays uncompressed, and train.",
    )
    ledger: LedgerConfig = Field(LedgerConfig(), description="What is written down.")
    pipeline: AsyncPipelineConfig = Field(
        AsyncPipelineConfig(),
        description="DeepSpeed's pipeline without a flush after every batch; experimental.",
    )
    memory: MemoryPolicy = Field(
        MemoryPolicy(), description="What DeepSpeed's ZeRO 3 keeps on the device and the host."
    )
    publish: PublishConfig | None = Field(
        None,
        description="Versions of the weights for inference engines, exact deltas after optimizer "
        "steps. Default: none.",
    )
    gathered: GatheredConfig | None = Field(
        None,
        description="All weights on every rank for a roll-out, in `with hybridcomp.gathered(...)`. "
        "Default: gathered natively.",
    )

    generate: GenerateConfig | None = Field(
        None, description="How `hybridcomp.generate` sends, and what it keeps. Default: native."
    )

    _explicit: frozenset[Dimension] = PrivateAttr(frozenset())
    _planned: planned.Planned | None = PrivateAttr(None)
    _native: frozenset[Dimension] = PrivateAttr(frozenset())

    @field_validator("hierarchy", mode="before")
    @classmethod
    def _levels(cls, written: Any) -> Any:
        return read_hierarchy(written)

    @model_validator(mode="wrap")
    @classmethod
    def _with_preset(
        cls, data: Any, handler: ModelWrapValidatorHandler[CompressionConfig]
    ) -> CompressionConfig:
        if not isinstance(data, Mapping):
            raise problem("", data, 'expected an object, such as {"preset": "recommended"}')
        plan = planned.read(data)
        config = handler(merged(data, plan))
        config._planned = plan
        config._explicit = frozenset(name for name in DIMENSIONS if name in data)
        idle = not config._explicit and not config.others
        if data.get("preset") is None and idle and config.enabled:
            todo = 'names no dimension, so nothing would be compressed; add "preset" or one of'
            meant = f'("preset": "{NATIVE}" where that is meant)'
            raise problem("", NOTHING, f"{todo} {', '.join(DIMENSIONS)} {meant}")
        config._check_samples(data)
        config._check_when()
        config._check_remember(data)
        config._check_islands()
        config._check_accumulates()
        gathers = config.gathered is not None and config.gathered.codec_of() is not None
        if data.get("hierarchy", "none") != "none" and not gathers:
            check_hierarchy(config.hierarchy, config.codecs())
        return config

    def _check_islands(self) -> None:
        """Refuse islands with a flushless pipeline, since islands cannot train a PipelineModule."""
        if self.enabled and self.sync.acts and self.pipeline.waitless:
            todo = "islands of sync train no PipelineModule; leave pipeline or sync out"
            raise problem("pipeline.versions", self.pipeline.versions, todo)

    def _check_accumulates(self) -> None:
        """Refuse ``dp.accumulate`` if ``hierarchy`` has single-rank nodes or is off."""
        if self.enabled and self.dp.accumulate == "node" and self.widths in ("none", 1):
            todo = 'sums in the node need nodes of several ranks; write "auto" or their number, or'
            raise problem("hierarchy", self.widths, f"{todo} remove dp.accumulate")

    def _check_when(self) -> None:
        """Refuse ``"when": "auto"`` where no dimension can be measured."""
        if self.when == "auto" and not self.measured() and self.enabled:
            todo = f"only {', '.join(MEASURED)} can be measured, and none is compressed"
            raise problem("when", self.when, f"{todo}; remove it")

    @property
    def widths(self) -> Widths:
        """Return ``hierarchy`` without the codecs of levels."""
        return widths_of(self.hierarchy)

    @property
    def level_codecs(self) -> tuple[Codec | None, ...]:
        """Return the codec of each level of ``hierarchy``, the innermost first; None: native."""
        return codecs_of(self.hierarchy)

    @model_validator(mode="after")
    def _keeps_bounds(self) -> CompressionConfig:
        for (name, way), codec in self.codecs().items():
            override = getattr(getattr(self, name), way, None)
            there = override is not None and "error_bound" in override.given()
            check_kept(name, codec, f"{name}.{way}.error_bound" if there else f"{name}.error_bound")
        for (name, _), rungs in self.ramps().items():
            for rung in rungs:
                check_kept(name, rung.codec, f"{name}.ramp.from")
        return self

    def _check_samples(self, written: Mapping[str, Any]) -> None:
        """Refuse a guard that the user wrote if there are no samples to check."""
        for name in DIMENSIONS if not self.ledger.sample_every else ():
            settings: DimensionConfig = getattr(self, name)
            if name in written and "guard" in settings.model_fields_set and settings.limits().any:
                todo = f'{name}.guard looks at samples; set it above 0, or that guard to "none"'
                raise problem("ledger.sample_every", 0, todo)

    @classmethod
    def parse(cls, block: object) -> CompressionConfig:
        """Parse a bare block. Raises ConfigError in one line, naming the key."""
        try:
            return cls.model_validate(block)
        except ValidationError as error:
            raise translate(error, cls, BLOCK) from None

    def _check_remember(self, written: Mapping[str, Any]) -> None:
        """Refuse ``remember`` where nothing is measured."""
        if "remember" in written and not self.measured() and self.enabled:
            todo = 'is about what "when": "auto" finds, and no dimension has it; remove it'
            raise problem("remember", self.remember, todo)

    @property
    def others(self) -> dict[str, Strict]:
        """Return the block's objects that have an effect and are no dimensions, by key."""
        acts = {"pipeline": self.pipeline.waitless, "memory": self.memory.planned}
        parts = {name: getattr(self, name) for name in (*acts, "publish", "gathered", "generate")}
        return {name: part for name, part in parts.items() if part and acts.get(name, True)}

    @property
    def explicit(self) -> frozenset[Dimension]:
        """Return the dimensions that the user wrote, without those from the preset only."""
        return self._explicit

    @property
    def planned(self) -> planned.Planned | None:
        """Return the plan from which this block was made; None for any other preset."""
        return self._planned

    def keep_native(self, dimensions: Iterable[Dimension]) -> None:
        """Make ``dimensions``, which the job cannot encode, native; all ranks pass the same."""
        self._native |= frozenset(dimensions)

    @property
    def kept_native(self) -> frozenset[Dimension]:
        """Return the dimensions of all ``keep_native`` calls; the user was told why."""
        return self._native

    def error_feedback(self, dimension: Dimension) -> bool:
        settings: DimensionConfig = getattr(self, dimension)
        return settings.feeds_back and dimension not in self._native

    def measured(self) -> tuple[Dimension, ...]:
        """Return the dimensions that turn themselves off if the link is faster than their codec."""
        return tuple(name for name in MEASURED if self._when(name) == "auto")

    def insists(self, dimension: Dimension) -> bool:
        """Return whether the user, not only the preset, asked to measure ``dimension``."""
        return dimension in self.measured() and "auto" in (getattr(self, dimension).when, self.when)

    def _when(self, dimension: Dimension) -> Literal["always", "auto"]:
        settings: MeasuredConfig = getattr(self, dimension)
        if dimension in self._native:
            return "always"
        if settings.when is not None:
            return settings.when
        codecs = [codec for (name, _), codec in self.codecs().items() if name == dimension]
        if not any(codec and not codec.gradients_only for codec in codecs):
            return "always"
        return self.when or ("auto" if self.preset in MEASURING else "always")

    def limits(self) -> dict[Dimension, Limits]:
        """Return the limits that the guard checks, by dimension; none without samples."""
        if not self.ledger.sample_every:
            return {}
        every: dict[Dimension, Limits] = {n: getattr(self, n).limits() for n in DIMENSIONS}
        return {n: found for n, found in every.items() if found.any and n not in self._native}

    def policy(self) -> Policy:
        """Build the policy: codecs and ramps by dimension and direction, and the start step."""
        return Policy(self.codecs(), self.min_bytes, self.start_step, self.ramps())

    def active(self, dimension: Dimension) -> bool:
        """Return whether ``dimension`` has a codec in any direction, or an effect without one."""
        settings: DimensionConfig = getattr(self, dimension)
        codecs = self.codecs().items()
        return settings.acts or any(codec for (name, _), codec in codecs if name == dimension)

    def flat(self) -> dict[str, Any]:
        """Return the settings on which the ranks of a job have to agree, by dotted key.

        The settings do not depend on key order, shorthand or preset; of ``ledger`` they include
        only how often it reports and samples.
        """
        settings: dict[str, Any] = {
            f"{BLOCK}.{name}.{direction}": codec.spec if codec else NONE
            for (name, direction), codec in self.codecs().items()
            # quiet dimensions without a codec add nothing, so that older digests stay valid
            if (not ROWS[name].is_quiet or self.active(name))
            and (codec or direction not in ROWS[name].apart)
        }
        settings |= {
            f"{BLOCK}.{name}.{key}": value
            for name in DIMENSIONS
            for key, value in getattr(self, name).agreed().items()
        }
        settings.update({f"{BLOCK}.{name}.when": self._when(name) for name in MEASURED})
        if not self.remember:  # a job that remembers verdicts announces its messages
            settings[f"{BLOCK}.remember"] = False
        # ranks must agree, because a report is a collective
        settings[f"{BLOCK}.ledger.every"] = self.ledger.every
        for name, part in self.others.items():
            settings |= {f"{BLOCK}.{name}.{key}": value for key, value in part.agreed().items()}
        for key in ("enabled", "min_bytes", "start_step", "on_unsupported"):
            settings[f"{BLOCK}.{key}"] = getattr(self, key)
        settings[f"{BLOCK}.hierarchy"] = self.widths
        for level, codec in enumerate(self.level_codecs):
            if codec is not None:
                settings[f"{BLOCK}.hierarchy.{level}"] = codec.spec
        if self._planned is not None:
            settings[f"{BLOCK}.plan"] = dict(self._planned.layout)
        for (name, direction), rungs in self.ramps().items():
            levels = [[rung.stop, rung.codec.spec] for rung in rungs]
            settings[f"{BLOCK}.{name}.{direction}.ramp"] = levels
        for name, limits in self.limits().items():
            settings[f"{BLOCK}.{name}.guard"] = [limits.error, limits.residual]
            settings[f"{BLOCK}.ledger.sample_every"] = self.ledger.sample_every
        for name in sorted(self._named()):
            if (origin := CODECS.origin(name)) is not None:
                # a codec of another package counts with its version
                settings[f"{BLOCK}.codec.{name}"] = origin
        return settings

    def _named(self) -> set[str]:
        ways = (getattr(self, name).settings(way) for name, way in self.codecs())
        return {settings["codec"] for settings in ways if "codec" in settings}

    def digest(self) -> str:
        """Return the SHA-256 of ``flat()`` as 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.flat(), sort_keys=True).encode()).hexdigest()

    def ramps(self) -> dict[tuple[Dimension, Direction], tuple[Rung, ...]]:
        ways = {key: getattr(self, key[0]).rungs_of(key[1]) for key in self.codecs()
                if key[0] not in self._native}  # fmt: skip
        return {key: rungs for key, rungs in ways.items() if rungs}

    def codecs(self) -> dict[tuple[Dimension, Direction], Codec | None]:
        """Build the codecs, by dimension and direction; None for native."""
        return {
            (name, way): None if name in self._native else getattr(self, name).codec_of(way)
            for name in DIMENSIONS
            for way in ROWS[name].directions
        }
