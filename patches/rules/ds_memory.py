"""Check the block's key ``memory`` against the ZeRO settings of a ds_config."""

from __future__ import annotations

from hybridcomp.config import BLOCK
from hybridcomp.config.error_messages import Shown
from hybridcomp.config.memory_policy import MemoryPolicy
from hybridcomp.errors import ConfigError
from hybridcomp.patches.rules.ds_job import DeepSpeedJob


def check(settings: MemoryPolicy, job: DeepSpeedJob) -> None:
    """Raise ConfigError if the job does not gather parameters as a plan assumes."""
    if not settings.planned:
        return
    offload = job.zero("offload_optimizer.device", "none")
    reasons = (
        (job.stage != 3, f"ZeRO stage {job.stage}",
         "nothing to plan: below stage 3 every copy is of one flat buffer; use stage 3"),
        (job.zero("zenflow") is not None, "zenflow", "it gathers on paths of its own; remove it"),
        (bool(job.zero("offload_optimizer.super_offload")), "super_offload",
         "it moves states on paths of its own; remove it"),
        (job.compiled, "compile.deepcompile", "compiled code gathers by a schedule of its own"),
        (job.zero("zero_hpz_partition_size") > 1, "zero_hpz_partition_size",
         "its gathers are of two kinds; remove it"),
        (job.zero("offload_param.device", "none") == "nvme", "offload_param to nvme",
         "reads from the drive stop the prefetch; offload parameters to the cpu"),
    )  # fmt: skip
    for applies, found, todo in reasons:
        if applies:
            todo = f'{todo}, or set memory.policy to "static"'
            raise ConfigError(f"{BLOCK}.memory.policy", Shown(found), todo)
    if settings.host_gb is not None and offload != "nvme":
        todo = "states go to files with offload_optimizer.device nvme only; remove it"
        raise ConfigError(f"{BLOCK}.memory.host_gb", settings.host_gb, todo)
