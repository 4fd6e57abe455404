"""List layouts of ranks, arms (ways to train) and cells (an arm at a rate, once)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

SCRIPTS = Path(__file__).resolve().parents[2]
CONFIGS = SCRIPTS.parent / "configs"
REFERENCE = "native bf16"
#: layouts whose ranks hold no unsharded parameters to which a delta could be added
NO_DELTAS = ("zero3", "zero3_twice", "hpz", "fsdp2", "hsdp")
#: prefix of schemes that compress fp32 messages, as in the paper
FP32 = "fp32 "
PRESETS = ("naive-zfp", "naive-mpc", "mzhybrid", "zhybrid", "recommended")
#: bounds of configs/README.md, error feedback on gradients; unused dimensions are dropped
BOUND: dict[str, Any] = {
    "dp": {"error_bound": 0.02, "error_feedback": True},
    **{name: {"error_bound": 0.01} for name in ("zero", "tp", "pp")},
}
DELTA: dict[str, Any] = {
    "dp": {"codec": "blockint", "bits": 4, "error_feedback": True},
    "zero": {"codec": "blockint", "bits": 4, "delta": True},
}
#: settings of DeepSpeed's own compression, which needs ZeRO 3 and a GPU
ZEROPP: dict[str, dict[str, Any]] = {
    "ZeRO++ qwZ": {"zero_quantized_weights": True},
    "ZeRO++ qgZ": {"zero_quantized_gradients": True},
}
#: settings that make ZeRO 3 gather parameters in both forward and backward pass, as above a billion
#: parameters; a smaller model would keep them gathered
TWICE = (
    ("stage3_max_reuse_distance", 0),
    ("stage3_max_live_parameters", 0),
    ("stage3_prefetch_bucket_size", 0),
)


Engine = Literal["deepspeed", "ddp", "fsdp2", "hsdp"]


@dataclass(frozen=True)
class Layout:
    """Placement of the ranks on the nodes of the lab."""

    config: str  # committed file, whose compression block is left out
    lab: str  # in the format of scripts/netlab.py
    dimensions: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    peers: bool = False  # pure data parallelism, the only kind that peers support
    engine: Engine = "deepspeed"
    whole_batch: bool = False  # all ranks share the samples, so they are not divided
    zero: tuple[tuple[str, Any], ...] = ()  # added to "zero_optimization"

    @property
    def nodes(self) -> int:
        """Return the number of nodes of the lab."""
        return sum(int(n) for n in self.lab.partition("x")[0].split("+"))

    @property
    def per_node(self) -> int:
        """Return the ranks per node."""
        return int(self.lab.partition("x")[2] or 1)


LAYOUTS = {
    "dp2": Layout("ds_zero0_recommended.json", "2", ("dp",), peers=True),
    "zero1": Layout("ds_zero1_recommended.json", "2", ("dp", "zero")),
    "zero2": Layout("ds_zero2_recommended.json", "2", ("dp", "zero")),
    "zero3": Layout("ds_zero3_recommended.json", "2", ("dp", "zero")),
    "zero3_twice": Layout("ds_zero3_recommended.json", "2", ("dp", "zero"), zero=TWICE),
    # secondary shards need several ranks per node: with one they save nothing
    "hpz": Layout(
        "ds_zero3_recommended.json",
        "2x2",
        ("dp", "zero"),
        zero=(*TWICE, ("zero_hpz_partition_size", 2)),
    ),
    "tp2": Layout("ds_zero0_recommended.json", "2", ("tp",), ("--tp", "2")),
    "pp2": Layout("ds_pipe2_recommended.json", "2", ("pp",), ("--pp", "2")),
    "tp2pp2": Layout("ds_pipe2_recommended.json", "4", ("tp", "pp"), ("--tp", "2", "--pp", "2")),
    # bf16 without ZeRO is BF16_Optimizer in a pipeline, which still gathers parameters
    "dp2pp2": Layout("ds_pipe2_recommended.json", "4", ("dp", "zero", "pp"), ("--pp", "2")),
    "asymmetric": Layout("ds_zero1_recommended.json", "2x2", ("dp", "zero"), peers=True),
    # activations are sharded too, so every matmul broadcasts
    "tp2d": Layout("ds_zero0_recommended.json", "4", ("tp2d",), ("--tp2d", "2"), whole_batch=True),
    # torch's engines take batch sizes, optimizer, clipping and bf16 from the file
    "ddp": Layout(
        "ds_zero0_recommended.json", "2", ("dp",), ("--engine", "ddp"), peers=True, engine="ddp"
    ),
    "fsdp2": Layout(
        "ds_zero0_recommended.json",
        "2",
        ("dp", "zero"),
        ("--engine", "fsdp2"),
        peers=True,
        engine="fsdp2",
    ),
    # replicas on two nodes, shards inside each
    "hsdp": Layout(
        "ds_zero0_recommended.json",
        "2x2",
        ("dp", "zero"),
        ("--engine", "hsdp"),
        peers=True,
        engine="hsdp",
    ),
    # eight ranks: all three dimensions of the paper
    "3d": Layout(
        "ds_3d_recommended.json", "8", ("dp", "zero", "tp", "pp"), ("--tp", "2", "--pp", "2")
    ),
}


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    name: str
    bf16: bool = True
    block: tuple[tuple[str, Any], ...] | None = None  # items of a "compression" block
    zero: tuple[tuple[str, Any], ...] = ()  # added to "zero_optimization"
    peer: str | None = None  # a module of scripts/benchmarks/peers

    @property
    def stem(self) -> str:
        """Return the file name stem."""
        return self.name.replace(" ", "_")


def arms_of(layout: str, chosen: list[str] | None = None) -> list[Arm]:
    """Return the arms of a layout, the reference first; ``chosen`` selects by name.

    Raises ValueError for an unknown name.
    """
    dimensions, engine = LAYOUTS[layout].dimensions, LAYOUTS[layout].engine
    if layout == "tp2d":
        return _wanted(layout, _mesh_arms(), chosen)
    blocks: dict[str, dict[str, Any]] = {name: {"preset": name} for name in PRESETS}
    blocks["bound"] = {name: value for name, value in BOUND.items() if name in dimensions}
    if "zero" in dimensions and layout not in NO_DELTAS:
        model = [name for name in dimensions if name in ("tp", "pp")]
        blocks["delta"] = {**DELTA, **{name: {"codec": "blockint", "bits": 8} for name in model}}
    # "recommended" stays native where the link is faster than the codec, as on a loopback
    switching = {name: {"when": "auto"} for name in dimensions}
    blocks["recommended"]["when"] = "always"  # force it on
    blocks["recommended when auto"] = {"preset": "recommended", **switching}
    if layout == "hpz":
        for name, secondary in (("secondary", "exact"), ("secondary 8 bits", {"bits": 8})):
            blocks[name] = {**blocks["recommended"], "zero": {"secondary": secondary}}
    if LAYOUTS[layout].per_node > 1:
        for name in ("recommended", "bound"):
            blocks[f"{name} nodes"] = {**blocks[name], "hierarchy": "auto"}
    arms = [Arm(REFERENCE), Arm("native fp32", bf16=False)]
    arms += [Arm(name, block=tuple(block.items())) for name, block in blocks.items()]
    if layout == "3d":
        schemes = [name for name in PRESETS if name != "naive-mpc"]
        arms += [Arm(FP32 + n, bf16=False, block=tuple(blocks[n].items())) for n in schemes]
    if layout == "zero3":
        arms += [Arm(name, zero=tuple(keys.items())) for name, keys in ZEROPP.items()]
    if LAYOUTS[layout].peers:
        arms += [Arm(f"peer {name}", peer=name) for name in _peers(engine)]
    return _wanted(layout, arms, chosen)


def _mesh_arms() -> list[Arm]:
    """Return the arms of two-dimensional tensor parallelism, which no preset or peer supports."""
    whole: dict[str, Any] = {"codec": "blockint", "bits": 8}
    blocks: dict[str, dict[str, Any]] = {
        "8 bits": {"tp2d": whole},
        "8 bits, gradients lossless": {"tp2d": {**whole, "gradients": {"codec": "expcode"}}},
        "lossless": {"tp2d": {"codec": "expcode"}},
    }
    native = [Arm(REFERENCE), Arm("native fp32", bf16=False)]
    return native + [Arm(name, block=tuple(block.items())) for name, block in blocks.items()]


def _wanted(layout: str, arms: list[Arm], chosen: list[str] | None) -> list[Arm]:
    """Return the reference and the arms in ``chosen``. Raises ValueError as ``arms_of``."""
    if chosen is None:
        return arms
    known = {arm.name: arm for arm in arms}
    for name in chosen:
        if name not in known:
            raise ValueError(f"{layout}: no arm {name!r}; expected some of {', '.join(known)}")
    return [arm for arm in arms if arm.name == REFERENCE or arm.name in chosen]


def _peers(engine: Engine) -> Iterable[str]:
    """Return an engine's peers: torch's methods under torch's engines."""
    from benchmarks.peers.methods import PEERS
    from benchmarks.peers.torch_engines import METHODS

    return PEERS if engine == "deepspeed" else METHODS[engine]


