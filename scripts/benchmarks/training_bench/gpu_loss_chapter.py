"""The section of the GPU's chapter on losses: the gap, whether it decides, curves and bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.training_bench import gpu_loss_picture, gpu_losses, loss_gaps, loss_records
from benchmarks.training_bench.gpu_losses import BASELINE, Case
from benchmarks.training_bench.loss_runs import Study, untimed
from hybridcomp.tools.compare import Wishes, compared
from hybridcomp.tools.compare.draw import draw
from hybridcomp.tools.compare.report import as_json, markdown_rows

LOSS = """
## Loss

GPT-2 small's size (12 layers, width 768, 12 heads, vocabulary 50,257, output tied to the embedding:
124 M parameters), bf16, ZeRO 1 on two ranks, sequences of 1,024 tokens. The text is Python source
(the standard library, torch, DeepSpeed) in a byte-level BPE that was trained on it
(`prepare_data.py --vocabulary 50257`). The ranks' bytes go through the GPU's memory
(`scripts/benchmarks/training_bench/gpu_memory.py`) in place of NCCL's sockets: codecs, collectives
and sums are the same, only the wire is not waited for; {identity}
Gaps are in percent of the baseline's loss, paired by seed, with the 95 % interval of their mean.
"""
GAPS = """\
Native and compressed training of a seed begin together, with the same weights and data. In the
last fifth of the steps each reads the same {tokens:,} held-out tokens {times} times; the gap of a
seed is the mean of the gaps there, the interval that of the mean over the seeds. "Spread" is the
standard deviation between seeds, "of it evaluation" the share of its square that comes from which
text was read, "text" the standard error that the choice of the text gives all seeds in common.
"""


@dataclass
class LossSection:
    """Markdown of the section, figures for gpu.json, and what the commands name."""

    parts: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    options: str = ""


def section(source: Path, scratch: Path, out: Path) -> LossSection:
    """Write picture and section of ``source``/losses; ``scratch``: a folder for what is packed.

    Without trainings it has a head alone. Damaged files are named in the section.
    """
    damaged: list[str] = []
    loss_records.unpack(source / "losses", scratch, damaged.append)
    records = loss_records.kept(source / "losses", lambda _: None)
    study = _paired(Study.of(scratch / "losses" / gpu_losses.LAYOUT))
    found = LossSection([LOSS.format(identity=identity(scratch))])
    found.seeds, found.trained = study.seeds, list(study.done)
    if study.seeds:
        gaps = gaps_of(records, damaged.append)
        found.parts += _gaps(records, gaps)
        # native once more has a gap, and no bytes to show
        shown = [name for name in study.whole if name == BASELINE or study.block(name) is not None]
        words = [f"{name}={study.paths(name)}" for name in shown]
        result = untimed(compared(words, Wishes(need_ledger=True)))
        title = f"GPT-2 small, bf16, ZeRO 1, {study.say_seeds()}"
        if not gpu_loss_picture.draw(result, gaps, out / "gpu_loss.png", title):
            draw(result, out / "gpu_loss.png", 0, title)
        found.parts += study.section(result, "gpu_loss.png")
        found.figures["loss"] = json.loads(as_json(result))
        found.figures["gaps"] = {name: _figures(one) for name, one in gaps.items()}
        found.options = _options(records, len(result.aligned.axis))
    found.parts += [f"\nLeft out: {why}." for why in damaged]
    return found


def _paired(study: Study) -> Study:
    """Return the study without seeds of the first pair's arms of which one is not over."""
    first = study.done.get("recommended")
    native = study.done.get(BASELINE)
    if first is None or native is None:
        return study
    both = set(first) & set(native)
    if not both:  # nothing of recommended can be shown, all others can
        return study
    done = {
        name: {seed: made for seed, made in seeds.items() if seed in both}
        for name, seeds in study.done.items()
    }
    return replace(study, done={name: seeds for name, seeds in done.items() if seeds})


