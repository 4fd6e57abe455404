"""Check the block's key ``pipeline`` against what a ds_config says of precision and ZeRO."""

from __future__ import annotations

from hybridcomp.config import BLOCK
from hybridcomp.config.async_pipeline import AsyncPipelineConfig
from hybridcomp.config.error_messages import Shown
from hybridcomp.errors import ConfigError
from hybridcomp.patches.rules.ds_job import DeepSpeedJob

#: in messages
KEY = f"{BLOCK}.pipeline.versions"


def check(settings: AsyncPipelineConfig, job: DeepSpeedJob) -> None:
    """Raise ConfigError for a job whose file shows that it cannot go on without a flush."""
    if not settings.waitless:
        return
    if job.pipeline is False:
        raise no_schedule(settings)
    fp16 = bool(job.get("fp16.enabled", False))
    check_precision(settings, fp16=fp16, bf16=job.bf16, stage=job.stage)


def check_precision(settings: AsyncPipelineConfig, *, fp16: bool, bf16: bool, stage: int) -> None:
    """Raise ConfigError for a precision, or a ZeRO ``stage``, that ``settings`` do not go with."""
    if fp16:
        todo = "all stages would have to agree on every loss scale; use bf16"
        raise ConfigError(KEY, Shown("fp16"), f"{todo}, or set pipeline.versions to flush")
    if settings.correction in ("pipemare", "spike") and (bf16 or stage):
        todo = "it moves the optimizer's own weights: train in fp32 with ZeRO stage 0"
        raise ConfigError(f"{BLOCK}.pipeline.correction", settings.correction, todo)


def no_schedule(settings: AsyncPipelineConfig) -> ConfigError:
    """Return the error for a model that is no PipelineModule with a schedule of its own."""
    todo = "only a PipelineModule's own schedule goes on without a flush; remove it"
    return ConfigError(KEY, settings.versions, todo)
