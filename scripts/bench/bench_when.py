#!/usr/bin/env python3
"""Measure what `"when": "auto"` costs and keeps: native, always and auto in turns, over links.

One command, as root: ``python scripts/bench/bench_when.py --page docs/results/when.md``. Two
nodes of a netlab, one rank on each, train the same small GPT three times in the same processes, a
step of each in turn, so that noise of the machine hits all three alike. ``none`` in ``--rates`` is
the loopback of one node, not shaped.

*kept*: the step of the better of native and always over that of auto once it has decided, median
over rounds. *cost*: seconds of the trials, and of the compared steps what they took longer than
a step after them, as a share of 1,000 steps of the better one. *of 1,000 steps*: 1,000 steps of
the better over those of auto, cost included. ``--check`` ends with 1 where 0.97 is missed, or 2 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here

from lab.cluster import Lab
from lab.layout import LabError, Layout, Rates, parse_rate

#: blocks by arm; None: without hybridcomp's channels
ARMS: dict[str, dict[str, Any] | None] = {
    "native": None,
    "always": {"preset": "recommended", "when": "always"},
    "auto": {"preset": "recommended"},
}
ENGINES = ("ddp", "zero1", "zero2")
#: steps of a run, share of them that auto may cost, share of the better that it has to keep
STEPS, COST, KEPT = 1000, 0.02, 0.97
#: steps after which auto has decided: warm ones, and two rounds of compared ones
SETTLED = 24


@dataclass
class Arm:
    """One training: a step of it, and what is known about its channels."""

    step: Callable[[], None]
    channels: Any = None
    seconds: list[float] = field(default_factory=list)


def rank_main(engine: str, rounds: int, width: int, layers: int) -> None:
    """Train all arms in turn; rank 0 prints what they took as JSON."""
    import torch
    import torch.distributed as dist

    from gpt.model import GPT, loss_of
    from gpt.weights import ModelConfig

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = ModelConfig(vocabulary=4096, layers=layers, width=width, heads=4)
    loss = loss_of(config)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, 4096, (2, 65), generator=generator)
    weighed = [0.0]
    make = _ddp if engine == "ddp" else _deepspeed
    with _timed_trials(weighed):
        arms = {
            name: make(GPT(config).bfloat16(), block, loss, tokens, int(engine[-1:] == "2") + 1)
            for name, block in ARMS.items()
        }
    for _ in range(rounds):
        for arm in arms.values():
            dist.barrier()
            start = time.perf_counter()
            arm.step()
            arm.seconds.append(time.perf_counter() - start)
    seconds = torch.tensor([arm.seconds for arm in arms.values()])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        auto = arms["auto"].channels
        recheck = auto.verdicts.recheck
        print(
            json.dumps(
                {
                    "parameters": sum(p.numel() for p in GPT(config).parameters()),
                    "seconds": dict(zip(arms, seconds.tolist(), strict=True)),
                    "trials_s": weighed[0],
                    "compared": None if recheck is None else [recheck.first, recheck.stop],
                    "decided": {n: v.pays for n, v in auto.verdicts.by_dimension.items()},
                }
            )
        )
    dist.barrier()
    dist.destroy_process_group()


def _timed_trials(into: list[float]) -> Any:
    """Add up the seconds that trials take while models are made."""
    from hybridcomp.channels.payoff import Payoff

    weigh = Payoff.run_autotune

    def timed(self: Any, *given: Any, **named: Any) -> list[str]:
        start = time.perf_counter()
        try:
            return weigh(self, *given, **named)
        finally:
            into[0] += time.perf_counter() - start

    return patch.object(Payoff, "run_autotune", timed)


def _ddp(model: Any, block: Any, loss: Any, tokens: Any, stage: int) -> Arm:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import hybridcomp

    wrapped = DistributedDataParallel(model)
    attached = None if block is None else hybridcomp.attach(wrapped, block)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()

    return Arm(step, attached and attached.channels)


def _deepspeed(model: Any, block: Any, loss: Any, tokens: Any, stage: int) -> Arm:
    import deepspeed

    import hybridcomp
    from hybridcomp.channels import channels_of

    hybridcomp.install()
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": len(tokens),
        "steps_per_print": 1_000_000,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 4_000_000},
    }
    if block is not None:
        settings["compression"] = block
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings
    )

    def step() -> None:
        engine.backward(loss(engine(tokens[:, :-1]), tokens[:, 1:]))
        engine.step()

    return Arm(step, channels_of(engine))


def cell(engine: str, rate: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one engine over one link. Raises LabError, RuntimeError where a rank fails."""
    alone = rate == "none"
    words = [sys.executable, str(Path(__file__).resolve()), "--rank-main", engine]
    words += ["--rounds", args.rounds, "--width", args.width, "--layers", args.layers]
    with (
        tempfile.TemporaryDirectory() as folder,
        Lab(Layout.parse("1x2" if alone else "2"), Rates(parse_rate(rate))) as lab,
    ):
        result = lab.run(list(map(str, words)), cwd=folder, timeout=args.timeout)
    rows = [text for text in result.outputs[0].splitlines() if text.startswith('{"parameters"')]
    if result.status or not rows:
        raise RuntimeError(f"{engine} at {rate}:\n" + "\n".join(t[-2000:] for t in result.outputs))
    return {"engine": engine, "rate": rate, **judged(json.loads(rows[0])), **json.loads(rows[0])}


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """Return the arms' milliseconds, the cost of auto in 1,000 steps, and the share it kept."""
    stop = SETTLED if found["compared"] is None else max(SETTLED, found["compared"][1])
    later = {name: seconds[stop:] for name, seconds in found["seconds"].items()}
    ms = {name: statistics.median(seconds) * 1e3 for name, seconds in later.items()}
    better = min(("native", "always"), key=ms.__getitem__)
    kept = statistics.median(b / a for b, a in zip(later[better], later["auto"], strict=True))
    compared_s = 0.0
    if found["compared"] is not None:
        first, end = found["compared"]
        # of the same rounds, so that a slow minute of the machine is in both
        pairs = [
            (found["seconds"]["auto"][i], found["seconds"][better][i]) for i in range(first, end)
        ]
        compared_s = sum(auto - other for auto, other in pairs)
    cost = (found["trials_s"] + max(0.0, compared_s)) / (STEPS * ms[better] / 1e3)
    return {
        "ms": ms,
        "better": better,
        "kept": kept,
        "compared_s": compared_s,
        "cost": cost,
        "run": 1 / (1 / kept + cost),
    }


