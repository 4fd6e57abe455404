"""Rules for DeepSpeed's optimizer offload, dimension ``offload``: a table like ``ds``."""

from __future__ import annotations

from typing import Any

from hybridcomp.config import CompressionConfig
from hybridcomp.dimensions import DIRECTIONS
from hybridcomp.patches.rules.ds_job import DeepSpeedJob
from hybridcomp.patches.rules.engine import Rule

#: buffers that one sub-group needs, and DeepSpeed's default number of buffers
STATES_AND_GRADIENT = 4


def _offload(job: DeepSpeedJob, key: str, default: Any = None) -> Any:
    """Return a key of zero_optimization.offload_optimizer."""
    return job.zero(f"offload_optimizer.{key}", default)


def _copies(block: CompressionConfig) -> bool:
    """Return whether copies between device and host have a codec."""
    return any(block.codecs()["offload", way] is not None for way in DIRECTIONS)


def _states(block: CompressionConfig) -> bool:
    """Return whether files of optimizer states have a codec."""
    return block.codecs()["offload", "states"] is not None


def buffers_needed(job: DeepSpeedJob) -> int:
    """Return how many pinned buffers DeepSpeed's swapper needs for a step of Adam.

    A sub-group needs buffers for three states and a gradient. Besides the sub-group that steps, one
    more may be read meanwhile (pipeline_read), and one written (pipeline_write).
    """
    beside = bool(_offload(job, "pipeline_read")) + bool(_offload(job, "pipeline_write"))
    return STATES_AND_GRADIENT * (1 + beside)


def _to_device(block: CompressionConfig) -> bool:
    return block.codecs()["offload", "forward"] is not None


RULES: tuple[Rule[DeepSpeedJob], ...] = (
    Rule(
        "refuse", ("offload",), '"zero_optimization.zenflow"',
        "ZenFlow copies selected gradients and parameters on paths of its own", "remove zenflow",
        lambda job: job.stage > 0 and job.zero("zenflow") is not None,
    ),
    Rule(
        "absent", ("offload",), "a job without optimizer offload",
        "nothing is copied between device and host",
        'set zero_optimization.offload_optimizer to {"device": "cpu"}',
        lambda job: job.stage == 0 or not job.cpu_offload,
    ),
    Rule(
        "bypass", ("offload",), '"zero_optimization.offload_optimizer.device": "nvme"',
        "optimizer states and gradients go on to NVMe in buffers of DeepSpeed's swapper",
        'set the device to "cpu", or encode "states" alone',
        lambda job: job.stage > 0 and _offload(job, "device") == "nvme", settings=_copies,
        is_part=True,
    ),
    Rule(
        "bypass", ("offload",), '"states" without "offload_optimizer.device": "nvme" at ZeRO 3',
        "only ZeRO 3 keeps optimizer states in files, and on NVMe alone",
        "set stage 3, the device and nvme_path, or remove states",
        lambda job: job.cpu_offload and (job.stage < 3 or _offload(job, "device") != "nvme"),
        settings=_states, is_part=True,
    ),
    Rule(
        "note", ("offload",), '"pipeline_read" or "pipeline_write" with too small a "buffer_count"',
        "DeepSpeed stops at the first step of a model with several sub-groups; set 8 for one of "
        "them, 12 for both", "",
        lambda job: job.stage == 3 and _offload(job, "device") == "nvme"
        and _offload(job, "buffer_count", STATES_AND_GRADIENT) < buffers_needed(job),
        settings=_states,
    ),
    Rule(
        "refuse", ("offload",), '"aio.use_gds": true with "states"',
        "GPUDirect Storage moves files between drive and GPU, past the host that encodes them",
        "remove use_gds", lambda job: bool(job.get("aio.use_gds", False)), settings=_states,
    ),
    Rule(
        "bypass", ("offload",), '"zero_optimization.offload_optimizer.super_offload": true',
        "SuperOffload copies gradients and parameters on paths of its own", "remove super_offload",
        lambda job: job.stage == 3 and job.cpu_offload and bool(_offload(job, "super_offload")),
    ),
    Rule(
        "bypass", ("offload",), '"zero_optimization.offload_param" beside offload_optimizer',
        "updated parameters stay on the host, and are copied when a layer is fetched, on a path "
        "that no seam covers", 'remove offload_param, set "offload": {"forward": "none", ...}',
        lambda job: job.stage == 3 and job.cpu_offload
        and job.zero("offload_param.device", "none") != "none",
        settings=_to_device, is_part=True,
    ),
    Rule(
        "bypass", ("offload",), '"compile.deepcompile": true',
        "compiled code copies gradients in C++, where no seam reaches",
        "set compile.deepcompile to false", lambda job: job.compiled and job.cpu_offload,
        is_part=True,
    ),
)  # fmt: skip
