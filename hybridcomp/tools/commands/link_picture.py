"""Draw, for ``hybridcomp validate --picture``, what a job sends inside and between its nodes."""

from __future__ import annotations

from pathlib import Path

from hybridcomp.config import CompressionConfig
from hybridcomp.config.error_messages import Shown
from hybridcomp.dimensions import Dimension
from hybridcomp.errors import ConfigError, HybridcompError
from hybridcomp.tools import pages
from hybridcomp.tools.commands.job_files import JobFile
from hybridcomp.tools.commands.memory import JobSize, RanksOfReplica, split_of
from hybridcomp.tools.pages import links
from hybridcomp.tools.plan import crossing
from hybridcomp.tools.plan.pays import copy_of

OPTION = "--picture"


def write(path: Path, block: CompressionConfig, file: JobFile, job: JobSize | None) -> str:
    """Write the SVG and return a line that says so. Raises ConfigError, HybridcompError.

    The picture shows gradients and parameters that the ranks of one node send in an optimizer step.
    """
    if lacking := pages.missing("jinja2"):
        raise HybridcompError(f"{OPTION}: {lacking}")
    if job is None or job.ranks_per_node >= job.world_size:
        todo = "draws several nodes; add --parameters, --world-size and --ranks-per-node of them"
        raise ConfigError(OPTION, str(path), todo)
    native, sent = node_nbytes(block, file, job)
    rows = [
        links.LinkMB("Inside a node, such as NVLink", native.inside / 1e6, sent.inside / 1e6),
        links.LinkMB("Between nodes, such as Ethernet", native.between / 1e6, sent.between / 1e6),
    ]
    title = "MB that the ranks of a node send in a step"
    nodes = job.world_size // job.ranks_per_node
    path.write_text(links.draw(title, rows, nodes, job.ranks_per_node), encoding="utf-8")
    text = "; ".join(
        f"{row.name.partition(',')[0].lower()} {links.amount(row.block, row.native)} instead of "
        f"{links.amount(row.native, row.block)}" for row in rows
    )  # fmt: skip
    return f"  picture       {path}: a node's gradients and parameters of a step, {text}"


def node_nbytes(
    block: CompressionConfig, file: JobFile, job: JobSize
) -> tuple[crossing.LinkNbytes, crossing.LinkNbytes]:
    """Return the bytes a node sends in a step, natively and with the block. Raises ConfigError.

    ZeRO 2 and 3 reduce in every micro-batch; ZeRO 3 gathers before each forward and backward pass.
    Jobs with settings that send less, such as secondary copies, are refused.
    """
    if block.sync.acts:
        todo = "draws a job that reduces in every step; leave it out for islands"
        raise ConfigError(OPTION, "a block with sync", todo)
    copies = file.is_job and (copy_of(block) or file.traffic().copy) != "none"
    if file.job.stage >= 2 and (copies or block.dp.accumulate == "node"):
        todo = "draws jobs whose micro-batches all cross nodes; leave it out: bits are printed"
        found = "secondary copies" if copies else '"dp.accumulate": "node"'
        raise ConfigError(OPTION, Shown(found), todo)
    split = split_of(file, job)
    ranks = RanksOfReplica(
        block, file, -(-job.parameters // split), job.world_size // split, job
    )  # fmt: skip
    stage, batches = (file.job.stage, file.accumulation or 1) if file.is_job else (0, 1)
    counts: dict[Dimension, int] = {
        "dp": batches if stage >= 2 else 1, "zero": 2 * batches if stage == 3 else 1,
    }  # fmt: skip
    native, sent = crossing.LinkNbytes(), crossing.LinkNbytes()
    for name, messages in ranks.messages().items():
        codec = block.codecs()[name, "forward"]
        if codec is not None and codec.low_rank is not None:
            todo = "its bytes depend on the model's matrices; draw another codec"
            raise ConfigError(OPTION, f"{name} {codec.spec}", todo)
        local = max(1, job.ranks_per_node // split)
        both = crossing.of_messages(messages, codec, local, block.min_bytes)
        times = counts[name] * min(split, job.ranks_per_node)
        native, sent = native + both[0].times(times), sent + both[1].times(times)
    return native, sent