def gaps_of(
    records: dict[Case, loss_records.Record], say: Callable[[str], None]
) -> dict[str, loss_gaps.Found]:
    """Return the gap of every arm that has a seed in common with the baseline.

    Arms whose logs do not match are said.
    """
    found = {}
    runs = loss_records.by_arm(records)
    native = runs.pop(BASELINE, {})
    for name in gpu_losses.BLOCKS:
        if set(runs.get(name, {})) & set(native):
            try:
                found[name] = loss_gaps.of(native, runs[name])
            except loss_gaps.GapError as error:
                say(f"{name}: {error}")
    return found


def _gaps(
    records: dict[Case, loss_records.Record], gaps: dict[str, loss_gaps.Found]
) -> Sequence[str]:
    """Return what the gaps are and whether they decide, empty where nothing was evaluated."""
    if not gaps:
        return []
    runs = loss_records.by_arm(records)
    method = next(iter(records.values()))["method"]
    rows = [["run", "seeds", "gap %", "spread %", "of it evaluation", "text %", "of each seed"]]
    lines = []
    for name, one in gaps.items():
        seconds = loss_records.pair_seconds(runs[name])
        lines.append(f"**{name}**: {one.told(seconds)}.\n")
        half = "" if one.half is None else f" ± {one.half:.3f}"
        several = len(one.seeds) > 1
        rows.append([
            name, str(len(one.seeds)), f"{one.gap:+.3f}{half}",
            *([f"{one.spread:.3f}", f"{one.evaluation:.0%}", f"{one.text:.3f}"] if several
              else ["-", "-", "-"]),
            ", ".join(f"{seed.gap:+.3f}" for seed in one.seeds),
        ])  # fmt: skip
    head = GAPS.format(tokens=method["eval_tokens"], times=method["evaluations"])
    return [head, *lines, *markdown_rows(rows), ""]


def _figures(one: loss_gaps.Found) -> dict[str, Any]:
    return {
        "gap": one.gap, "half": one.half, "verdict": one.word, "more_seeds": one.more,
        "spread": one.spread, "evaluation": one.evaluation, "text": one.text,
        "seeds": {seed.seed: {"gap": seed.gap, "curve": seed.curve, "steps": seed.steps}
                  for seed in one.seeds},
    }  # fmt: skip


def _options(records: dict[Case, loss_records.Record], steps: int) -> str:
    """Return the options of gpu_losses.py by which these trainings are made."""
    if not records:
        return f"--steps {steps} --samples 1 --warmup log --evaluations 1 --eval-tokens 65536"
    method = next(iter(records.values()))["method"]
    names = (
        "steps", "samples", "micro_batches", "lr", "schedule", "warmup", "evaluations",
        "eval_tokens",
    )  # fmt: skip
    return " ".join(f"--{name.replace('_', '-')} {method[name]}" for name in names)


def identity(scratch: Path) -> str:
    """Say how far losses of runs through memory equal those of the same runs over NCCL."""
    told = []
    for log in sorted((scratch / "losses_nccl" / gpu_losses.LAYOUT).glob("*/seed*/loss.jsonl")):
        nccl, same = _curve(log), scratch / "losses" / log.relative_to(scratch / "losses_nccl")
        if not same.is_file():  # its turn had not come when time was up
            continue
        own = _curve(same)[: len(nccl)]
        equal = sum(ours == theirs for ours, theirs in zip(own, nccl, strict=False))
        told.append(f"`{log.parents[1].name}` in {equal} of {len(nccl)} steps")
    if not told:
        return "they were not held against NCCL's."
    return (
        f"losses that are those of NCCL's sockets to the last digit: {', '.join(told)}. (Backward "
        "kernels of torch add in no fixed order, and the first steps of Adam divide what is small "
        "by itself; whether that is all of the difference was not tested.)"
    )


def _curve(log: Path) -> list[float]:
    records = [json.loads(text) for text in log.read_text().splitlines()]
    return [record["loss"] for record in records if "step" in record and "loss" in record]
