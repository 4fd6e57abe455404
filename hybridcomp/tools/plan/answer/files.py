"""Write the files that start a plan: its engine's configuration and the launcher's command.

``deepspeed``  ``ds_config.json``: batch, ZeRO stage, dtype, offload and the block, over the user's
               file (``--base``), whose optimizer and schedule stay.
``megatron``   ``megatron_args.txt`` for pretrain_*.py, and ``compression.json`` for
               ``HYBRIDCOMP_CONFIG``.
``neox``       ``neox.yml``, over the user's file (``--base``).
``fsdp2``      ``sharding.py`` with the calls of ``fully_shard``, ``fsdp2.json`` with the batch as
               DeepSpeed writes it, and ``compression.json``.

Every engine also gets ``plan.json``, which the block names, and ``start.sh``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridcomp import escaping
from hybridcomp.config import BLOCK
from hybridcomp.config.planned import PLANNED
from hybridcomp.errors import ConfigError, HybridcompError
from hybridcomp.patches.rules.ds_offload import STATES_AND_GRADIENT
from hybridcomp.patches.rules.neox import EXTRA
from hybridcomp.tools.plan.answer import fully_shard
from hybridcomp.tools.plan.answer.base import Base
from hybridcomp.tools.plan.answer.fully_shard import MODULE
from hybridcomp.tools.plan.answer.start_command import (
    BESIDE,
    BLOCK_FILE,
    CONFIGS,
    blocks,
    filled,
    general,
    nvme_path,
    write_script,
)
from hybridcomp.tools.plan.cost.copies import FP32, STATES
from hybridcomp.tools.plan.engines import (
    RECOMPUTE_REASONS,
    block_chunks,
    can_recompute,
    first_blocks,
    interval_segments,
)
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.plan import Plan

#: pinned buffers of a sub-group's length, for reading and writing during the step; DeepSpeed's
#: default has too few for either
BUFFERS = 3 * STATES_AND_GRADIENT
#: keys of ZeRO 3 in the order of ``Layout.knobs``
KNOBS = (
    "stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance",
)  # fmt: skip
PLAN_FILE, START_FILE = "plan.json", "start.sh"


def write(
    plan: Plan,
    cluster: Cluster,
    folder: Path,
    base: Base | None = None,
    command: Sequence[str] = (),
    ledger: Path | None = None,
    before: Sequence[str] = (),
    port: int | None = None,
) -> list[Path]:
    """Write everything that starts ``plan`` into ``folder``; return the files written.

    Args:
        base: the user's configuration of the engine; the plan's settings replace those in it.
        command: the user's command with places to fill in (``filled``); empty: ``general``.
        ledger: where the run writes its ledger; None: as the user's block says.
        before: lines of ``start.sh`` above the command.
        port: of a job that shares the cluster with others (``general``).
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / PLAN_FILE).resolve()
    plan.write(path)
    config = folder / CONFIGS[plan.engine]
    block: dict[str, Any] = {**_kept(base or {}), "preset": PLANNED, "plan": str(path)}
    if plan.layout.knobs:  # the run searches this again, on the trace that DeepSpeed records
        gathered = plan.prediction.memory["gathered"] / 1e9
        block["memory"] = {
            "policy": "planned",
            **({"device_gb": gathered} if cluster.on_cpu else {}),
            **_host_room(plan, cluster),
        }
    if ledger is not None:
        block["ledger"] = {**block.get("ledger", {}), "jsonl": str(ledger)}
    written = [path, config]
    if port is not None and plan.engine == "neox":  # its own launcher reads the port there
        base = {**(base or {}), "master_port": port}
    config.write_text(_engines_file(plan, block, base or {}), encoding="utf-8")
    if plan.engine == "fsdp2":
        (folder / MODULE).write_text(fully_shard.module(plan), encoding="utf-8")
        written.append(folder / MODULE)
    if plan.engine in BESIDE:
        (folder / BLOCK_FILE).write_text(escaping.json_document(block), encoding="utf-8")
        written.append(folder / BLOCK_FILE)
    start = folder / START_FILE
    words = general(plan, cluster, folder, port)
    if command:
        words = filled(command, plan, cluster, folder)
    # the name comes from a config.json of somebody else: a line feed would end the comment
    why = f"# {plan.layout}, planned for {escaping.one_line(plan.model)}"
    write_script(start, [*before, why, f"exec {words}"])
    return [*written, start]