def _link(row: dict[str, Any]) -> str:
    return "loopback" if row["rate"] == "none" else str(row["rate"])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of the page."""
    lines = [
        "| engine | link | native ms | always ms | auto ms | auto compresses | trials s "
        "| compared steps s | cost | kept | of 1,000 steps |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        on = ", ".join(name for name, pays in row["decided"].items() if pays) or "nothing"
        times = " | ".join(f"{row['ms'][name]:.0f}" for name in ARMS)
        lines.append(
            f"| {row['engine']} | {_link(row)} | {times} | {on} | {row['trials_s']:.2f} "
            f"| {row['compared_s']:.2f} | {row['cost']:.2%} | {row['kept']:.3f} "
            f"| {row['run']:.3f} |"
        )
    return "\n".join(lines)


#: the committed page; ``load`` is that of the machine at the end of the run
PAGE = """# What measuring the link costs

Preset `recommended` leaves a dimension native where that is faster:
[`"when": "auto"`](../safeguards.md#when-auto-measures-the-link). Here it stands beside the same
block with `"when": "always"` and beside native messages: a GPT of {parameters:.1f} million
parameters in bf16, two ranks, {rounds} steps of each in turn in the same processes, so that what
disturbs the machine disturbs all three. Links are shaped by a token bucket between two network
namespaces of one machine with {cores} cores, of which other programs took a changing part (load
{load:.0f} at the end of the run); the loopback is not shaped.

{table}

* `kept`: the step of the better of native and always over that of auto, median over the rounds
  after it has decided. It is more than 1 where the machine was busier in the steps of the others:
  on such a machine a figure is good to about a tenth.
* `cost`: seconds of the trials, and what compared steps took longer than the better way in the same
  rounds (nothing where they were faster), as a share of 1,000 steps of the better way. The aim is
  at most 2 %.
* `of 1,000 steps`: 1,000 steps of the better way over those of auto, cost included. The aim is
  0.97.

{verdict}

`scripts/bench/bench_when.py --page docs/results/when.md` as root makes this page.
"""


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page of the table."""
    missed = [r for r in rows if r["cost"] > COST or r["run"] < KEPT]
    names = [
        f"{r['engine']} over {'loopback' if r['rate'] == 'none' else r['rate']}" for r in missed
    ]
    verdict = f"Missed by: {', '.join(names)}." if names else "Both aims are met in every row."
    return PAGE.format(
        parameters=rows[0]["parameters"] / 1e6,
        rounds=len(rows[0]["seconds"]["auto"]),
        cores=os.cpu_count(),
        load=os.getloadavg()[0],
        table=table(rows),
        verdict=verdict,
    )


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["ddp", "zero1"])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "none"])
    parser.add_argument("--rounds", type=int, default=70)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path, help="what was measured goes here, a cell at a time")
    parser.add_argument("--page", type=Path, help="the page with the table goes here")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--rank-main", choices=ENGINES, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; the exit status."""
    args = arguments(argv)
    if args.rank_main:
        rank_main(args.rank_main, args.rounds, args.width, args.layers)
        return 0
    rows: list[dict[str, Any]] = []
    try:
        for engine in args.engines:
            for rate in args.rates:
                rows.append(cell(engine, rate, args))
                print(table(rows[-1:]), flush=True)
                if args.json is not None:
                    args.json.write_text(json.dumps(rows) + "\n")
    except (LabError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    print(table(rows))
    if args.page is not None:
        args.page.write_text(page(rows))
    fine = all(row["kept"] >= KEPT and row["cost"] <= COST for row in rows)
    return int(args.check and not fine)


if __name__ == "__main__":
    sys.exit(main())
