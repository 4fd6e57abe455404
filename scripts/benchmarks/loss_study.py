#!/usr/bin/env python3
"""Measure what presets and any block cost in loss: many seeds, several layouts, one command.

loss_study.py --steps 1000 --seeds 0 1 2 --blocks bound.json

Trains the example (train_gpt.py) natively and under each block, paired by seed, through the
launcher, and prints one table for each layout with a picture of the curves. A run that finished is
not repeated: started again, the study goes on where it was cut off.

--blocks FILE holds {"name": block, ...} or {"layout": {"name": block, ...}}, beside the presets.
--islands H ... adds islands of one rank that meet every H steps (DiLoCo), by bits, and sparse ones.
--after N trains natively for N steps first, with a checkpoint, and all runs go on from that.
--peers NAME ... trains other methods too (train_peer.py), where a layout is data
parallel: under torch's own engines (ddp2, fsdp2) torch's own.
--model LAYERS WIDTH HEADS and --muon-lr LR train another size, and with DeepSpeed's Muon.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridcomp.errors import install_hint
from hybridcomp.tools.compare import CompareError, Wishes, compare_runs, launch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/, as the import below
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))  # gpt, train_gpt

from benchmarks.loss_layouts import LAYOUTS, Layout

SCRIPTS = Path(__file__).resolve().parents[1]
CONFIGS = SCRIPTS.parent / "configs"
BASELINE = launch.BASELINE
PRESETS = ("naive-zfp", "naive-mpc", "mzhybrid", "zhybrid", "recommended")
#: the run that ends in the checkpoint that the others go on from
BEFORE = "before"
#: beside the runs: the commands that made them, a line each
COMMANDS = "commands.txt"
#: of Nesterov's momentum, as Muon's author has it
MUON_MOMENTUM = 0.95


@dataclass(frozen=True)
class Case:
    """One training."""

    layout: str
    name: str
    block: dict[str, Any] | None
    seed: int
    peer: str | None = None  # of scripts/benchmarks/peers

    def folder(self, out: Path) -> Path:
        """Return the folder of its files."""
        return out / self.layout / self.name / f"seed{self.seed}"


def settings_of(case: Case, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the committed file with the block and a learning rate that falls to zero.

    With a constant one the last losses of two seeds differ by more than a codec does.
    """
    steps = options.after + options.steps
    settings: dict[str, Any] = json.loads((CONFIGS / LAYOUTS[case.layout].config).read_text())
    batch = settings["train_micro_batch_size_per_gpu"]
    if batch % options.divide_batch:
        raise SystemExit(f"--divide-batch: expected a divisor of {batch} ({case.layout})")
    settings["train_micro_batch_size_per_gpu"] = batch // options.divide_batch
    optimizer = settings["optimizer"]["params"]
    optimizer["lr"] = options.lr or optimizer["lr"]
    highest: float | list[float] = optimizer["lr"]
    if options.muon_lr:  # whose groups are the matrices and, with AdamW, all the rest
        decay = {"momentum": MUON_MOMENTUM, "weight_decay": optimizer["weight_decay"]}
        rates = {"muon_lr": options.muon_lr, "adam_lr": optimizer["lr"]}
        settings["optimizer"] = {
            "type": "Muon",
            "params": {**rates, **decay, "betas": optimizer["betas"], "torch_adam": True},
        }
        highest = list(rates.values())
    settings["scheduler"] = {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_max_lr": highest,
            "warmup_num_steps": max(2, steps // 10),
            "total_num_steps": steps,
        },
    }
    if case.block is not None:
        settings["compression"] = launch.ledger_in(case.block, folder)
    return settings