def _engines_file(plan: Plan, block: Mapping[str, Any], base: Base) -> str:
    """Return the engine's file (``CONFIGS``). Raises ConfigError where it cannot hold ``base``."""
    try:
        if plan.engine == "deepspeed":
            return escaping.json_document(ds_config(plan, block, base))
        if plan.engine == "fsdp2":
            return escaping.json_document(torch_config(plan, base))
        if plan.engine == "neox":
            return escaping.yaml_document(neox_config(plan, block, base))
    except ValueError as error:
        todo = f"expected settings that {CONFIGS[plan.engine]} can hold"
        raise ConfigError("--base", str(error), todo) from None
    return "\n".join(megatron_arguments(plan)) + "\n"


def _host_room(plan: Plan, cluster: Cluster) -> dict[str, float]:
    """Return the GB of optimizer states that a node's host keeps while the rest is on its drive."""
    if not plan.layout.drive:
        return {}
    ranks = min(cluster.ranks_per_node, plan.layout.ranks)
    own = 2 * FP32 if plan.dtype == "fp32" else 3 * FP32
    # as the policy counts; one byte more, since the policy sums sub-groups in whole bytes
    room = ranks * STATES * plan.prediction.memory["host"] / own
    return {"host_gb": (room + 1) / 1e9} if room else {}


def _kept(base: Base) -> dict[str, Any]:
    """Return the keys of the user's block that no plan decides."""
    own = base.get(BLOCK) or base.get(EXTRA, {}).get(BLOCK) or {}
    return {key: own[key] for key in ("ledger", "on_unsupported", "start_step") if key in own}


def ds_config(plan: Plan, block: Mapping[str, Any], base: Base) -> dict[str, Any]:
    """Return the DeepSpeed file: ``base`` with the plan's settings."""
    layout = plan.layout
    zero = {**base.get("zero_optimization", {}), "stage": layout.zero_stage}
    zero.pop("offload_optimizer", None)
    zero.pop("zero_hpz_partition_size", None)
    if layout.hpz > 1:
        zero["zero_hpz_partition_size"] = layout.hpz
    if layout.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if layout.ratio < 1:
        zero["offload_optimizer"]["ratio"] = layout.ratio
    if layout.drive:
        zero["offload_optimizer"] = {
            "device": "nvme", "nvme_path": nvme_path(base),
            "pipeline_read": True, "pipeline_write": True, "buffer_count": BUFFERS,
        }  # fmt: skip
    if layout.sub_group:
        zero["sub_group_size"] = layout.sub_group
    zero |= dict(zip(KNOBS, layout.knobs, strict=False))
    kept = {key: value for key, value in base.items() if key != "train_batch_size"}
    return {
        **kept,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation,
        "bf16": {**base.get("bf16", {}), "enabled": plan.dtype == "bf16"},
        "fp16": {**base.get("fp16", {}), "enabled": plan.dtype == "fp16"},
        "zero_optimization": zero,
        BLOCK: dict(block),
    }


def torch_config(plan: Plan, base: Base) -> dict[str, Any]:
    """Return the batch and the dtype of a script under FSDP2, over the user's own settings."""
    kept = {key: value for key, value in base.items() if key not in ("train_batch_size", BLOCK)}
    return {
        **kept,
        "train_micro_batch_size_per_gpu": plan.layout.micro_batch,
        "gradient_accumulation_steps": plan.layout.accumulation,
        "bf16": {"enabled": plan.dtype == "bf16"},
        "sharding": MODULE,
    }


