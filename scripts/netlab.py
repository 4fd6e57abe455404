#!/usr/bin/env python3
"""Run a distributed job on network namespaces of this machine, joined by rate-limited links.

    python scripts/netlab.py --layout 2 --rate 1gbit -- python train.py
    python scripts/netlab.py --layout 2x2 --rate 200mbit --per node -- torchrun --nnodes {nodes} \\
        --node-rank {node} --nproc-per-node {ranks} --master-addr {master_addr} train.py
    python scripts/netlab.py --layout 2+2 --rate 5gbit --uplink 200mbit -- python train.py

``2x3``: two nodes of three ranks; ``2+2``: two switches with two nodes each, joined by uplinks.
Each link has its rate per direction (tc tbf). Ranks of a node use its loopback without a limit. The
command starts once per rank with torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
...), or with ``--per node`` once per node, with {node}, {nodes}, {ranks}, {world_size},
{master_addr}, {master_port} and {hostfile} filled in.

Needs root, iproute2 and Linux. It changes nothing outside its namespaces, which have no route out,
and removes them on every exit; the next lab removes those of a killed lab. Exits with the status of
the first rank that failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lab.cluster import Lab
from lab.layout import LabError, Layout, Rates, parse_rate


def node_rate(text: str) -> tuple[int, int | None]:
    """Parse ``1=200mbit`` to node and rate. Raises LabError."""
    node, equals, rate = text.partition("=")
    if not equals or not node.isdigit():
        raise LabError(f"--node-rate: expected NODE=RATE, such as 1=200mbit; found {text!r}")
    return int(node), parse_rate(rate)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", default="2", help="NODES[+NODES...][xRANKS], default 2")
    parser.add_argument("--rate", default="1gbit", help="of every node's link; none: not shaped")
    parser.add_argument("--uplink", default="none", help="of every switch, with several switches")
    parser.add_argument("--node-rate", action="append", default=[], metavar="NODE=RATE")
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--cores", help="such as 0,1: dealt out to the ranks; default: all")
    parser.add_argument("--per", choices=["rank", "node"], default="rank")
    parser.add_argument("--timeout", type=float, default=86400.0, metavar="SECONDS")
    parser.add_argument("--quiet", action="store_true", help="show the output of rank 0 only")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ...")
    found = parser.parse_args(argv)
    found.command = found.command[1:] if found.command[:1] == ["--"] else found.command
    if not found.command:
        parser.error("expected a command after --")
    return found


def build(args: argparse.Namespace) -> Lab:
    """Return the lab for the command line. Raises LabError."""
    layout = Layout.parse(args.layout)
    rates = Rates(
        parse_rate(args.rate), parse_rate(args.uplink), dict(map(node_rate, args.node_rate))
    )
    strange = [node for node in rates.nodes if node >= layout.nodes]
    if strange:
        raise LabError(f"--node-rate: expected nodes below {layout.nodes}, found {strange[0]}")
    if rates.uplink is not None and len(layout.switches) == 1:
        raise LabError(
            f"--uplink: expected a layout of several switches, such as 2+2, found {layout}; "
            "remove it, or set --rate"
        )
    cores = [int(core) for core in args.cores.split(",")] if args.cores else None
    return Lab(layout, rates, mtu=args.mtu, cores=cores)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; return the exit status."""
    args = arguments(argv)
    try:
        with build(args) as lab:
            result = lab.run(
                args.command,
                per=args.per,
                timeout=args.timeout,
                echo="first" if args.quiet else "all",
            )
            print(lab.table(result))
    except LabError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return result.status


if __name__ == "__main__":
    sys.exit(main())
