"""Describe a lab: nodes, ranks, switches and the rates of the links between them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: the network of every lab; it exists inside the namespaces of the lab only
NETWORK = "10.77.0"
INTERFACE = "eth0"
PORT = 29500
UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
#: seconds of traffic in a tc bucket, by which a burst may exceed the rate. gloo's all-reduce of
#: 133 kB needs 2.1 ms of a link of 502 Mb/s and 0.4 ms of overhead; it took 1.7 ms with a bucket of
#: 1 ms, 2.6 ms with 0.25 ms. With 0.1 ms the kernel's timer is too late: 34 MB, which need 535 ms,
#: took 926 ms instead of 578.
BURST_S = 2.5e-4
#: seconds of traffic that may queue in front of a link, as in a switch port's buffer, and the
#: queue's minimum bytes. With 50 ms alone (125 kB at 20 Mb/s) four ranks that each sent 1 MB to two
#: others lost 80 to 300 packets in 20 turns; with a second, none.
QUEUE_S, QUEUE_NBYTES = 0.05, 2_000_000


class LabError(Exception):
    """The lab cannot be built; the message says what was expected, found and what to do."""


@dataclass(frozen=True)
class Layout:
    """``switches[s]`` nodes on switch s, ``ranks`` on each node; a core joins the switches."""

    switches: tuple[int, ...]
    ranks: int = 1

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse ``2`` (two nodes), ``2x3`` (of 3 ranks) or ``2+2x3`` (on two switches).

        Raises LabError.
        """
        found = re.fullmatch(r"(\d+(?:\+\d+)*)(?:x(\d+))?", text.replace(" ", ""))
        counts = [int(part) for part in found[1].split("+")] if found else []
        ranks = int(found[2] or 1) if found else 0
        if not counts or min(counts) < 1 or ranks < 1 or sum(counts) > 200:
            raise LabError(
                f"layout: expected NODES, NODESxRANKS or NODES+NODESxRANKS (200 nodes at most), "
                f"such as 2, 2x2 or 2+2x1; found {text!r}"
            )
        return cls(tuple(counts), ranks)

    @property
    def nodes(self) -> int:
        return sum(self.switches)

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks

    def switch_of(self, node: int) -> int:
        """Return the switch of ``node``."""
        owners = [switch for switch, count in enumerate(self.switches) for _ in range(count)]
        return owners[node]

    def __str__(self) -> str:
        return "+".join(map(str, self.switches)) + f"x{self.ranks}"


@dataclass(frozen=True)
class Rates:
    """Bits per second of the links, each way; None: not shaped."""

    link: int | None = None  # of every node
    uplink: int | None = None  # of every switch, where there are several
    nodes: Mapping[int, int | None] = field(default_factory=dict)  # instead of ``link``

    def of(self, node: int) -> int | None:
        """Return the rate of the link of ``node``."""
        return self.nodes.get(node, self.link)


def parse_rate(text: str) -> int | None:
    """Return ``1gbit``, ``2.5gbit``, ``400mbit`` in bits per second, None for ``none``.

    Raises LabError.
    """
    if text == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)?bit", text.lower())
    rate = round(float(found[1]) * UNITS[f"{found[2] or ''}bit"]) if found else 0
    if rate < 8000:
        raise LabError(f"rate: expected 8kbit or more, such as 1gbit, or none; found {text!r}")
    return rate


def show_rate(rate: int | None) -> str:
    """Format ``rate`` as ``parse_rate`` reads it."""
    if rate is None:
        return "none"
    unit = next(unit for unit in ("gbit", "mbit", "kbit", "bit") if rate >= UNITS[unit])
    return f"{rate / UNITS[unit]:g}{unit}"


def address(node: int) -> str:
    """Return the address of ``node``."""
    return f"{NETWORK}.{node + 1}"


def gso_nbytes(rate: int) -> int:
    """Return the largest packet that a sender may hand to a link of ``rate`` in one piece.

    The link's bucket has to hold such packets, and 64 KB would be 5 ms of a 100 Mb/s link.
    """
    return max(4096, min(65536, int(rate * BURST_S / 16)))


def shaping(namespace: str, interface: str, rate: int) -> list[list[str]]:
    """Return the commands that limit the traffic leaving through ``interface``.

    A tbf queue whose bucket holds two packets of ``gso_nbytes``, or BURST_S if that is more: the
    kernel would cut up a packet larger than the bucket, and a smaller bucket misses the rate
    whenever the timer is late.
    """
    gso = gso_nbytes(rate)
    burst = max(2 * gso, int(rate * BURST_S / 8))
    limit = burst + max(int(rate * QUEUE_S / 8), QUEUE_NBYTES)
    return [
        ["ip", "-n", namespace, "link", "set", interface, "gso_max_size", str(gso)],
        ["tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf"]
        + ["rate", f"{rate}bit", "burst", str(burst), "limit", str(limit)],
    ]


def unshaping(namespace: str, interface: str) -> list[list[str]]:
    """Return the commands that undo ``shaping``."""
    return [
        ["tc", "-n", namespace, "qdisc", "del", "dev", interface, "root"],
        ["ip", "-n", namespace, "link", "set", interface, "gso_max_size", "65536"],
    ]


