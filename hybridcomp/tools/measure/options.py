"""Arguments of ``hybridcomp measure``, without torch, which takes seconds to import."""

from __future__ import annotations

import argparse
from pathlib import Path

#: dtypes that messages may have
DTYPES = ("fp32", "bf16", "fp16")
HOW = """\
hybridcomp measure times the links between ranks, so a launcher starts it on all of them, like a
training:

    torchrun --nnodes N --nproc-per-node R ... -m hybridcomp.tools.measure --out cluster.json
    deepspeed --hostfile HOSTS --module hybridcomp.tools.measure --out cluster.json
    srun ... python -m hybridcomp.tools.measure --out cluster.json  (with RANK, WORLD_SIZE, ... set)

One device alone, without links:

    torchrun --nproc-per-node 1 -m hybridcomp.tools.measure --out cluster.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to ``parser``."""
    add = parser.add_argument
    add("--out", type=Path, default=Path("cluster.json"), metavar="FILE",
        help="written by rank 0 (cluster.json)")  # fmt: skip
    add("--seconds", type=float, default=90.0, metavar="S",
        help="that it may take (90); slow links may need more")  # fmt: skip
    add("--dtype", choices=DTYPES, default="bf16", help="of messages (bf16)")
    add("--block", action="append", default=[], metavar="BATCHxLENGTHxWIDTH[xHEADS]",
        help="a transformer block to time, not the usual ones; repeatable")  # fmt: skip
    add("--ranks-per-node", type=int, metavar="N",
        help="consecutive ranks that share a node, where the launcher does not say")  # fmt: skip
    add("--nodes-per-site", metavar="N",
        help="consecutive nodes that share a switch or a site, whose uplinks are timed then; "
        "auto: as Slurm tells")  # fmt: skip
    add("--drive", type=Path, metavar="FOLDER",
        help="of each node's drive, to time its files, for plans with states on NVMe")  # fmt: skip
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if any")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # set by DeepSpeed's launcher
