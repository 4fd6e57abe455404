#!/usr/bin/env python3
"""Measure what presets and any block cost in loss: many seeds, several layouts, one command.

loss_study.py --steps 1000 --seeds 0 1 2 --blocks bound.json

Trains the example (scripts/train_gpt.py) natively and under each block, paired by seed, through the
launcher, and prints one table for each layout with a picture of the curves. A run that finished is
not repeated: started again, the study goes on where it was cut off.

--blocks FILE holds {"name": block, ...} or {"layout": {"name": block, ...}}, beside the presets.
--islands H ... adds islands of one rank that meet every H steps (DiLoCo), by bits, and sparse ones.
--after N trains natively for N steps first, with a checkpoint, and all runs go on from that.
--peers NAME ... trains other methods too (scripts/bench/train_peer.py), where a layout is data
parallel: under torch's own engines (ddp2, fsdp2) torch's own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from hybridcomp.compare import CompareError, Wishes, compare_runs, launch
from hybridcomp.errors import install_hint

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(SCRIPTS))
CONFIGS = SCRIPTS.parent / "configs"
BASELINE = launch.BASELINE
PRESETS = ("naive-zfp", "naive-mpc", "mzhybrid", "zhybrid", "recommended")
#: the run that ends in the checkpoint that the others go on from
BEFORE = "before"


Engine = Literal["deepspeed", "ddp", "fsdp2"]


@dataclass(frozen=True)
class Layout:
    """Layout of the ranks: its DeepSpeed file, their number and the arguments of the example."""

    config: str  # the committed file without a block
    ranks: int
    arguments: tuple[str, ...] = ()
    peers: bool = False  # whether this is data parallelism and nothing else
    engine: Engine = "deepspeed"

    @property
    def known_peers(self) -> tuple[str, ...]:
        """Return the peers that ``--peers`` may name under this layout."""
        from bench.peers.methods import PEERS
        from bench.peers.torch_engines import METHODS

        if self.engine == "deepspeed":
            return tuple(PEERS) if self.peers else ()
        return tuple(METHODS[self.engine])


LAYOUTS = {
    "dp2": Layout("ds_zero1_baseline.json", 2, peers=True),
    "dp2z0": Layout("ds_zero0_baseline.json", 2, peers=True),  # whose checkpoints fit any island
    "pp2": Layout("ds_pipe2_baseline.json", 2, ("--pp", "2")),
    "pp2dp2": Layout("ds_pipe2_baseline.json", 4, ("--pp", "2")),
    "3d": Layout("ds_3d_baseline.json", 8, ("--tp", "2", "--pp", "2")),
    "tp2d": Layout("ds_zero0_baseline.json", 4, ("--tp2d", "2")),  # which no preset names
    "cp4": Layout("ds_zero1_baseline.json", 4, ("--cp", "4")),  # nor this
    "ddp2": Layout("ds_zero1_baseline.json", 2, ("--engine", "ddp"), engine="ddp"),
    "fsdp2": Layout("ds_zero1_baseline.json", 2, ("--engine", "fsdp2"), engine="fsdp2"),
}


@dataclass(frozen=True)
class Case:
    """One training."""

    layout: str
    name: str
    block: dict[str, Any] | None
    seed: int
    peer: str | None = None  # of scripts/bench/peers

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
    settings["scheduler"] = {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_max_lr": optimizer["lr"],
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
    program, more = "train_gpt.py", list(layout.arguments)
    if case.peer is not None:
        program, more = "bench/train_peer.py", [*more, "--method", case.peer]
    command = [
        *launcher(layout, case.block is not None), str(SCRIPTS / program),
        "--deepspeed_config", str(config), "--data", str(options.data),
        "--steps", str(options.after + options.steps), "--seed", str(case.seed),
        "--print-every", "100", "--log", str(folder / "loss.jsonl"), *more,
        *checkpoint(case, options),
    ]  # fmt: skip
    variables = environment(folder)
    if layout.engine != "deepspeed" and case.block is not None:
        variables["HYBRIDCOMP_CONFIG"] = str(config)  # torch's engines know no such file
    config.write_text(json.dumps(settings, indent=1))
    name = f"{case.layout} {case.name} seed {case.seed}"
    return launch.LaunchedTraining(name, folder, command, settings, variables).run()


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
        "--divide-batch",
        type=int,
        default=1,
        metavar="N",
        help="smaller batches, for slow machines",
    )
    add("--islands", type=int, nargs="*", default=[], metavar="H", help="steps between meetings")
    add("--after", type=int, default=0, metavar="N", help="native steps before --steps (0)")
    add("--peers", nargs="*", metavar="NAME", default=[], help="of scripts/bench/train_peer.py")
    add("--blocks", type=Path, metavar="FILE", help="further blocks, JSON")
    add("--data", type=Path, default=Path("data/text"), metavar="PREFIX")
    add("--out", type=Path, default=Path("runs/loss_study"), metavar="FOLDER")
    found = parser.parse_args(arguments)
    found.out, found.data = found.out.resolve(), found.data.resolve()
    if found.after and (found.peers or found.layouts != ["dp2z0"]):
        parser.error("--after: expected --layouts dp2z0 and no --peers, which load no checkpoint")
    for name in found.peers:
        if not any(name in LAYOUTS[layout].known_peers for layout in found.layouts):
            parser.error(f"--peers: no layout of {' '.join(found.layouts)} has {name!r}")
    if not found.data.with_name(f"{found.data.name}_train.idx").is_file():
        parser.error(f"--data: no dataset {found.data}; scripts/prepare_data.py writes one")
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
    cases = list(cases_of(options))
    for number, case in enumerate(cases, 1):
        seconds = train(case, options)
        took = "there already" if seconds is None else f"{seconds:.0f} s"
        print(
            f"{number}/{len(cases)} {case.layout} {case.name} seed {case.seed}: {took}", flush=True
        )
    tables(options)


if __name__ == "__main__":
    main()