@dataclass(frozen=True)
class Sizes:
    """Model and batch sizes, the same in every training."""

    layers: int
    width: int
    length: int
    divide_batch: int
    warm: int  # untimed steps first
    steps: int  # timed

    def arguments(self) -> list[str]:
        """Return the arguments for both trainers."""
        total = self.warm + self.steps
        return [
            "--layers", str(self.layers), "--width", str(self.width), "--length",
            str(self.length), "--steps", str(total), "--eval-batches", "0",
            "--print-every", str(total),
        ]  # fmt: skip


def native_settings(layout: str) -> dict[str, Any]:
    """Return the DeepSpeed file of a layout, without a block."""
    settings: dict[str, Any] = json.loads((CONFIGS / LAYOUTS[layout].config).read_text())
    del settings["compression"]
    return settings


def settings_of(layout: str, arm: Arm, sizes: Sizes, ledger: Path) -> dict[str, Any]:
    """Return the DeepSpeed file of a cell."""
    settings = native_settings(layout)
    batch = settings["train_micro_batch_size_per_gpu"]
    divide = 1 if LAYOUTS[layout].whole_batch else sizes.divide_batch
    settings["train_micro_batch_size_per_gpu"] = max(1, batch // divide)
    # a single ledger report, at the last step
    settings["steps_per_print"] = sizes.warm + sizes.steps
    settings["bf16"] = {"enabled": arm.bf16}
    settings["zero_optimization"] |= dict(LAYOUTS[layout].zero) | dict(arm.zero)
    if arm.block is not None:
        settings["compression"] = {**dict(arm.block), "ledger": {"jsonl": str(ledger)}}
    return settings


def command_of(
    layout: str, arm: Arm, sizes: Sizes, config: Path, data: Path, seed: int
) -> list[str]:
    """Return every rank's command line, after the interpreter."""
    patched = [] if arm.block is None else ["-m", "hybridcomp.run"]
    program, more = "train_gpt", list(LAYOUTS[layout].arguments)
    if arm.peer is not None:
        program = "benchmarks.train_peer"
        # compress from the first timed step on: warm-up matters for losses, not for speed
        more += ["--method", arm.peer, "--per-node", str(LAYOUTS[layout].per_node),
                 "--start", str(sizes.warm)]  # fmt: skip
    return [
        *patched, str(SCRIPTS / "benchmarks/training_bench/worker.py"), program,
        "--deepspeed_config", str(config), "--data", str(data), "--seed", str(seed),
        *sizes.arguments(), *more,
    ]  # fmt: skip