def neox_config(plan: Plan, block: Mapping[str, Any], base: Base) -> dict[str, Any]:
    """Return the GPT-NeoX file, as JSON, which is YAML: ``base`` with the plan's settings.

    Raises HybridcompError where GPT-NeoX cannot recompute the plan's segments.
    """
    layout = plan.layout
    extra = {**base.get(EXTRA, {}), BLOCK: dict(block)}
    recompute: dict[str, Any] = {"checkpoint_activations": bool(layout.recompute)}
    if layout.recompute:
        recompute["checkpoint_num_layers"] = _interval(plan)
    kept = {key: value for key, value in base.items() if key != "train_batch_size"}
    return {
        **kept,
        "model_parallel_size": layout.tensor,
        "pipe_parallel_size": layout.stages,
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation,
        "zero_optimization": {**base.get("zero_optimization", {}), "stage": layout.zero_stage},
        "precision": {"bf16": "bfloat16"}.get(plan.dtype, plan.dtype),
        **recompute,
        EXTRA: extra,
    }


def megatron_arguments(plan: Plan) -> list[str]:
    """Return Megatron's own arguments, one option per line.

    The text has no quotes, since the shell would keep them in the words of ``$(cat FILE)``.
    """
    layout = plan.layout
    found = [
        f"--tensor-model-parallel-size {layout.tensor}",
        f"--pipeline-model-parallel-size {layout.stages}",
        f"--context-parallel-size {layout.context}",
        f"--expert-model-parallel-size {layout.expert}",
        f"--micro-batch-size {layout.micro_batch}",
        f"--global-batch-size {layout.samples}",
    ]
    chunks = layout.stages * layout.virtual
    if chunks > 1 and len(set(blocks(plan))) > 1:
        found.append(f"--pipeline-model-parallel-layout {_stages_of(plan)}")
    elif layout.virtual > 1:
        found.append(f"--num-virtual-stages-per-pipeline-rank {layout.virtual}")
    if layout.recompute:
        found += ["--recompute-granularity full", *_recomputed(plan)]
    switches = {
        "--sequence-parallel": layout.sequence,
        "--use-distributed-optimizer": layout.zero_stage > 0,
        "--optimizer-cpu-offload": layout.offload,
        "--bf16": plan.dtype == "bf16",
        "--fp16": plan.dtype == "fp16",
    }
    return [*found, *(name for name, on in switches.items() if on)]


def _interval(plan: Plan) -> int:
    """Return GPT-NeoX's ``checkpoint_num_layers``. Raises HybridcompError if no value fits."""
    asked, chunks = tuple(sorted(plan.layout.recompute)), block_chunks(plan.layout, plan.repeated)
    for length in range(1, max(map(len, chunks)) + 1):
        if asked == interval_segments(chunks, length):
            return length
    raise _cannot(plan)


def _cannot(plan: Plan) -> HybridcompError:
    """Return the error of an engine that cannot recompute the plan's segments."""
    asked, reason = list(plan.layout.recompute), RECOMPUTE_REASONS[plan.engine]
    return HybridcompError(f"recompute {asked}: {reason}; fix recompute so, or plan again")


def _stages_of(plan: Plan) -> str:
    """Write uneven chunks as Megatron's layout string: ``Ettt|tttt|ttL``."""
    parts = ["t" * count for count in blocks(plan)]
    parts[0], parts[-1] = "E" + parts[0], parts[-1] + "L"
    return "|".join(parts)


def _recomputed(plan: Plan) -> list[str]:
    """Return Megatron's options of recomputation: first blocks of each chunk, or all in segments.

    Raises HybridcompError where the plan has other segments.
    """
    layout = plan.layout
    asked, chunks = tuple(sorted(layout.recompute)), block_chunks(layout, plan.repeated)
    for count in range(1, max(map(len, chunks)) + 1):
        if asked == first_blocks(chunks, count):
            return ["--recompute-method block", f"--recompute-num-layers {count}"]
    if not can_recompute(plan.engine, layout, plan.repeated):
        raise _cannot(plan)
    most = max(stop - start for start, stop in asked)
    return ["--recompute-method uniform", f"--recompute-num-layers {most}"]
