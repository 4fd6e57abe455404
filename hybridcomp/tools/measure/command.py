"""Run the command line of ``hybridcomp measure``, the same under every launcher."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from hybridcomp.collectives.hierarchical.discovery import Hierarchy
from hybridcomp.errors import ConfigError, HybridcompError
from hybridcomp.job import peer_liveness
from hybridcomp.job.together import ending, together
from hybridcomp.log import say
from hybridcomp.session import closing
from hybridcomp.tools.measure import remembered
from hybridcomp.tools.measure.block import BlockSize
from hybridcomp.tools.measure.options import HOW, add_arguments
from hybridcomp.tools.measure.report import lines
from hybridcomp.tools.measure.run import measure
from hybridcomp.tools.plan.machines import cluster_file
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.missing import missing

#: exit status where nothing was measured
NOT_STARTED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m hybridcomp.tools.measure`` and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="hybridcomp.tools.measure", description=HOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        return run(options)
    except HybridcompError as error:
        print(f"hybridcomp: {error}", file=sys.stderr)
        return NOT_STARTED


def run(options: argparse.Namespace) -> int:
    """Measure, write the file and return the exit status. Without a launcher print how to start."""
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        print(HOW, end="")
        return NOT_STARTED
    device, blocks = _device(options), _looked_at(options)
    mine = not dist.is_initialized()
    if mine:
        _meet(device)
    peer_liveness.announce()  # so that the error names a rank that ends meanwhile
    try:
        hierarchy = _hierarchy(options)
        with ending("hybridcomp measure"):
            with _naming_the_lost():
                cluster = measure(
                    device, options.seconds, hierarchy=hierarchy, dtype=options.dtype,
                    blocks=blocks, drive=options.drive,
                )  # fmt: skip
            kept = remembered.keep(cluster, device)
        with together("hybridcomp measure"):
            if dist.get_rank() == 0:
                _write(cluster, options.out, kept)
    finally:
        closing.forget()
        if mine:
            dist.destroy_process_group()
    return 0


@contextlib.contextmanager
def _naming_the_lost() -> Iterator[None]:
    """Turn a failed message's error into one that names the rank that is missing."""
    try:
        yield
    except RuntimeError as error:
        found = peer_liveness.lost(error, "hybridcomp measure")
        if found is None:
            raise
        raise found from error


def _write(cluster: Cluster, out: Path, kept: str) -> None:
    """Write the file and print what it has and lacks, and ``kept``. Raises ConfigError."""
    words = [*lines(cluster), *(f"it says {line}" for line in missing(cluster)), f"wrote {out}"]
    words += [kept] if kept else []
    try:
        cluster_file.write(cluster, out)
    except OSError as error:
        raise ConfigError("--out", str(out), f"cannot write it: {error}") from error
    say(*words)


def _looked_at(options: argparse.Namespace) -> list[BlockSize]:
    """Check all options before the measurement and return the blocks. Raises ConfigError."""
    if not 0 < options.seconds < math.inf:
        raise ConfigError("--seconds", options.seconds, "expected a number above 0")
    if options.ranks_per_node is not None and options.ranks_per_node < 1:
        raise ConfigError("--ranks-per-node", options.ranks_per_node, "expected 1 or more")
    site = options.nodes_per_site
    if site is not None and site != "auto" and not (site.isdecimal() and int(site) > 1):
        raise ConfigError("--nodes-per-site", site, 'expected 2 or more, or "auto"')
    folder = options.out.absolute().parent
    if os.environ["RANK"] == "0":  # rank 0 writes the file
        if options.out.is_dir():
            raise ConfigError("--out", str(options.out), "expected a file, and it is a folder")
        if not os.access(folder, os.W_OK):
            raise ConfigError("--out", str(options.out), f"{folder} is no folder to write into")
    return [BlockSize.parse(text) for text in options.block]


def _hierarchy(options: argparse.Namespace) -> Hierarchy:
    """Return how ranks are assigned to nodes, and nodes to sites where there are any."""
    nodes: int | Literal["auto"] = options.ranks_per_node or "auto"
    site: str | None = options.nodes_per_site
    if site is None:
        return nodes
    return [nodes, "auto" if site == "auto" else int(site)]


def _meet(device: torch.device) -> None:
    """Start torch.distributed. Raises HybridcompError if the environment is incomplete."""
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    except (ValueError, RuntimeError) as error:  # torch's errors are RuntimeErrors
        said = str(error).partition("\n")[0]
        raise HybridcompError(f"the ranks cannot meet: {said}; start it by a launcher") from error


def _device(options: argparse.Namespace) -> torch.device:
    """Return this rank's device. Raises ConfigError if a GPU is wanted and missing."""
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise ConfigError("--device", "cuda", "torch sees no GPU; see `hybridcomp doctor`")
    wants_cpu = options.device == "cpu" or os.environ.get("DS_ACCELERATOR") == "cpu"
    if wants_cpu and options.device != "cuda" or not has_gpu:
        return torch.device("cpu")
    local = options.local_rank
    local = int(os.environ.get("LOCAL_RANK", "0")) if local is None else local
    device = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
