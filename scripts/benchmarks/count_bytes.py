#!/usr/bin/env python3
"""Count the bytes of training jobs at the hosts' network interfaces and compare with the ledger.

scripts/benchmarks/count_bytes.py --data data/text            as root: it creates network namespaces

Each CPU job of README's table trains some steps in a lab (scripts/netlab.py), natively without
hybridcomp and with the preset `recommended`; the preset `none` measures the native bytes.

counted    bytes that left the hosts' interfaces, minus 66 bytes of headers per packet
           (Ethernet 14, IPv4 20, TCP 32). Ranks of a node talk over its loopback, counted likewise.
told       the ledger's bytes of all ranks
expected   from the bits per parameter of README's table (doc_pages/bits.py), link only

A ring replaces gloo's reduce-scatter and sends as many bytes as NCCL's. With --check the exit
status is 1 if counted and told differ by more than 1 %, counted and expected by more than 2 %, or a
host sends more than its limit.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as all imports here
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))  # gpt, train_gpt

from gpt.data import Samples
from gpt.indexed import IndexedTokens
from gpt.model import GPT
from gpt.weights import ModelConfig

from benchmarks.training_bench import cells
from benchmarks.training_bench.cells import LAYOUTS, REFERENCE, Arm, Sizes
from benchmarks.training_bench.runners import CellError, Steps, network
from benchmarks.training_bench.session import Session
from doc_pages import bits

#: first cells of table rows where they differ from README's: by layout if two layouts share a row
#: there, by job if it has none
WORDS = {
    "zero1": "ZeRO 1, bf16", "zero2": "ZeRO 2, bf16", "tp": "two tensor ranks",
    "pp": "two pipeline stages", "secondary": "ZeRO 3 with hpZ, `zero.secondary`",
    "islands": "ZeRO 1, fp32, `ds_zero1_islands.json`",
}  # fmt: skip
#: columns of the file: words, then figures
NAMES = ("job", "layout", "arm")
FIGURES = (
    "link_MB", "inside_MB", "bits", "told_MB", "native_MB", "off", "told_link_MB",
    "native_link_MB", "expected_bits", "off_expected", "most_bits", "parameters",
)  # fmt: skip
#: arm whose ledger records the native bytes
COUNTED = Arm("none", block=(("preset", "none"),))


@dataclass(frozen=True)
class Case:
    """One training job."""

    job: str  # a job of bits.JOBS; with another name no bytes are expected
    layout: str
    arm: Arm
    native: bool
    micro_batches: int = 1
    most: float | None = None  # limit of bits per parameter that a host sends in a step
    settled: int = 0  # steps before as many counted ones, if the ledger includes one-time messages


#: steps before those that are counted
WARM = 2
#: limit of bits with secondary shards on two nodes, by learning rate: 2.13 for gradients, plus
#: parameter deltas, which are longest early in training
MOST = {1e-3: 5.0, 1e-4: 3.6, 1e-6: 2.3}


def cases() -> Iterator[Case]:
    """Yield the cases to train, native runs first."""
    pairs = (
        ("zero0", "dp2"), ("zero1", "zero1"), ("zero1", "zero2"), ("zero3", "zero3"),
        ("zero3_twice", "zero3_twice"), ("hpz", "hpz"), ("hpz", "hpz_2x4"), ("fsdp2", "fsdp2"),
        ("hsdp", "hsdp"),
        ("ddp", "ddp"), ("tp", "tp2"), ("pp", "pp2"),
    )  # fmt: skip
    for job, layout in pairs:
        arms = {arm.name: arm for arm in cells.arms_of(layout)}
        yield Case(job, layout, arms[REFERENCE], True)
        yield Case(job, layout, COUNTED, True)
        yield Case(job, layout, arms["recommended"], False)
        if layout in ("fsdp2", "hsdp", "ddp"):
            yield Case(f"{job}_bf16", layout, arms["peer bf16"], True)
    for layout in ("hpz", "hpz_2x4"):
        arms = {arm.name: arm for arm in cells.arms_of(layout)}
        for rate, most in MOST.items():
            for name in ("secondary", "secondary 8 bits")[: 2 if layout == "hpz" else 1]:
                arm = replace(arms[name], name=f"{name}, {rate:g}", rate=rate)
                yield Case("secondary", layout, arm, False, most=most)
    yield Case("islands", "zero1", Arm("native fp32", bf16=False), True)
    yield Case(
        "islands", "zero1", Arm("islands", bf16=False, block=islands_block()), False, settled=20
    )
    yield Case("ddp_x4", "ddp", arms_of_ddp()["peer bf16"], True, 4)
    yield Case("ddp_x4", "ddp", arms_of_ddp()["recommended"], False, 4)


def arms_of_ddp() -> dict[str, Arm]:
    """Return the arms of DDP by name."""
    return {arm.name: arm for arm in cells.arms_of("ddp")}


def islands_block() -> tuple[tuple[str, Any], ...]:
    """Return the block of configs/ds_zero1_islands.json: one rank per island, fragments in turn."""
    settings = json.loads((cells.CONFIGS / "ds_zero1_islands.json").read_text())
    return tuple(settings["compression"].items())


def train(case: Case, sizes: Sizes, data: Path, timeout: float) -> tuple[list[Steps], list[Any]]:
    """Train in a lab; return the steps of every rank, and the ledger's records.

    Raises CellError where the training fails.
    """
    place = LAYOUTS[case.layout]
    if case.layout == "pp2":  # otherwise messages are so short that other traffic would count
        sizes = replace(sizes, divide_batch=1)
    if case.settled:
        sizes = replace(sizes, steps=2 * case.settled - sizes.warm)
    with (
        tempfile.TemporaryDirectory() as folder,
        network(place, loopback=False) as runner,
        Session(runner, place, timeout) as session,
    ):
        ledger, config = Path(folder, "ledger.jsonl"), Path(folder, "ds.json")
        settings = cells.settings_of(case.layout, case.arm, sizes, ledger)
        settings["gradient_accumulation_steps"] = max(
            case.micro_batches, settings.get("gradient_accumulation_steps", 1)
        )
        if case.arm.block is not None:  # one report at the last step, covering all steps
            every = case.settled or sizes.warm + sizes.steps
            settings["compression"]["ledger"]["every"] = every
        config.write_text(json.dumps(settings))
        job = session.start(cells.command_of(case.layout, case.arm, sizes, config, data, 0))
        for _ in range(sizes.warm + sizes.steps):
            job.step()
        ranks = session.steps(job)
        lines = ledger.read_text().splitlines() if ledger.is_file() else []
        return ranks, [json.loads(line) for line in lines]


def told_nbytes(records: Sequence[Any]) -> dict[str, float]:
    """Return the ledger's megabytes of all ranks and steps: sent, and native.

    Both for all messages, and for encoded messages between nodes where the ledger has them.
    """
    rows = [
        row for record in records if not record.get("summary")
        for ways in record["dimensions"].values() for row in ways.values()
    ]  # fmt: skip
    names = {"told_MB": "wire_MB", "native_MB": "raw_MB", "told_link_MB": "inter_MB",
             "native_link_MB": "inter_raw_MB"}  # fmt: skip
    return {name: sum(row[key] for row in rows) for name, key in names.items()}


def parameters_of(data: Path, sizes: Sizes) -> tuple[int, float]:
    """Return the parameters of the example, and the share that belongs to FSDP2's root."""
    vocabulary = Samples(
        IndexedTokens(data.parent / f"{data.name}_train"), sizes.length, 0
    ).vocabulary
    model: Any = GPT(ModelConfig(vocabulary=vocabulary, layers=sizes.layers, width=sizes.width))
    whole = sum(p.numel() for p in model.parameters())
    inner = sum(p.numel() for layer in model.layers[1:-1] for p in layer.parameters())
    return whole, 1 - inner / whole


