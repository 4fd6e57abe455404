"""Write the command that starts a plan: a launcher's, or the user's with placeholders filled in."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridcomp import escaping
from hybridcomp.tools.compare.launch import fill
from hybridcomp.tools.plan.answer.fully_shard import HOW, MODULE
from hybridcomp.tools.plan.engines import block_chunks
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.plan import Plan

CONFIGS = {
    "deepspeed": "ds_config.json", "megatron": "megatron_args.txt", "neox": "neox.yml",
    "fsdp2": "fsdp2.json",
}  # fmt: skip
BLOCK_FILE = "compression.json"
#: engines whose files hold no block: it is in ``BLOCK_FILE``
BESIDE = ("megatron", "fsdp2")
#: the launcher's port if no free port is searched for: torch's default
PORT = "29500"
#: address at which nodes meet: without it torchrun takes each node for the first
FIRST = "${HOST:?start on every node with HOST=, the first}"
MEETING = f' --rdzv-backend c10d --rdzv-endpoint "{FIRST}:%s"'
#: placeholder where the user has not named the script to start
SCRIPT = "SCRIPT"
#: folder of the drive, if the user's own file names no folder
NVME_PATH = "/local_nvme"


def write_script(path: Path, lines: Sequence[str]) -> None:
    """Write an executable shell script; paths that are not UTF-8 keep their bytes."""
    text = "\n".join(["#!/bin/sh", *lines, ""])
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    path.chmod(0o755)


def blocks(plan: Plan) -> tuple[int, ...]:
    """Return the number of blocks of each chunk, without embedding and head of a decoder."""
    return tuple(map(len, block_chunks(plan.layout, plan.repeated))) if plan.layout.cuts else ()


def recomputed_blocks(plan: Plan) -> list[str]:
    """Return the recomputed blocks, counted from 0: ``3``, or ``3-5`` for one segment."""
    first, found = plan.repeated.start, []
    for start, stop in sorted(plan.layout.recompute):
        inside = [layer - first for layer in range(start, stop) if layer in plan.repeated]
        if inside:
            found.append("-".join(map(str, dict.fromkeys((inside[0], inside[-1])))))
    return found


def nodes_of(plan: Plan, cluster: Cluster) -> int:
    """Return the number of nodes that the ranks of ``plan`` fill."""
    return cluster.nodes_of(range(min(plan.layout.ranks, cluster.world_size)))


def general(plan: Plan, cluster: Cluster, folder: Path, port: int | None = None) -> str:
    """Return the command that starts ``plan``, with a placeholder for the user's script.

    ``port``: of a job that shares the cluster with others. torch's launcher starts it, since
    DeepSpeed's takes the first nodes of its hostfile, and beside ``--num_gpus`` the first devices
    of a node, whatever ``CUDA_VISIBLE_DEVICES`` says.
    """
    config = shlex.quote(str((folder / CONFIGS[plan.engine]).resolve()))
    nodes, per_node = nodes_of(plan, cluster), min(cluster.ranks_per_node, plan.layout.ranks)
    if plan.engine == "neox":
        return f'"${{PYTHON:-python}}" -m hybridcomp.patches.neox {config}'
    launcher = f"torchrun --nnodes {nodes} --nproc-per-node {per_node}"
    if nodes > 1:
        launcher += MEETING % (port or PORT)
    elif port is not None:
        launcher += f" --master-port {port}"
    launcher += f" -m hybridcomp.run {SCRIPT}"
    if plan.engine in BESIDE:
        block = shlex.quote(str((folder / BLOCK_FILE).resolve()))
        launcher += f" $(cat {config})" if plan.engine == "megatron" else ""
        return f'env HYBRIDCOMP_CONFIG={block} {launcher} "$@"'
    if port is not None:
        return f'{launcher} --deepspeed_config {config} "$@"'
    hosts = f"--num_nodes {nodes} " if nodes > 1 else ""
    launcher = f"deepspeed {hosts}--num_gpus {per_node} --module hybridcomp.run"
    return f'{launcher} {SCRIPT} --deepspeed_config {config} "$@"'


def left_to_script(plan: Plan, command: Sequence[str]) -> str:
    """Name settings that neither the engine's file nor ``command`` holds; "" for none.

    DeepSpeed's file holds no parallel degree and no layer to recompute: the script sets these.
    """
    if plan.engine not in ("deepspeed", "fsdp2"):
        return ""
    layout, text = plan.layout, " ".join(command)
    wanted = {
        "tensor": layout.tensor > 1, "stages": layout.stages > 1, "context": layout.context > 1,
        "expert": layout.expert > 1, "recompute": bool(layout.recompute),
        "mesh": layout.mesh > 1, "slices": bool(layout.slices),
        "cuts": len(set(blocks(plan))) > 1,
    }  # fmt: skip
    left = [name for name, on in wanted.items() if on and f"{{{name}}}" not in text]
    if "{layers}" in text and "cuts" in left:
        left.remove("cuts")
    if not left:
        return ""
    shown = ", ".join(left)
    return (
        f"{CONFIGS[plan.engine]} does not say {shown} ({layout}): the script has to, see plan.json"
    )


def left_to_user(plan: Plan, command: Sequence[str], base: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each thing that the written files lack before a job can start."""
    if not command and plan.engine != "neox":
        yield (
            f"start.sh has {SCRIPT} in the place of your script: write its name there, or give "
            "plan the command behind --"
        )
    if plan.engine in BESIDE and command and "{block}" not in " ".join(command):
        yield (
            "the command names no {block}: nothing is compressed unless HYBRIDCOMP_CONFIG does; "
            "begin it with env HYBRIDCOMP_CONFIG={block}"
        )
    if plan.engine == "fsdp2" and not (command and "{config}" in " ".join(command)):
        yield f"your script has to call what {MODULE} has: {HOW}; fsdp2.json has the batch"
    if plan.engine == "deepspeed" and "optimizer" not in base:
        yield (
            'ds_config.json has no "optimizer": add it, unless the script hands one to '
            "deepspeed.initialize, or give plan your own file with --base FILE"
        )
    if plan.layout.drive and nvme_path(base) == NVME_PATH:
        yield (
            f'ds_config.json has "nvme_path": "{NVME_PATH}": name a folder of each node\'s drive, '
            "or give plan your own file with --base FILE"
        )


