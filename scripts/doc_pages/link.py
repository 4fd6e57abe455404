"""Tabulate traffic over the slow link, computed by the planner's and validator's code."""

from __future__ import annotations

from doc_pages import bits
from hybridcomp.config import CompressionConfig
from hybridcomp.tools.plan.bits_between import JobTraffic
from hybridcomp.tools.plan.cost.job import PlannedJob
from hybridcomp.tools.plan.cost.memory import kept, states
from hybridcomp.tools.plan.cost.work import work_of
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.machines.cluster_file import parse
from hybridcomp.tools.plan.models.decoder import Decoder
from hybridcomp.tools.plan.request import Batch, SearchLimits

NODES, RANKS = 4, 8
#: micro-batches per step in the last two columns
ACCUMULATION = 8
HEAD = (
    "| job | natively | `recommended` | natively, accumulation 8 | `recommended`, accumulation 8 | "
    "memory |"
)
_LAYOUTS: dict[str, Layout] = {
    "ZeRO 1": Layout(zero_stage=1),
    "ZeRO 2": Layout(zero_stage=2),
    "ZeRO 3": Layout(zero_stage=3, data=NODES * RANKS),
    "ZeRO 3, hpZ": Layout(zero_stage=3, data=NODES * RANKS, hpz=RANKS),
    '`"secondary": "exact"`': Layout(zero_stage=3, data=NODES * RANKS, hpz=RANKS, copy="exact"),
    '`"secondary": {"bits": 8}`': Layout(zero_stage=3, data=NODES * RANKS, hpz=RANKS, copy="bits8"),
    'ZeRO 2, `"accumulate": "node"`': Layout(
        zero_stage=2, data=NODES * RANKS, accumulation=ACCUMULATION, accumulate="node"
    ),
    '`"secondary": "exact"`, `"accumulate": "node"`': Layout(
        zero_stage=3, data=NODES * RANKS, hpz=RANKS, copy="exact",
        accumulation=ACCUMULATION, accumulate="node",
    ),
}  # fmt: skip


def table() -> str:
    """Return the table: bits sent per parameter and step, and a rank's bytes per parameter."""
    return "\n".join([HEAD, "|---" * 6 + "|", *map(_row, _LAYOUTS), _plus_plus(), _hsdp()])


def _row(words: str) -> str:
    layout = _LAYOUTS[words].replace(data=NODES * RANKS)
    codecs = CompressionConfig.parse({"preset": "recommended"}).codecs()
    found = []
    for count in (1, ACCUMULATION):
        job = JobTraffic(layout.zero_stage, micro_batches=count).over(layout)
        found += [
            job.encoded(None, None),
            job.encoded(codecs["dp", "forward"], codecs["zero", "forward"]),
        ]
    return _line(words, found, nbytes(layout))


def _plus_plus() -> str:
    """Return the row of ZeRO++, computed from its formats."""
    found = [JobTraffic(3, micro_batches=count).plus_plus() for count in (1, ACCUMULATION)]
    memory = nbytes(_LAYOUTS["ZeRO 3, hpZ"])
    return f"| ZeRO++ | {found[0]:.1f} | - | {found[1]:.1f} | - | {memory:.2f} |"


def _hsdp() -> str:
    """Return the row of HSDP: shards stay inside a node, reductions cross nodes."""
    job = bits.JOBS["hsdp_bf16"]
    once = [bits.total(job.today), bits.total(job.recommended)]
    memory = nbytes(Layout(zero_stage=3, data=RANKS))
    return _line("HSDP over a node", [*once, *(ACCUMULATION * one for one in once)], memory)


def _line(words: str, found: list[float], memory: float) -> str:
    cells = " | ".join(f"{value:.1f}" for value in found)
    return f"| {words} | {cells} | {memory:.2f} |"


def nbytes(layout: Layout) -> float:
    """Return bytes per parameter on a rank: weights, gradients, states, secondary shards."""
    model = Decoder("table", 256, 4, 4, 4, 64, 1024, 270)
    cluster = parse({
        "version": 1, "kind": "described", "nodes": NODES, "ranks_per_node": RANKS, "device": "any",
        "memory_gb": 80, "tflops": {"bf16": 1}, "inside": {"gbytes_per_second": 10},
        "between": {"gbytes_per_second": 1}, "memory_gbytes_per_second": 100,
        "codecs": {"blockint": {"gbytes_per_second": 1}, "stepcode": {"gbytes_per_second": 1}},
    })  # fmt: skip
    layout = layout.replace(cuts=(model.depth,), accumulation=2)
    job = PlannedJob(model, cluster, Batch(2 * layout.data, 128), SearchLimits())
    stage = work_of(job, layout).stages[0]
    held = {**states(job, layout, stage), **kept(job, layout, stage)}
    held.pop("gathered", None)  # a DeepSpeed setting, the same for all stages
    return sum(held.values()) / (stage.dense + stage.experts)
