"""Clusters described by hand: the few figures that data sheets have, all of them assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import Field

from hybridcomp.codecs import CODECS
from hybridcomp.codecs.words import DTYPES
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.estimates import Estimate
from hybridcomp.tools.plan.machines.rows import (
    STRICT,
    Coding,
    Copy,
    Direction,
    Kernel,
    Kind,
    MessageHost,
    Rank,
    Tier,
    Timing,
)

#: bounds that no device or link exceeds, so that seconds and rates stay finite
Above = Annotated[float, Field(ge=1e-12, le=1e15, allow_inf_nan=False)]
NotBelow = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
#: most ranks of a cluster: a search over more does not end
MOST_RANKS = 1 << 16
Whole = Annotated[int, Field(ge=1, le=MOST_RANKS)]
#: the two sizes of assumed rows, which give every other size: assumed figures lie on straight lines
SMALL, LARGE = 1, 1 << 28
#: bytes that an Adam step reads and writes for each value
ADAM_NBYTES = 28.0
DIRECTIONS: tuple[Direction, ...] = ("encode", "decode", "decode_add")
TO_AND_FRO: tuple[Tier, ...] = ("to_host", "to_device")
FILES: tuple[Tier, ...] = ("to_drive", "from_drive")


def _assumed(value: float, spread: float) -> Estimate:
    return Estimate.exact(value, assumed=True, spread=spread)


@dataclass(frozen=True)
class Link:
    """A link: its latency and its bandwidth.

    gbytes_per_second: bandwidth in 1e9 bytes/s. Inside a node it is that from one rank to another;
        between nodes that of a whole node, shared by its ranks; of an uplink that of a whole site.
    """

    __pydantic_config__ = STRICT

    gbytes_per_second: Above
    latency_us: NotBelow = 10.0

    def timings(self, nodes: int, spread: float) -> list[Timing]:
        """Return the rows of two sends, which fix latency and bandwidth of every send."""
        rows = []
        for nbytes in (SMALL, LARGE):
            seconds = 1e-6 * self.latency_us + nbytes / (1e9 * self.gbytes_per_second)
            rows.append(Timing("send", 2, nodes, nbytes, _assumed(seconds, spread)))
        return rows


@dataclass(frozen=True)
class CodecSpeed:
    """Speed of a codec: 1e9 bytes of native values a second, and microseconds of each call."""

    __pydantic_config__ = STRICT

    gbytes_per_second: Above
    launch_us: NotBelow = 20.0
    decode_gbytes_per_second: Above | None = None

    def codings(self, setting: str, spread: float) -> list[Coding]:
        """Return the rows of this codec for every dtype and direction."""
        rows = []
        for dtype, width in (("fp32", 4), ("bf16", 2), ("fp16", 2)):
            for direction in DIRECTIONS:
                speed = self.gbytes_per_second
                if direction != "encode" and self.decode_gbytes_per_second is not None:
                    speed = self.decode_gbytes_per_second
                for numel in (SMALL, LARGE):
                    seconds = 1e-6 * self.launch_us + width * numel / (1e9 * speed)
                    figure = _assumed(seconds, spread)
                    rows.append(Coding(setting, dtype, direction, numel, figure))
        return rows


@dataclass(frozen=True)
class HostSpeed:
    """Host microseconds of an encoded message, launches excluded: ``us``, and a part per rank.

    The defaults were timed on the all-reduce of a bucket and its reduction to owners, without wire
    (``scripts/benchmarks/bench_host.py --ranks 8 64 256 1024 4096``, docs/results/scale.md).
    """

    __pydantic_config__ = STRICT

    us: NotBelow = 45.0
    us_per_rank: NotBelow = 0.005

    def message(self, spread: float) -> MessageHost:
        """Return the host's cost of a message in seconds, as a row of a cluster."""
        return MessageHost(*(_assumed(1e-6 * us, spread) for us in (self.us, self.us_per_rank)))


