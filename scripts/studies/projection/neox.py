"""GPT-NeoX-20B on V100 nodes: compute, bytes of every dimension, and the schemes.

Sizes of the model: EleutherAI/gpt-neox, configs/20B.yml. Bytes: Narayanan et al., SC21 (arXiv
2104.04473), section 3, with the parallel residual of NeoX (one all-reduce forward, two backward for
a layer, one more for recomputing). The paper (arXiv 2409.02423) does not say its parallel degrees,
batch sizes or rates of links; those here are assumptions, each a field that can be set.
"""

from __future__ import annotations

from dataclasses import dataclass

LAYERS, WIDTH, SEQUENCE, VOCABULARY = 44, 6144, 2048, 50432
PARAMETERS = 20.55e9


@dataclass(frozen=True)
class Cluster:
    """Assumptions about Lassen and the job."""

    tensor: int = 4  # GPUs of a node
    stages: int = 6
    micro_batches: int = 32  # of a replica in a step, one sample each
    gpu_flops: float = 125e12
    efficiency: float = 0.30  # of gpu_flops, without communication
    node_link: float = 25e9  # bytes a second, two EDR rails, shared by the GPUs of a node
    inside_link: float = 40e9  # bytes a second of a GPU to its neighbours
    latency: float = 10e-6  # seconds a hop


@dataclass(frozen=True)
class Scheme:
    """Bits a value on each dimension, where values have ``width`` bits natively; None: native."""

    name: str
    dp: float | None = None
    zero: float | None = None
    tp: float | None = None
    pp: float | None = None
    #: bytes a second of native values through encoder and decoder of one GPU
    codec: float = float("inf")


def schemes(width: int, zfp: float, mpc: float, blockint: float) -> list[Scheme]:
    """The paper's and ours for messages of ``width`` bits (32 or 16); the rest: codec speeds.

    mpc's ratio is that of Gaussian values, 1.10 in fp32, 1.03 in fp16 (two a word): both below the
    price of its raw flag at worst. A rate that would not shorten a message is left out, as the
    library's threshold would.
    """
    lossless = width / (1.10 if width == 32 else 1.03)

    def at(bits: float) -> float | None:
        return bits if bits < width else None

    return [
        Scheme("baseline"),
        Scheme("naive-zfp", at(8), at(8), at(8), at(8), zfp),
        Scheme("mzhybrid", at(8), lossless, lossless, lossless, min(zfp, mpc)),
        Scheme("zhybrid", at(8), at(16), at(16), at(16), zfp),
        Scheme("recommended", 4.26, 8.26, 8.26, 8.26, blockint),
    ]


@dataclass(frozen=True)
class Step:
    """Seconds of one optimizer step, by what they go to."""

    compute: float
    bubble: float
    tp: float
    pp: float
    dp: float
    codec: float
    samples: int

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.compute + self.bubble + self.tp + self.pp + self.dp + self.codec


def step(
    cluster: Cluster, gpus: int, scheme: Scheme, width: int, slowdown: float, overlap: float,
    coding: float,
) -> Step:  # fmt: skip
    """``width``: bits of a native value; the last three: what the measurements gave (fit.py).

    Raises ValueError where the GPUs do not fill whole replicas.
    """
    t, p, m = cluster.tensor, cluster.stages, cluster.micro_batches
    replicas, rest = divmod(gpus, t * p)
    if rest or not replicas:
        raise ValueError(f"{gpus} GPUs: expected a multiple of {t * p}, tensor times stages")
    tokens = SEQUENCE * WIDTH  # values of one micro-batch's activation
    # 1. compute of one micro-batch on one GPU, forward, backward and recomputing
    flops = 96.0 * SEQUENCE * LAYERS * WIDTH**2
    flops *= 1 + SEQUENCE / (6 * WIDTH) + VOCABULARY / (16 * LAYERS * WIDTH)
    compute = flops / (t * p) / (cluster.gpu_flops * cluster.efficiency)
    # 2. values that one GPU sends
    sums = 4 * 2 * (t - 1) / t * tokens * LAYERS / p if t > 1 else 0.0
    sends = 2 * tokens / t if p > 1 else 0.0
    gradients = (replicas - 1) / replicas * PARAMETERS / (t * p)

    def wire(values: float, bits: float | None, link: float, hops: float) -> float:
        sent = values * (width if bits is None else bits) / 8
        return slowdown * sent / link + hops * cluster.latency

    share = cluster.node_link / t  # every GPU of a node uses it at the same time
    tp = wire(sums, scheme.tp, cluster.inside_link, 4 * LAYERS / p * 2 * (t - 1) if t > 1 else 0)
    pp = wire(sends, scheme.pp, share, 2 if p > 1 else 0)
    hops = 2 * (replicas - 1)
    dp = wire(gradients, scheme.dp, share, hops) + wire(gradients, scheme.zero, share, hops)
    # 3. coding: values that pass a codec, once out and once in
    coded = [
        (m * sums, scheme.tp), (m * sends, scheme.pp), (gradients, scheme.dp),
        (gradients, scheme.zero),
    ]  # fmt: skip
    passed = sum(values for values, bits in coded if bits is not None)
    codec = coding * 2 * passed * width / 8 / scheme.codec
    # 4. stages wait for each other (p - 1) micro-batches
    bubble = (p - 1) * (compute + tp + pp)
    hidden = overlap * m * compute
    return Step(
        compute=m * compute, bubble=bubble, tp=m * tp, pp=m * pp, dp=max(0.0, dp - hidden),
        codec=codec, samples=m * replicas,
    )  # fmt: skip