def figures(case: Case, ranks: list[Steps], records: list[Any], numel: int, root: float) -> Any:
    """Return the row of a case: megabytes per step of all hosts, and bits per parameter of one
    host.

    Bits exclude the first two steps, in which DeepSpeed gathers more under ZeRO 3.
    """
    place = LAYOUTS[case.layout]
    first = [own[case.settled :] for own in ranks[:: place.per_node]]
    steps, warm = len(first[0]), 0 if case.settled else WARM
    records = [record for record in records if record.get("step", 1) > case.settled]
    link = sum(step["payload"] for own in first for step in own) / steps
    inside = sum(step["inside"] for own in first for step in own) / steps
    later = sum(step["payload"] for own in first for step in own[warm:]) / (steps - warm)
    row: dict[str, Any] = {
        "job": case.job, "layout": case.layout, "arm": case.arm.name, "link_MB": link / 1e6,
        "inside_MB": inside / 1e6, "parameters": numel,
        "bits": 8 * later / place.nodes / numel / case.micro_batches,
    }  # fmt: skip
    if records:
        row |= {name: told / steps for name, told in told_nbytes(records).items()}
        row["off"] = (link + inside) / 1e6 / row["told_MB"] - 1
    if case.most is not None:
        row["most_bits"] = case.most
    if case.job in bits.JOBS:
        job = bits.JOBS[case.job]
        messages = job.today if case.native else job.recommended
        kept = root if case.layout == "fsdp2" else 0.0
        expected = bits.across(messages, place.nodes, place.per_node, not case.native, kept)
        row["expected_bits"] = expected / job.accumulated
        row["off_expected"] = row["bits"] / row["expected_bits"] - 1
    return row