def train(case: Case, options: argparse.Namespace) -> float | None:
    """Train; return its seconds, None where it was there already. Raises CompareError."""
    folder = case.folder(options.out)
    settings = settings_of(case, options, folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "ds_config.json"
    layout = LAYOUTS[case.layout]
    program, more = "examples/train_gpt.py", list(layout.arguments)
    if case.peer is not None:
        program, more = "benchmarks/train_peer.py", [*more, "--method", case.peer]
    command = [
        *launcher(layout, case.block is not None), str(SCRIPTS / program),
        "--deepspeed_config", str(config), "--data", str(options.data),
        "--steps", str(options.after + options.steps), "--seed", str(case.seed),
        "--print-every", "100", "--log", str(folder / "loss.jsonl"), *more,
        *size(options), *checkpoint(case, options),
    ]  # fmt: skip
    variables = environment(folder)
    if layout.engine != "deepspeed" and case.block is not None:
        variables["HYBRIDCOMP_CONFIG"] = str(config)  # torch's engines know no such file
    config.write_text(json.dumps(settings, indent=1))
    name = f"{case.layout} {case.name} seed {case.seed}"
    return launch.LaunchedTraining(name, folder, command, settings, variables).run()


def size(options: argparse.Namespace) -> list[str]:
    """Return the words that give the example another size."""
    words = zip(("--layers", "--width", "--heads"), options.model or (), strict=False)
    return [str(word) for pair in words for word in pair]


def checkpoint(case: Case, options: argparse.Namespace) -> list[str]:
    """Return the words by which a run ends in the checkpoint of its seed, or goes on from it."""
    if not options.after:
        return []
    before = replace(case, name=BEFORE)
    kept = str(before.folder(options.out) / "checkpoint")
    if case == before:
        return ["--steps", str(options.after), "--save", kept]  # argparse takes the last
    return ["--load", kept]


def launcher(layout: Layout, patched: bool) -> list[str]:
    """Return the words before the script: DeepSpeed's launcher, or torch's for its own engines."""
    port = str(launch.free_port())
    if layout.engine == "deepspeed":
        words = ["deepspeed", "--num_gpus", str(layout.ranks), "--master_addr", "127.0.0.1"]
        return [*words, "--master_port", port, *(["--module", launch.MODULE] if patched else [])]
    words = ["torchrun", "--nproc-per-node", str(layout.ranks), "--master-addr", "127.0.0.1"]
    words += ["--master-port", port]
    # without "--" torchrun takes --log of the script for an abbreviation of its own
    return [*words, *(["-m", "--", launch.MODULE] if patched else ["--"])]


def environment(folder: Path) -> dict[str, str]:
    """Return the launcher's environment: this interpreter's commands first, its own extensions."""
    given = os.environ
    found = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{given['PATH']}",
        "OMP_NUM_THREADS": given.get("OMP_NUM_THREADS", "1"),
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
    }
    if Path("/sys/class/net/lo").exists():
        found["GLOO_SOCKET_IFNAME"] = given.get("GLOO_SOCKET_IFNAME", "lo")
    return found


def blocks_of(options: argparse.Namespace, layout: str) -> dict[str, dict[str, Any] | None]:
    """Return the blocks by name that are trained in ``layout``, the baseline first."""
    found: dict[str, dict[str, Any] | None] = {BASELINE: None}
    found.update({name: {"preset": name, "when": "always"} for name in options.presets})
    found.update(block for every in options.islands for block in islands(every))
    if options.blocks:
        written = json.loads(options.blocks.read_text())
        known = {key for key in written if key in LAYOUTS}
        if known and known != set(written):
            raise SystemExit(f"{options.blocks}: names layouts and blocks at one level; separate")
        found.update(written.get(layout, {}) if known else written)
    return found