def nvme_path(base: Mapping[str, Any]) -> str:
    """Return the folder of a drive that the user's file names, else ``NVME_PATH``."""
    own = base.get("zero_optimization", {}).get("offload_optimizer") or {}
    return str(own.get("nvme_path") or NVME_PATH)


def places(plan: Plan, cluster: Cluster, folder: Path) -> dict[str, str]:
    """Map each placeholder of a user's command, a name in braces, to the plan's value."""
    layout = plan.layout
    names = ("tensor", "stages", "virtual", "data", "context", "expert", "zero_stage",
             "micro_batch", "accumulation", "mesh", "context_way")  # fmt: skip
    return {
        **{f"{{{name}}}": str(getattr(layout, name)) for name in names},
        "{cuts}": ",".join(map(str, blocks(plan))) if layout.stages > 1 else "none",
        "{slices}": ",".join(map(str, layout.slices)) or "none",
        "{layers}": ",".join(map(str, layout.cuts)),
        "{recompute}": ",".join(recomputed_blocks(plan)) or "none",
        "{ranks}": str(layout.ranks),
        "{nodes}": str(nodes_of(plan, cluster)),
        "{samples}": str(layout.samples),
        "{length}": str(plan.length),
        "{config}": str((folder / CONFIGS[plan.engine]).resolve()),
        "{block}": str((folder / BLOCK_FILE).resolve()),
    }


def filled(command: Sequence[str], plan: Plan, cluster: Cluster, folder: Path) -> str:
    """Fill ``{tensor}``, ``{config}`` and the other ``places`` of ``command`` in for ``plan``."""
    values = {**places(plan, cluster, folder), "{folder}": str(folder.resolve()), "{port}": PORT}
    return escaping.shell_words(fill(command, values))


def unknown_places(plan: Plan, command: Sequence[str], cluster: Cluster) -> str:
    """Name, in a sentence, words in braces in ``command`` that are no placeholder; "" if none."""
    known = [*places(plan, cluster, Path()), "{folder}", "{port}"]
    found = dict.fromkeys(re.findall(r"\{[a-z_]+\}", " ".join(command)))
    left = [place for place in found if place not in known]
    if not left:
        return ""
    return f"{', '.join(left)} in the command is left as it is; filled in are {', '.join(known)}"