HEAD = (
    "job", "arm", "hosts", "counted MB", "inside a node", "told MB", "off", "bits a parameter",
    "expected", "off",
)  # fmt: skip


def table(rows: Sequence[Any]) -> str:
    """Return the table of all rows."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    places = {(case.job, case.layout, case.arm.name): n for n, case in enumerate(cases())}
    for row in sorted(rows, key=lambda row: places[row["job"], row["layout"], row["arm"]]):
        told, expected = "told_MB" in row, "expected_bits" in row
        shown = [
            _words(row["job"], row["layout"]),
            row["arm"],
            LAYOUTS[row["layout"]].lab, f"{row['link_MB']:.3f}",
            f"{max(0.0, row['inside_MB']):.3f}", f"{row['told_MB']:.3f}" if told else "-",
            f"{row['off']:+.2%}" if told else "-", f"{row['bits']:.2f}",
            f"{row['expected_bits']:.2f}" if expected else _at_most(row),
            f"{row['off_expected']:+.2%}" if expected else "-",
        ]  # fmt: skip
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _words(job: str, layout: str) -> str:
    return WORDS.get(layout if job in bits.JOBS else job) or bits.JOBS[job].words


def _at_most(row: Any) -> str:
    return f"<= {row['most_bits']:g}" if "most_bits" in row else "-"


def read(file: Path) -> list[dict[str, Any]]:
    """Read back the rows that ``--out`` wrote; docs/results/bytes.csv has some of them."""
    with file.open(newline="", encoding="utf-8") as lines:
        return [
            {name: text if name in NAMES else float(text) for name, text in row.items() if text}
            for row in csv.DictReader(lines)
        ]


def write(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write ``rows``; a figure that a row lacks is an empty cell."""
    with file.open("w", newline="", encoding="utf-8") as lines:
        table = csv.DictWriter(lines, [*NAMES, *FIGURES], lineterminator="\n")
        table.writeheader()
        table.writerows(
            {k: v if k in NAMES else f"{v:.7g}" for k, v in row.items()} for row in rows
        )


def missed(rows: Sequence[Any], told: float = 0.01, expected: float = 0.02) -> list[str]:
    """Return the rows whose counted bytes are off by more than the tolerances."""
    return [
        f"{row['job']} {row['arm']}" for row in rows
        if abs(row.get("off", 0.0)) > told
        or abs(row.get("off_expected", 0.0)) > expected
        or row["bits"] > row.get("most_bits", float("inf"))
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and report; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--jobs", nargs="+", metavar="NAME", help="default: all")
    add("--data", type=Path, default=Path("data/text"), metavar="PREFIX")
    add("--out", type=Path, metavar="FILE", help="CSV; jobs that are there are not trained again")
    add("--steps", type=int, default=8)
    add("--timeout", type=float, default=600.0, metavar="S", help="of a start or a step")
    add("--check", action="store_true")
    asked = parser.parse_args(arguments)
    data = asked.data.resolve()
    sizes = Sizes(layers=4, width=256, length=128, divide_batch=4, warm=WARM, steps=asked.steps)
    numel, root = parameters_of(data, sizes)
    there = asked.out is not None and asked.out.is_file()
    rows: list[Any] = read(asked.out) if there else []
    for case in cases():
        own = case.job, case.layout, case.arm.name
        known = any((row["job"], row["layout"], row["arm"]) == own for row in rows)
        if known or (asked.jobs and case.job not in asked.jobs):
            continue
        try:
            trained = train(case, sizes, data, asked.timeout)
            rows.append(figures(case, *trained, numel, root))
        except CellError as error:
            print(f"count_bytes: {case.job} {case.arm.name}: {error}", file=sys.stderr)
            return 1
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        if asked.out is not None:
            write(asked.out, rows)
    print(f"\n{numel} parameters\n\n{table(rows)}")
    far = missed(rows)
    if far:
        print(f"further off than 1 % (told) or 2 % (expected): {', '.join(far)}")
    return int(asked.check and bool(far))


if __name__ == "__main__":
    sys.exit(main())
