"""Plans of large models on 8 to 4,096 GPUs over links of three rates, by the planner's model.

Nothing of it is measured: the machine is described, as a data sheet would (``machine``), with what
a GPU reaches of its peak, and the host's time of a message from ``bench_host.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from hybridcomp.plan.choices import NATIVE, Choices
from hybridcomp.plan.cost.calibrate import calibrated
from hybridcomp.plan.cost.job import PlannedJob
from hybridcomp.plan.cost.predict import predicted
from hybridcomp.plan.cost.work import Work, work_of
from hybridcomp.plan.machines.cluster import Cluster
from hybridcomp.plan.machines.described import CodecSpeed, Description, HostSpeed, Link
from hybridcomp.plan.models import huggingface
from hybridcomp.plan.models.model import Model
from hybridcomp.plan.models.reading import read_model
from hybridcomp.plan.request import Batch, SearchLimits
from hybridcomp.plan.search.placing import Placer
from hybridcomp.plan.search.space import layouts

ROOT = Path(__file__).resolve().parents[3]
#: Llama 2 and 3 of 70 B (config.json of Hugging Face)
LLAMA = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
#: samples of a step and tokens of a sample: four million tokens
BATCHES = {"GPT-NeoX-20B": Batch(2048, 2048), "Llama 70B": Batch(1024, 4096)}
GPUS, RATES = (8, 64, 256, 1024, 4096), (25, 100, 400)
#: GPUs of a node; 10^12 FLOP/s that each reaches; its memory (GB, GB/s); its link to the others
#: (GB/s); codecs (10^9 bytes of native values a second)
PER_NODE, TFLOPS, MEMORY_GB, MEMORY_SPEED, INSIDE, CODEC = 8, 400.0, 80.0, 2500.0, 300.0, 400.0
#: what is tried: tensor parallelism inside of a node, replicas, pipelines, ZeRO 0 to 3
FIXED: dict[str, Any] = {"tensor": PER_NODE, "context": 1, "virtual": 1}
MOST_MICRO, MOST_STAGES = 4, 16
#: layouts that are tried with "auto": the fastest with the preset
LIKELY = 5
RECOMMENDED = {"preset": "recommended", "when": "always"}


def models() -> dict[str, Model]:
    """Return the models by name."""
    return {
        "GPT-NeoX-20B": read_model(ROOT / "configs" / "neox" / "20B.yml"),
        "Llama 70B": huggingface.decoder(LLAMA, "Llama 70B"),
    }


def machine(gpus: int, gbits: float, host: HostSpeed | None = None) -> Cluster:
    """Describe so many GPUs, each with a share of ``gbits`` (10^9 bit/s) of its node's link."""
    between = Link(PER_NODE * gbits / 8, 10.0) if gpus > PER_NODE else None
    return Description(
        gpus // PER_NODE, PER_NODE, "GPU", MEMORY_GB, {"bf16": TFLOPS}, Link(INSIDE, 5.0), between,
        memory_gbytes_per_second=MEMORY_SPEED,
        codecs={name: CodecSpeed(CODEC) for name in ("blockint", "expcode", "mpc", "stepcode")},
        message=host or HostSpeed(),
    ).cluster()  # fmt: skip


def rows(
    names: Sequence[str], gpus: Sequence[int], rates: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each model, number of GPUs and rate: steps of the plans, in seconds."""
    every = models()
    for name, count, rate in product(names, gpus, rates):
        found = row(every[name], name, count, rate)
        yield {"model": name, "gpus": count, "gbits": rate, **found}


def row(model: Model, name: str, gpus: int, gbits: float) -> dict[str, Any]:
    """Return the steps of native, recommended, auto and planned; a reason where nothing fits.

    The fastest native layout is that of native, of the preset on all that it compresses, and of
    "auto", which leaves those dimensions native that are slower encoded. "planned" is the layout
    that is fastest with "auto".
    """
    cluster, batch = machine(gpus, gbits), BATCHES[name]
    limits = SearchLimits(dtype="bf16", most_micro_batch=MOST_MICRO, fixed=FIXED)
    job = calibrated(PlannedJob(model, cluster, batch, limits))
    placer, always = Placer(job), Choices.of_block(RECOMMENDED)
    every = [one for one in layouts(job, Counter()) if one.stages <= MOST_STAGES]
    works = [work for one in every for work in placer.places(one, False)]
    if not works:
        return {"reason": f"none of {len(every)} layouts fits into {MEMORY_GB:g} GB a GPU"}
    native = min(works, key=lambda work: predicted(job, work, Choices()).seconds)
    plain, encoded = predicted(job, native, Choices()), predicted(job, native, always)
    auto = _auto(job, native, always)
    likely = sorted(works, key=lambda work: predicted(job, work, always).seconds)[:LIKELY]
    best = min((native, *likely), key=lambda work: _seconds(job, work, _auto(job, work, always)))
    without = calibrated(
        replace(job, cluster=machine(gpus, gbits, HostSpeed(0.0, 0.0)), _seconds={})
    )
    alone = _seconds(without, work_of(without, native.layout), always)
    return {
        "layout": str(native.layout), "planned_layout": str(best.layout),
        "native": plain.seconds, "recommended": encoded.seconds,
        "auto": _seconds(job, native, auto),
        "planned": _seconds(job, best, _auto(job, best, always)),
        "host_of_recommended": encoded.seconds - alone, "tokens": batch.samples * batch.length,
        "auto_encodes": sorted({
            key[0] for key, choice in auto if plain.nbytes.get(key[0]) and not choice.native
        }),
        "native_nbytes": sum(plain.between_native_nbytes.values()),
        "recommended_nbytes": sum(encoded.between_nbytes.values()),
    }  # fmt: skip


def _seconds(job: PlannedJob, work: Work, choices: Choices) -> float:
    return predicted(job, work, choices).seconds


def _auto(job: PlannedJob, work: Work, choices: Choices) -> Choices:
    """Leave every dimension native that makes the step longer, one after the other."""
    best, least = choices, predicted(job, work, choices).seconds
    for dimension in dict.fromkeys(key[0] for key, choice in choices if not choice.native):
        tried = best
        for key, _ in choices:
            if key[0] == dimension:
                tried = tried.changed(key, NATIVE)
        seconds = predicted(job, work, tried).seconds
        if seconds < least:
            best, least = tried, seconds
    return best
