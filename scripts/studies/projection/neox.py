"""GPT-NeoX-20B on V100 nodes, described by hand, and the schemes as choices of the planner.

Sizes of the model: EleutherAI/gpt-neox, configs/20B.yml. The paper (arXiv 2409.02423) does not say
its parallel degrees, batch sizes or rates of links; those here are assumptions, each a field that
can be set.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybridcomp.plan.choices import NATIVE, Choices
from hybridcomp.plan.cost.job import Job
from hybridcomp.plan.cost.predict import predicted
from hybridcomp.plan.cost.prices import Calibration
from hybridcomp.plan.cost.work import work_of
from hybridcomp.plan.layout import Layout
from hybridcomp.plan.machines.cluster import Cluster
from hybridcomp.plan.machines.described import CodecSpeed, Description, Link
from hybridcomp.plan.models.model import Model
from hybridcomp.plan.models.reading import read_model
from hybridcomp.plan.plan import Prediction
from hybridcomp.plan.request import DTYPES, Batch, Found, Limits
from hybridcomp.plan.search.budget import Budget
from hybridcomp.plan.search.placing import Placer
from hybridcomp.plan.search.search import search

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "neox" / "20B.yml"
SEQUENCE = 2048
SCHEMES = ("baseline", "naive-zfp", "mzhybrid", "zhybrid", "recommended")
#: dtypes of messages by their bits
WIDTHS = {32: "fp32", 16: "fp16"}


@dataclass(frozen=True)
class Assumed:
    """Assumptions about Lassen and the job."""

    tensor: int = 4  # GPUs of a node
    stages: int = 6
    micro_batches: int = 32  # of a replica in a step, one sample each
    gpu_flops: float = 125e12
    efficiency: float = 0.30  # of gpu_flops, without communication
    gpu_memory: float = 16e9
    memory_bandwidth: float = 800e9  # bytes a second
    node_link: float = 25e9  # bytes a second, two EDR rails, shared by the GPUs of a node
    inside_link: float = 40e9  # bytes a second of a GPU to its neighbours
    latency: float = 10e-6  # seconds a hop
    zfp: float = 100.0  # 1e9 bytes a second of a GPU, and so on
    mpc: float = 60.0
    blockint: float = 250.0
    expcode: float = 130.0

    def cluster(self, gpus: int) -> Cluster:
        """So many GPUs, on nodes of ``tensor``. Raises ValueError where nodes are not full."""
        nodes, rest = divmod(gpus, self.tensor)
        if rest or not nodes:
            raise ValueError(f"{gpus} GPUs: expected a multiple of {self.tensor}, a node's")
        speed = 1e-12 * self.gpu_flops * self.efficiency
        names = ("zfp", "mpc", "blockint", "expcode")
        return Description(
            nodes, self.tensor, "V100", 1e-9 * self.gpu_memory, {"fp16": speed, "fp32": speed},
            Link(1e-9 * self.inside_link, 1e6 * self.latency),
            Link(1e-9 * self.node_link, 1e6 * self.latency),
            memory_gbytes_per_second=1e-9 * self.memory_bandwidth,
            codecs={name: CodecSpeed(getattr(self, name)) for name in names},
        ).cluster()  # fmt: skip

    def layout(self, gpus: int) -> Layout:
        """The layout that every scheme is asked about; all layers run forward twice.

        Raises ValueError where the GPUs do not fill whole replicas.
        """
        replicas, rest = divmod(gpus, self.tensor * self.stages)
        if rest or not replicas:
            todo = f"expected a multiple of {self.tensor * self.stages}, tensor times stages"
            raise ValueError(f"{gpus} GPUs: {todo}")
        return Layout(
            tensor=self.tensor, stages=self.stages, data=replicas, accumulation=self.micro_batches,
            zero_stage=1 if replicas > 1 else 0,
        )  # fmt: skip


def model() -> Model:
    """GPT-NeoX-20B."""
    return read_model(CONFIG)


def choices(scheme: str, width: int) -> Choices:
    """The codecs of a scheme. A rate that would not shorten a message is left out, as the library's
    threshold would.
    """
    found = Choices.of_block({"preset": "none" if scheme == "baseline" else scheme})
    dtype = DTYPES[WIDTHS[width]]
    for key, choice in found:
        if choice.bits(dtype) >= width:
            found = found.changed(key, NATIVE)
    return found


def step(
    assumed: Assumed, gpus: int, scheme: str, width: int, calibration: Calibration
) -> Prediction:
    """What a step of ``scheme`` would take with messages of ``width`` bits. Raises ValueError."""
    layout = assumed.layout(gpus)
    job = Job(
        model(), assumed.cluster(gpus), Batch(layout.samples, SEQUENCE),
        Limits(engine="neox", dtype=WIDTHS[width]), calibration,
    )  # fmt: skip
    layers = tuple((number, number + 1) for number in range(job.model.depth))
    layout = Placer(job).cut(layout).replace(recompute=layers)
    return predicted(job, work_of(job, layout), choices(scheme, width))


def planned(assumed: Assumed, gpus: int, budget: str, calibration: Calibration) -> Found:
    """The fastest plan for fp16 within ``budget``, of all layouts, or the reason that none fits."""
    return search(
        model(), assumed.cluster(gpus), Budget.parse(budget),
        Batch(assumed.layout(gpus).samples, SEQUENCE),
        Limits(engine="neox", dtype="fp16", keep=1), calibration,
    )  # fmt: skip