def islands(every: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield blocks of islands that meet every ``every`` steps: exact, by bits, and sparse."""
    common = {"islands": 1, "every": every}
    yield f"H{every} fp32", {"sync": {**common, "preset": "diloco"}}
    for bits in (8, 4, 2):
        coded = {"codec": "blockint", "bits": bits, "error_feedback": True}
        yield f"H{every} {bits} bits", {"sync": {**common, "preset": "diloco", **coded}}
    yield f"H{every} sparse", {"sync": {**common, "preset": "sparseloco"}}


def cases_of(options: argparse.Namespace) -> Iterator[Case]:
    """List the cases seed by seed, so that a study that is cut off has whole seeds."""
    for seed in options.seeds:
        for layout in options.layouts:
            if options.after:
                yield Case(layout, BEFORE, None, seed)
            for name, block in blocks_of(options, layout).items():
                yield Case(layout, name, block, seed)
            for name in peers_of(options, layout):
                yield Case(layout, f"peer {name}", None, seed, name)


def peers_of(options: argparse.Namespace, layout: str) -> list[str]:
    """Return the peers that are trained in ``layout``."""
    return [name for name in options.peers if name in LAYOUTS[layout].known_peers]


def tables(options: argparse.Namespace) -> None:
    """Compare the runs of each layout."""
    for layout in options.layouts:
        peers = [f"peer {name}" for name in peers_of(options, layout)]
        runs = [
            f"{name}={options.out / layout / name}/seed*/loss.jsonl"
            for name in [*blocks_of(options, layout), *peers]
        ]
        print(f"\n{layout}: {options.steps} steps, seeds {' '.join(map(str, options.seeds))}\n")
        title = f"{layout}: presets and error bounds, {options.steps} steps"
        wishes = Wishes(options.out / layout, title=title, need_ledger=True, wandb="none")
        compare_runs(runs, wishes)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=1000)
    add(
        "--lr",
        type=float,
        help="instead of the committed files'; where it is high and the batch small, two runs that "
        "differ in one bit end a per cent apart, and no codec can be told from another",
    )
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--layouts", nargs="+", choices=list(LAYOUTS), default=["dp2", "pp2"])
    add("--presets", nargs="*", choices=PRESETS, default=list(PRESETS))
    add(
        "--muon-lr",
        type=float,
        metavar="LR",
        help="train all matrices with DeepSpeed's Muon at this rate, norms and biases with AdamW "
        "at --lr",
    )
    add(
        "--model",
        type=int,
        nargs=3,
        metavar=("LAYERS", "WIDTH", "HEADS"),
        help="another size of the example (4 128 4: 0.85 M parameters)",
    )
    add(
        "--divide-batch",
        type=int,
        default=1,
        metavar="N",
        help="smaller batches, for slow machines",
    )
    add("--islands", type=int, nargs="*", default=[], metavar="H", help="steps between meetings")
    add("--after", type=int, default=0, metavar="N", help="native steps before --steps (0)")
    add("--peers", nargs="*", metavar="NAME", default=[], help="of train_peer.py")
    add("--blocks", type=Path, metavar="FILE", help="further blocks, JSON")
    add("--data", type=Path, default=Path("data/text"), metavar="PREFIX")
    add("--out", type=Path, default=Path("runs/loss_study"), metavar="FOLDER")
    found = parser.parse_args(arguments)
    found.out, found.data = found.out.resolve(), found.data.resolve()
    if found.after and (found.peers or found.layouts != ["dp2z0"]):
        parser.error("--after: expected --layouts dp2z0 and no --peers, which load no checkpoint")
    if found.muon_lr and any(LAYOUTS[name].engine != "deepspeed" for name in found.layouts):
        parser.error("--muon-lr: expected layouts of DeepSpeed, whose optimizer it is")
    for name in found.peers:
        if not any(name in LAYOUTS[layout].known_peers for layout in found.layouts):
            parser.error(f"--peers: no layout of {' '.join(found.layouts)} has {name!r}")
    if not found.data.with_name(f"{found.data.name}_train.idx").is_file():
        parser.error(f"--data: no dataset {found.data}; prepare_data.py writes one")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is missing, then compare."""
    options = parse(arguments)
    try:
        study(options)
    except CompareError as error:
        raise SystemExit(f"loss_study: {error}") from None


def study(options: argparse.Namespace) -> None:
    """Train every case, then compare. Raises CompareError, for a lacking package at once."""
    if find_spec("matplotlib") is None:
        raise CompareError(f"the pictures need matplotlib: {install_hint('plot')}")
    write_command(options)
    cases = list(cases_of(options))
    for number, case in enumerate(cases, 1):
        seconds = train(case, options)
        took = "there already" if seconds is None else f"{seconds:.0f} s"
        print(
            f"{number}/{len(cases)} {case.layout} {case.name} seed {case.seed}: {took}", flush=True
        )
    tables(options)


def write_command(options: argparse.Namespace) -> None:
    """Add this command to commands.txt beside the runs, without folders of this machine."""
    told = {name: value for name, value in vars(options).items() if name not in ("data", "out")}
    words = ["scripts/benchmarks/loss_study.py"]
    for name, value in told.items():
        if value or name == "presets":  # all where the option is left out
            values = value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    line = shlex.join(words)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / COMMANDS
    known = file.read_text().splitlines() if file.is_file() else []
    if line not in known:
        file.write_text("\n".join([*known, line, ""]))


if __name__ == "__main__":
    main()
