"""Read the configuration file of a job: its block, its kind, and facts of the job.

``hybridcomp validate`` and ``hybridcomp pays`` read users' files here: a ds_config.json, a GPT-NeoX
configuration (with the block in ``deepspeed_extra_args``), a file of Accelerate, or a bare block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from hybridcomp.codecs.words import DTYPES
from hybridcomp.config import BLOCK, CompressionConfig, other_names, read_source
from hybridcomp.config.error_messages import Shown, near_key, show
from hybridcomp.dimensions import BETWEEN_RANKS, DIMENSIONS, Dimension
from hybridcomp.errors import ConfigError
from hybridcomp.patches.ds import settings as by_deepspeed
from hybridcomp.patches.rules import accelerate, neox
from hybridcomp.patches.rules.ds_job import DeepSpeedJob
from hybridcomp.patches.rules.ds_settings import AUTO, KNOWN, parsed, removed
from hybridcomp.tools.plan.bits_between import JobTraffic

Whose = Literal["block", "deepspeed", "neox", "accelerate"]
ACCUMULATION = "gradient_accumulation_steps"
#: how to add a block to a file that has none
ADD: Mapping[Whose, str] = {
    "deepspeed": f'add "{BLOCK}": {{"preset": "recommended"}} to compress',
    "neox": f'add "{neox.EXTRA}": {{"{BLOCK}": {{"preset": "recommended"}}}} to compress',
    "accelerate": f'to compress, add "{BLOCK}": {{"preset": "recommended"}} to the JSON file that '
    f"{accelerate.FILE} names, or write a file of its own that HYBRIDCOMP_CONFIG names",
}
#: DeepSpeed's top-level keys that decide what is compressed; DeepSpeed ignores unknown keys
DECIDING = (
    "zero_optimization", "bf16", "fp16", ACCUMULATION, "train_batch_size",
    "train_micro_batch_size_per_gpu", "tensor_parallel", "sequence_parallel_size", neox.EXTRA,
)  # fmt: skip
#: keys of DeepSpeed that look like misspelt keys of ``DECIDING``
OTHERS = ("gradient_accumulation_dtype", "bfloat16", "train_micro_batch_size")


@dataclass(frozen=True)
class JobFile:
    """A parsed configuration file of a job.

    whole: the whole file; ``-`` in GPT-NeoX's keys becomes ``_``. settings: the part that DeepSpeed
    gets, with values as DeepSpeed parses them; for a bare block, ``{"compression": ...}``. notes:
    what to tell the user about the file.
    """

    whose: Whose
    whole: Mapping[str, Any]
    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @cached_property
    def job(self) -> DeepSpeedJob:
        """Return the settings in the form that rules read."""
        return DeepSpeedJob(self.settings)

    @property
    def dtype(self) -> str | None:
        """Return the messages' dtype: "bf16", "fp16", "fp32"; None if "auto" leaves it open."""
        sections = [self.whole.get(name) for name in ("bf16", "fp16")]
        filled_in = any(
            isinstance(section, dict) and section.get("enabled") == AUTO for section in sections
        )
        return None if filled_in and self.job.dtype == "fp32" else self.job.dtype

    @property
    def is_job(self) -> bool:
        """Return whether the file holds settings of a job, not a bare block or something else."""
        return not set(DECIDING).isdisjoint(self.whole)

    @property
    def accumulation(self) -> int | None:
        """Return the micro-batches of a step; None if the file does not say."""
        return self._count(ACCUMULATION)

    @property
    def replicas(self) -> int | None:
        """Return the number of replicas of the model; None if the batch sizes do not say."""
        samples = self._samples
        if samples is None or self.accumulation is None:
            return None
        return max(1, samples // self.accumulation)

    @property
    def _samples(self) -> int | None:
        """Return the micro-batches of a step of all replicas; None if the file does not say."""
        whole, own = self._count("train_batch_size"), self._count("train_micro_batch_size_per_gpu")
        return None if whole is None or own is None else whole // own

    @property
    def leaves_accumulation(self) -> bool:
        """Return whether DeepSpeed computes the micro-batches of a step from the ranks."""
        return self._samples is not None and self.accumulation is None

    def among(self, replicas: int) -> JobFile:
        """Return this file with the micro-batches that DeepSpeed computes for ``replicas``."""
        if self._samples is None or not self.leaves_accumulation:
            return self
        steps = max(1, self._samples // replicas)
        return replace(self, settings={**self.settings, ACCUMULATION: steps})

    def traffic(self) -> JobTraffic:
        """Return the facts that bits between nodes depend on; bf16 if the dtype is open."""
        job, dtype = self.job, DTYPES[self.dtype or "bf16"]
        return JobTraffic(
            job.stage, dtype, DTYPES.get(job.summed_dtype or "", dtype), self.accumulation or 1,
            copy="native" if job.zero("zero_hpz_partition_size", 1) > 1 else "none",
            reduced_whole=job.bf16_optimizer,
        )  # fmt: skip

    def _count(self, name: str) -> int | None:
        found: int | None = self.job.get(name)
        return found

    @property
    def shown(self) -> frozenset[Dimension]:
        """Return the dimensions of parallelism that the file shows.

        A DeepSpeed file hardly shows pipelines, experts and tensor parallelism, which the model's
        code sets.
        """
        if self.whose == "block":
            return frozenset(BETWEEN_RANKS)
        job = self.job
        facts = neox.facts(self.whole) if self.whose == "neox" else {}
        there: dict[Dimension, bool] = {
            "dp": True,
            "zero": job.stage > 0,
            "tp": bool(facts.get("tensor")) or job.tensor_parallel > 1,
            "pp": neox.stages(self.whole) > 1,
            "ep": bool(facts.get("moe")) or bool(job.get("expert_parallel.enabled")),
            "cp": job.sequence_parallel > 1,
        }
        return frozenset(name for name, is_there in there.items() if is_there)

    def dimensions(self, block: CompressionConfig) -> frozenset[Dimension]:
        """Return the dimensions of parallelism that the file shows, or that the block names."""
        return self.shown | block.explicit


def read_job_file(path: str | Path) -> JobFile:
    """Read a file. Raises ConfigError, in one line, for settings that would have no effect.

    So it does for a trainer's file (Axolotl, LLaMA-Factory) that names a DeepSpeed file. Settings
    without effect are a block where its engine does not look for one, and a misspelt top-level key
    of DeepSpeed.
    """
    source = read_source(Path(path))
    keys = {str(key).replace("-", "_"): value for key, value in source.items()}
    if neox.EXTRA in keys or neox.has_keys(keys) or _is_yaml(path):
        source = keys
    if accelerate.has_keys(source):
        accelerate.refuse_block(source, BLOCK)
        settings = accelerate.ds_settings(source)
        _refuse_elsewhere(settings)
        return _of_owner("accelerate", settings, settings)
    if isinstance(source.get("deepspeed"), str):
        todo = "a trainer's file; give the DeepSpeed file that it names, where the block belongs"
        raise ConfigError("deepspeed", show(source["deepspeed"]), todo)
    if _is_bare(source):
        return JobFile("block", source, {BLOCK: source})
    _refuse_misspelt(source)
    if neox.has_keys(source) or _is_yaml(path):
        _refuse_at_the_top(source)
    if BLOCK not in source and neox.EXTRA in source:
        extra = source[neox.EXTRA]
        if not isinstance(extra, Mapping):
            raise ConfigError(neox.EXTRA, show(extra), "expected an object")
        return _of_owner("neox", source, neox.ds_settings(source))
    _refuse_elsewhere(source)
    if BLOCK not in source and neox.has_keys(source):
        return _of_owner("neox", source, neox.ds_settings(source))
    return _of_owner("deepspeed", source, source)


def _of_owner(whose: Whose, whole: Mapping[str, Any], settings: Mapping[str, Any]) -> JobFile:
    """Read ``settings`` with DeepSpeed's own parser, or with our table if DeepSpeed is missing."""
    found = by_deepspeed.of_file(settings)
    parsed(settings)  # refuse what DeepSpeed silently accepts but cannot use
    if found is not None:
        return JobFile(whose, whole, found)
    notes = [f"DeepSpeed is not installed here: the file is read as {KNOWN} reads it"]
    for key in removed(settings):
        notes.append(f"{key}: DeepSpeed {KNOWN} has removed this key, and refuses it; remove it")
    return JobFile(whose, whole, settings, tuple(notes))


def _refuse_at_the_top(source: Mapping[str, Any]) -> None:
    if BLOCK in source:
        raise ConfigError(
            BLOCK, Shown("a block at the top of a GPT-NeoX or YAML file"),
            f'GPT-NeoX hands on to DeepSpeed what stands in "{neox.EXTRA}", and DeepSpeed reads no '
            f'YAML; move it to {neox.EXTRA}.{BLOCK}',
        )  # fmt: skip


def _refuse_misspelt(source: Mapping[str, Any]) -> None:
    """Raise ConfigError for a misspelt key or one of the block, which DeepSpeed would ignore."""
    for key in ("preset", *DIMENSIONS):
        if key in source:
            todo = f'DeepSpeed ignores it here; put it into "{BLOCK}"'
            raise ConfigError(key, show(source[key]), todo)
    unknown = [key for key in source if key not in (*DECIDING, *OTHERS)]
    for wanted in DECIDING:
        near = near_key(unknown, wanted) if wanted not in source else None
        if near is not None:
            todo = f"DeepSpeed ignores a key that it does not know; did you mean {wanted!r}?"
            raise ConfigError(near, show(source[near]), todo)


def _refuse_elsewhere(source: Mapping[str, Any], path: str = "") -> None:
    """Raise ConfigError for a block inside a key that no engine searches for blocks."""
    for key, value in source.items():
        if not isinstance(value, Mapping):
            continue
        if key == BLOCK and path:
            raise ConfigError(
                f"{path}{key}", "a block where nothing reads it",
                f"expected it at the top level of the file (GPT-NeoX: in {neox.EXTRA!r}); move it "
                "there",
            )  # fmt: skip
        _refuse_elsewhere(value, f"{path}{key}.")


def _is_bare(source: Mapping[str, Any]) -> bool:
    """Return whether a file holds a bare block: keys of it (one, pipeline, is DeepSpeed's too)."""
    if not {BLOCK, *other_names.DEEPSPEED}.isdisjoint(source):
        return False
    return not CompressionConfig.model_fields.keys().isdisjoint(source)


def _is_yaml(path: str | Path) -> bool:
    return Path(path).suffix in (".yml", ".yaml")