def link_ends(layout: Layout, rates: Rates, prefix: str) -> list[tuple[str, str, int | None]]:
    """Return namespace, interface and sending rate of both ends of every link of ``wiring``."""
    switch, found = f"{prefix}sw", []
    for node in range(layout.nodes):
        rate = rates.of(node)
        found += [(f"{prefix}n{node}", INTERFACE, rate), (switch, f"p{node}", rate)]
    for index in range(len(layout.switches)) if len(layout.switches) > 1 else ():
        ends = f"up{index}", f"core{index}"
        found += [(switch, end, rates.uplink) for end in ends]
    return found


def wiring(layout: Layout, rates: Rates, prefix: str, mtu: int) -> list[list[str]]:
    """Return the commands that build the lab: namespaces ``<prefix>sw`` and ``<prefix>n<node>``.

    Every node has a veth pair to its switch, a bridge; with several switches, every switch has a
    veth pair to the core, a bridge as well. Both ends of a link are shaped.
    """
    switch = f"{prefix}sw"
    commands = [["ip", "netns", "add", switch]]
    bridges = [f"br{index}" for index in range(len(layout.switches))]
    uplinks = bridges if len(bridges) > 1 else []
    for bridge in [*bridges, *(["core"] if uplinks else [])]:
        commands.append(["ip", "-n", switch, "link", "add", bridge, "type", "bridge"])
        commands.append(["ip", "-n", switch, "link", "set", bridge, "mtu", str(mtu), "up"])
    for node in range(layout.nodes):
        bridge = bridges[layout.switch_of(node)]
        commands += _node(f"{prefix}n{node}", node, switch, bridge, mtu)
    for index, bridge in enumerate(uplinks):
        commands += _uplink(switch, index, bridge, mtu)
    for namespace, interface, rate in link_ends(layout, rates, prefix):
        if rate is not None:
            commands += shaping(namespace, interface, rate)
    return commands


#: TCP as most machines run it: cubic (bbr took 1.5 ms more for each message after an idle second).
#: Connections that are idle while ranks compute keep their window instead of starting again with
#: 14 kB
TCP = (
    "cd /proc/sys/net/ipv4; echo 0 > tcp_slow_start_after_idle; "
    "echo cubic > tcp_congestion_control || echo reno > tcp_congestion_control"
)


def _node(name: str, node: int, switch: str, bridge: str, mtu: int) -> list[list[str]]:
    port = f"p{node}"
    return [
        ["ip", "netns", "add", name],
        ["ip", "-n", switch, "link", "add", port, "mtu", str(mtu), "type", "veth"]
        + ["peer", "name", INTERFACE, "mtu", str(mtu), "netns", name],
        ["ip", "-n", switch, "link", "set", port, "master", bridge, "up"],
        ["ip", "-n", name, "addr", "add", f"{address(node)}/24", "dev", INTERFACE],
        ["ip", "-n", name, "link", "set", INTERFACE, "up"],
        ["ip", "-n", name, "link", "set", "lo", "up"],
        ["ip", "netns", "exec", name, "sh", "-c", TCP],
    ]


def _uplink(switch: str, index: int, bridge: str, mtu: int) -> list[list[str]]:
    low, high = f"up{index}", f"core{index}"
    return [
        ["ip", "-n", switch, "link", "add", low, "mtu", str(mtu), "type", "veth"]
        + ["peer", "name", high, "mtu", str(mtu)],
        ["ip", "-n", switch, "link", "set", low, "master", bridge, "up"],
        ["ip", "-n", switch, "link", "set", high, "master", "core", "up"],
    ]


def environment(layout: Layout, node: int, local: int | None) -> dict[str, str]:
    """Return a launcher's variables for rank ``local`` of ``node``, or (None) for a whole node."""
    names = {
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
    }
    if local is not None:
        names |= {
            "RANK": str(node * layout.ranks + local),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(layout.world_size),
            "LOCAL_WORLD_SIZE": str(layout.ranks),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(layout.nodes),
        }
    return names


def fill(command: Sequence[str], layout: Layout, node: int, hostfile: str) -> list[str]:
    """Fill in ``{node}``, ``{nodes}``, ``{ranks}`` (of a node), ``{world_size}``,
    ``{master_addr}``, ``{master_port}`` and ``{hostfile}``; other braces stay."""
    values = {
        "node": node,
        "nodes": layout.nodes,
        "ranks": layout.ranks,
        "world_size": layout.world_size,
        "master_addr": address(0),
        "master_port": PORT,
        "hostfile": hostfile,
    }
    filled = []
    for word in command:
        for name, value in values.items():
            word = word.replace(f"{{{name}}}", str(value))
        filled.append(word)
    return filled


def pinning(layout: Layout, cores: Sequence[int]) -> list[list[int]]:
    """Deal ``cores`` out to the ranks evenly; with too few, several ranks share a core."""
    count = layout.world_size
    share = max(1, len(cores) // count)
    return [
        [cores[(rank * share + index) % len(cores)] for index in range(share)]
        for rank in range(count)
    ]