@dataclass(frozen=True)
class Description:
    """Description of a cluster that was not measured.

    Attributes:
        nodes, ranks_per_node: how many there are; rank r is on node ``r // ranks_per_node``.
        device: name of the ranks' devices.
        memory_gb: device memory of a rank (1e9 bytes).
        tflops: speed of a rank in a transformer's matrix products (1e12 FLOP/s), by dtype.
        inside, between: links inside and between nodes.
        nodes_per_site: consecutive nodes that share a switch or a site. uplink: link of a site.
        memory_gbytes_per_second: speed of device memory, which limits all but matrix products.
        speeds: relative speeds of ranks that are slower than the others, such as ``{"3": 0.5}``.
        codecs: speeds by name or setting, such as ``blockint`` or ``blockint(bits=4)``.
        host: link between device and host. host_codecs: speeds of codecs on the hosts of GPUs.
            host_memory_gbytes_per_second: speed of host memory, for an optimizer on the host;
            without it the host's optimizer is taken to be as fast as the device's.
        host_memory_gb: memory of a node's host (1e9 bytes). drive: a node's, shared by its ranks.
        message: the host's time for an encoded message.
        spread: relative error of every figure, at most.
    """

    __pydantic_config__ = STRICT

    nodes: Whole
    ranks_per_node: Whole
    device: str
    memory_gb: Above
    tflops: Annotated[Mapping[str, Above], Field(min_length=1)]
    inside: Link | None = None
    between: Link | None = None
    nodes_per_site: Whole | None = None
    uplink: Link | None = None
    memory_gbytes_per_second: Above | None = None
    speeds: Mapping[Annotated[int, Field(ge=0)], Above] = field(default_factory=dict)
    codecs: Mapping[str, CodecSpeed] = field(default_factory=dict)
    host: Link | None = None
    host_codecs: Mapping[str, CodecSpeed] = field(default_factory=dict)
    host_memory_gbytes_per_second: Above | None = None
    host_memory_gb: Above | None = None
    drive: Link | None = None
    message: HostSpeed = field(default_factory=HostSpeed)
    spread: Share = 0.1

    def __post_init__(self) -> None:
        """Raise ValueError where fields contradict each other."""
        count = self.nodes * self.ranks_per_node
        if count > MOST_RANKS:
            raise ValueError(f"{count} ranks; a plan is for {MOST_RANKS} at most")
        if self.nodes > 1 and self.between is None:
            raise ValueError('several nodes need the link "between" them')
        if self.ranks_per_node > 1 and self.inside is None:
            raise ValueError('several ranks on a node need the link "inside" it')
        if (self.nodes_per_site is None) != (self.uplink is None):
            raise ValueError('"nodes_per_site" and the "uplink" of a site need each other')
        if self.nodes_per_site and self.nodes % self.nodes_per_site:
            raise ValueError(f"{self.nodes} nodes are no multiple of {self.nodes_per_site} a site")
        for key, names, known in (
            ("tflops", self.tflops, list(DTYPES)), ("codecs", self.codecs, CODECS),
            ("host_codecs", self.host_codecs, CODECS),
        ):  # fmt: skip
            odd = [name for name in names if name.partition("(")[0] not in known]
            if odd:
                raise ValueError(f'"{key}" has {odd[0]!r}; expected some of {", ".join(known)}')
        strange = [rank for rank in self.speeds if rank >= count]
        if strange:
            raise ValueError(f'"speeds" names rank {strange[0]}; there are {count} ranks')

    def cluster(self) -> Cluster:
        """Build the cluster, with every figure marked as assumed."""
        ranks, kernels = [], []
        for index in range(self.nodes * self.ranks_per_node):
            speed = self.speeds.get(index, 1.0)
            flops = {
                dtype: _assumed(1e12 * speed * rate, self.spread)
                for dtype, rate in self.tflops.items()
            }
            node, nbytes = index // self.ranks_per_node, round(1e9 * self.memory_gb)
            ranks.append(Rank(node, self.device, nbytes, flops))
            kernels += self._kernels(index, speed)
        links = []
        for nodes, link in ((1, self.inside), (2, self.between)):
            links += link.timings(nodes, self.spread) if link is not None else []
        codecs, on_host = (
            tuple(row for name, speeds in some.items() for row in speeds.codings(name, self.spread))
            for some in (self.codecs, self.host_codecs)
        )
        return Cluster(
            tuple(ranks), tuple(links), codecs=codecs, host_codecs=on_host,
            copies=tuple(self._copies()), kernels=tuple(kernels), by_hand=True,
            nodes_per_site=self.nodes_per_site or 0,
            uplinks=tuple(self.uplink.timings(2, self.spread)) if self.uplink else (),
            message=self.message.message(self.spread), drives=tuple(self._drives()),
            host_nbytes=round(1e9 * (self.host_memory_gb or 0)),
        )  # fmt: skip

    def _kernels(self, rank: int, speed: float) -> list[Kernel]:
        """Return the rows of elementwise operations and of Adam steps of ``rank``."""
        kinds: list[tuple[Kind, float]] = []  # seconds of a byte, or of a value
        if self.memory_gbytes_per_second is not None:
            per_byte = 1 / (1e9 * speed * self.memory_gbytes_per_second)
            kinds += [("elementwise", per_byte), ("adam", ADAM_NBYTES * per_byte)]
        if self.host_memory_gbytes_per_second is not None:
            per_byte = 1 / (1e9 * self.host_memory_gbytes_per_second)
            kinds.append(("host_adam", ADAM_NBYTES * per_byte))
        return [
            Kernel(rank, kind, dtype, size, _assumed(size * each, self.spread))
            for kind, each in kinds
            for dtype in ("fp32", "bf16", "fp16")
            for size in (SMALL, LARGE)
        ]

    def _copies(self) -> list[Copy]:
        if self.host is None:
            return []
        rows = self.host.timings(1, self.spread)
        return [
            Copy(direction, row.nbytes, row.seconds) for direction in TO_AND_FRO for row in rows
        ]

    def _drives(self) -> list[Copy]:
        """Return the rows of files; each rank of a node gets an equal part of the drive's speed."""
        if self.drive is None:
            return []
        rate = self.drive.gbytes_per_second / self.ranks_per_node
        rows = replace(self.drive, gbytes_per_second=rate).timings(1, self.spread)
        return [Copy(way, row.nbytes, row.seconds) for way in FILES for row in rows]
