"""Measure what patches cost that compress nothing: native, identity, identity with the ledger.

One command: ``python scripts/bench/bench_overhead.py``. Every stage trains one model on two CPU
ranks; the three variants take turns on the same engine, ten steps each, so that noise of the
machine hits all of them. Prints the median of the paired ratios to native with a 95% bootstrap
interval; ``--check`` exits with 1 when identity costs more than 2% or the ledger more than 3%.

``--against COMMIT`` (or the folder of a checkout that is built) compares that commit with this
checkout instead: trainings that encode nothing, everything, and everything in short messages, and
the host's time of short messages in the codecs alone. ``--check`` then exits with 1 where the whole
interval of a ratio is above 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.overhead import against

LIMITS = {"identity": 1.02, "identity + ledger": 1.03}
VARIANTS = ("native", *LIMITS)


class Silent:
    """A reporter that reports nothing: what ``ledger off`` would be."""

    def report(self, step: int) -> list[Any]:
        """Drop the event."""
        return []


def build(stage: int, width: int, folder: str) -> Any:
    """Build a patched engine with ``none`` everywhere; fp32, since many CPUs only emulate bf16."""
    import deepspeed
    import deepspeed.ops

    import hybridcomp

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    hybridcomp.install()
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10,
        "compression": {
            "dp": "none", **({"zero": "none"} if stage else {}), "min_bytes": 0,
            "ledger": {"jsonl": f"{folder}/ledger.jsonl"},
        },
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    return engine


def rank_main(rank: int, stage: int, arguments: argparse.Namespace, folder: str) -> None:
    """Time the variants in turn; rank 0 writes the seconds of each turn."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_SIZE="2",
        DS_ACCELERATOR="cpu", TORCH_EXTENSIONS_DIR=f"{folder}/ext",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    import hybridcomp
    from hybridcomp.session.engine_session import session_of

    engine = build(stage, arguments.width, folder)
    session, silent = session_of(engine), cast(Any, Silent())
    assert session is not None
    reporter: Any = session.reporter
    values = torch.randn(4, 64, arguments.width)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    order = list(VARIANTS)
    shuffler = random.Random(0)
    for turn in range(arguments.turns + 1):
        shuffler.shuffle(order)
        for name in order:
            hybridcomp.uninstall()
            if name != "native":
                hybridcomp.install()
            session.reporter = reporter if name == "identity + ledger" else silent
            dist.barrier()
            start = time.perf_counter()
            for _ in range(10):
                engine.backward(engine(values).float().square().mean())
                engine.step()
            dist.barrier()
            if turn:  # the first is the warm-up
                seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()


def interval(ratios: list[float]) -> tuple[float, float]:
    """95% bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def run_two(stage: int, arguments: argparse.Namespace, folder: str) -> None:
    """Run both ranks; raises RuntimeError when one fails."""
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=rank_main, args=(rank, stage, arguments, folder))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        raise RuntimeError(f"ZeRO-{stage}: exit codes {[rank.exitcode for rank in ranks]}")


def measure(stage: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the ratios of one stage to native."""
    with tempfile.TemporaryDirectory() as folder:
        run_two(stage, arguments, folder)
        seconds = json.loads(Path(folder, "seconds.json").read_text())
    row: dict[str, Any] = {"stage": stage, "step_ms": statistics.median(seconds["native"]) * 100}
    for name in LIMITS:
        ratios = [a / b for a, b in zip(seconds[name], seconds["native"], strict=True)]
        low, high = interval(ratios)
        row[name] = {"ratio": statistics.median(ratios), "low": low, "high": high}
    return row


def compare(arguments: argparse.Namespace) -> None:
    """Compare this checkout with another one, case by case."""
    rows, missed = [], []
    with against.checkout(arguments.against) as other:
        for case in against.cases(arguments.stages):
            sources = (other, against.ROOT)
            row = against.compare(case, sources, arguments.turns, arguments.width)
            low, high = interval(row["ratios"])
            ratio = statistics.median(row["ratios"])
            rows.append({**row, "ratio": ratio, "low": low, "high": high})
            told = (
                f"{case!s:24} {row['old_ms']:8.2f} ms -> {row['new_ms']:8.2f} ms  "
                f"{ratio:.4f} [{low:.4f}, {high:.4f}]"
            )
            print(told, flush=True)
            missed += [told] if low > 1 else []
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    if arguments.check and missed:
        raise SystemExit("slower:\n" + "\n".join(missed))


def main() -> None:
    """Parse, measure, print, check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--turns", type=int, default=20, help="turns of ten steps for each variant")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--against", metavar="COMMIT", help="a commit, or a built checkout")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores", flush=True)
    if arguments.against:
        compare(arguments)
        return
    rows = []
    for stage in arguments.stages:
        row = measure(stage, arguments)
        rows.append(row)
        figures = "  ".join(
            f"{name} {row[name]['ratio']:.4f} [{row[name]['low']:.4f}, {row[name]['high']:.4f}]"
            for name in LIMITS
        )
        print(f"ZeRO-{stage}  step {row['step_ms']:.1f} ms  {figures}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    missed = [
        f"ZeRO-{row['stage']} {name}: {row[name]['ratio']:.4f} > {limit}"
        for row in rows for name, limit in LIMITS.items() if row[name]["ratio"] > limit
    ]  # fmt: skip
    if arguments.check and missed:
        raise SystemExit("\n".join(missed))


if __name__ == "__main__":
    main()
