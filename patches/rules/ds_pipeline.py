"""Check the block's key ``pipeline`` against the precision and ZeRO settings of a ds_config."""

from __future__ import annotations

from dataclasses import dataclass

from hybridcomp.config import BLOCK
from hybridcomp.config.async_pipeline import AsyncPipelineConfig
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.patches.rules.ds_job import DeepSpeedJob

#: the block's key, for messages
KEY = f"{BLOCK}.pipeline.versions"


@dataclass(frozen=True)
class Stages:
    """A pipeline's stages, with the facts that decide whether they can run without a flush.

    tied: whether layers of two stages share a weight. dynamic_shape: whether message sizes vary.
    tensor: tensor-parallel ranks of a stage. micro_batches: per step; None: unknown.
    """

    count: int
    tied: bool = False
    dynamic_shape: bool = False
    tensor: int = 1
    micro_batches: int | None = None


def check(settings: AsyncPipelineConfig, job: DeepSpeedJob, stages: Stages | None = None) -> None:
    """Raise ConfigError for a job whose ds_config shows that its pipeline needs a flush.

    ``stages``: the pipeline's stages, if known from the configuration.
    """
    if not settings.waitless:
        return
    if job.pipeline is False:
        raise no_schedule(settings)
    if stages is not None:
        check_stages(settings, stages)
    check_precision(settings, fp16=job.fp16, bf16=job.bf16, stage=job.stage)


def check_precision(settings: AsyncPipelineConfig, *, fp16: bool, bf16: bool, stage: int) -> None:
    """Raise ConfigError for a precision or ZeRO ``stage`` with which ``settings`` cannot act."""
    if fp16:
        todo = "all stages would have to agree on every loss scale; use bf16"
        raise ConfigError(KEY, Shown("fp16"), f"{todo}, or set pipeline.versions to flush")
    if settings.correction in ("pipemare", "spike") and (bf16 or stage):
        todo = "it moves the optimizer's own weights: train in fp32 with ZeRO stage 0"
        raise ConfigError(f"{BLOCK}.pipeline.correction", settings.correction, todo)


def check_stages(settings: AsyncPipelineConfig, stages: Stages) -> None:
    """Raise ConfigError, naming the key, if the stages need a flush."""
    found = None
    if stages.count < 2:
        found, todo = "one stage", "there is no pipeline; remove it"
    elif stages.tied:
        found, todo = "tied layers", "their stages wait for each other in every step; untie them"
    elif stages.dynamic_shape:
        found, todo = "dynamic_shape", "messages are received ahead; make shapes equal"
    elif stages.tensor > 1:
        found, todo = "tensor parallel stages", "its messages are not posted; use one rank a stage"
    if found is not None:
        raise ConfigError(KEY, Shown(found), f"{todo}, or set pipeline.versions to flush")
    check_micro_batches(settings, stages)


def check_micro_batches(settings: AsyncPipelineConfig, stages: Stages) -> None:
    """Raise ConfigError if two weight versions are not enough for this number of stages."""
    least, found = (stages.count - 1) * (1 + settings.slack), stages.micro_batches
    if settings.versions == 2 and found is not None and found < least:
        need = f"{stages.count} stages need gradient_accumulation_steps of at least {least}"
        raise ConfigError(KEY, Shown(f"2 with {found} micro-batches"), f'{need}, or "stash"')


def no_schedule(settings: AsyncPipelineConfig) -> ConfigError:
    """Return the error for a model that does not run the schedule of a PipelineModule."""
    todo = "only a PipelineModule's own schedule goes on without a flush; remove it"
    return ConfigError(KEY, settings.versions, todo)
