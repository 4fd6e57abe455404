"""Arguments of ``hybridcomp plan``.

Imports nothing of the planner, which needs torch: help and completion come at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """\
Which layout, which ZeRO stage, which codec and how many bits, on this cluster.

  hybridcomp measure ...                     (once, on the machines; writes cluster.json)
  hybridcomp plan config.json --samples 256 --length 2048

MODEL is a config.json of Hugging Face, a GPT-NeoX YAML, a file with Megatron's arguments, or
package:callable of a torch module. The answer is a ranked table with reasons, a picture, and a
folder with plan.json and the files that start it.

  hybridcomp plan MODEL ... --try 3 -- deepspeed --num_gpus 8 train.py --tp {tensor} \\
      --pp {stages} --deepspeed_config {config} --steps 20

runs the best three for some steps and keeps the fastest; {tensor}, {stages}, {cuts}, {context},
{context_way}, {mesh}, {slices}, {expert}, {recompute}, {layers}, {micro_batch}, {accumulation},
{config}, {folder} and {port} are filled in.

  hybridcomp plan --check runs/first --plan plans/plan.json

holds a finished run against its plan.

  hybridcomp plan --jobs jobs.json

decides how many ranks each of several jobs gets, and writes what starts them; --replay holds that
against other ways to share.
"""
#: names that the planner defines; a test compares them
ENGINES, DTYPES = ("deepspeed", "megatron", "neox", "fsdp2"), ("bf16", "fp16", "fp32")
NAMES = ("recommended", "lossless", "native")
CLUSTER = Path("cluster.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    add = parser.add_argument
    add("model", nargs="?", help="config.json, YAML, Megatron's arguments, or package:callable")
    add(
        "--cluster",
        type=Path,
        default=CLUSTER,
        metavar="FILE",
        help="what hybridcomp measure wrote, or a description by hand (cluster.json)",
    )
    add("--jobs", type=Path, metavar="FILE", help="share the cluster among the jobs of FILE")
    add("--replay", action="store_true", help="with --jobs: from their arrival to their ends")
    add("--now", type=float, default=0.0, metavar="S", help="with --jobs: later ones wait (0)")
    add("--scheduler", choices=("plain", "slurm"), default="plain", help="with --jobs: who starts")
    add("--samples", type=int, metavar="N", help="sequences of an optimizer step, whole job")
    add("--length", type=int, metavar="N", help="tokens of a sequence")
    add(
        "--budget",
        default="recommended",
        metavar="ERROR",
        help=f"{', '.join(NAMES)}, or JSON with one of them, an error bound or settings for each "
        'dimension, such as \'{"dp": 0.02, "pp": "lossless"}\' (recommended)',
    )
    add("--engine", choices=ENGINES, default="deepspeed")
    add(
        "--dtype",
        choices=DTYPES,
        help="of weights and messages (the first of these that the cluster's file has figures for)",
    )
    add("--ranks", type=int, metavar="N", help="how many of the cluster's to use (all)")
    add(
        "--fix",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what is decided already: tensor, stages, zero_stage, micro_batch, recompute, ...",
    )
    add("--most-micro-batch", type=int, default=64, metavar="N", help="sequences, at most (64)")
    add(
        "--memory",
        type=float,
        default=0.92,
        metavar="SHARE",
        help="of a device's memory that may be filled (0.92)",
    )
    add("--no-recompute", action="store_true", help="never compute a layer twice")
    add(
        "--own-cuts",
        default="",
        metavar="NAMES",
        help="cuts of hybridcomp.nn that your script can build, of ring, tp2d and slices with "
        "commas between; {mesh} and {slices} in its command say so as well",
    )
    add(
        "--frozen",
        type=_frozen,
        metavar="N or SHARE",
        help="first blocks that train no more, or share of the parameters that do not train, such "
        "as 0.99 under LoRA (none)",
    )
    add("--offload", action="store_true", help="optimizer states may lie on the host")
    add("--out", type=Path, default=Path("plans"), metavar="FOLDER", help="of all files (plans)")
    add(
        "--base",
        type=Path,
        metavar="FILE",
        help="your DeepSpeed or GPT-NeoX file; what the plan does not decide is taken over",
    )
    add(
        "--try",
        type=int,
        default=0,
        metavar="N",
        dest="tries",
        help="run the best N for the steps of -- COMMAND, and keep the fastest",
    )
    add("--check", type=Path, metavar="RUN", help="a finished run's folder, against --plan")
    add("--plan", type=Path, metavar="FILE", help="with --check (plans/plan.json)")


def _frozen(text: str) -> float:
    """Read a number of blocks, an int, or a share, a float."""
    return int(text) if text.isdecimal() else float(text)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split ``words`` into the planner's arguments and the command behind ``--``."""
    found = list(words)
    if "--" not in found:
        return found, []
    return found[: found.index("--")], found[found.index("--") + 1 :]
