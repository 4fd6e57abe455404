"""Name the measurements that a cluster's file lacks, and the substitutes that a plan uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.rows import LeftOut

AGAIN = "run `hybridcomp measure` again"


def missing(cluster: Cluster, offload: bool = True, engine: str = "deepspeed") -> Iterator[str]:
    """Yield a sentence for each missing measurement, with its substitute.

    Args:
        offload: whether copies between device and host matter.
        engine: engine for which timed trainings of a small model are wanted.
    """
    yield from _of_messages(cluster)
    yield from _of_devices(cluster, engine)
    if offload:
        yield from _of_hosts(cluster)


def _of_messages(cluster: Cluster) -> Iterator[str]:
    if cluster.world_size > 1 and not cluster.channels and not cluster.by_hand:
        yield (
            "no messages of tp, pp, ep and cp through their channels: those of collectives alone "
            f"stand for them; {AGAIN}"
        )
    yield from _left_out(cluster.left_out)


def _of_devices(cluster: Cluster, engine: str) -> Iterator[str]:
    if not all(rank.nbytes for rank in cluster.ranks):
        yield (
            "nothing about the memory of some ranks: no plan is refused for what it needs there; "
            f"{AGAIN}, or write it into the ranks"
        )
    kinds = {row.kind for row in cluster.kernels}
    if "elementwise" not in kinds:
        adam = "" if "adam" in kinds else ", and the optimizer's step,"
        yield (
            f"nothing about the devices' memory: what is no matrix product{adam} is planned as if "
            f"it took no time; {_todo(cluster, 'memory_gbytes_per_second')}"
        )
    if not cluster.by_hand and not any(row.engine == engine for row in cluster.trainings):
        lacked = f"; {AGAIN}, with what it said they lacked: DeepSpeed, memory or --seconds"
        todo = lacked if engine == "deepspeed" else ""
        yield (
            f"nothing about small trainings by {engine}: what its step costs beside layers and "
            f"messages is in no plan{todo}"
        )


def _of_hosts(cluster: Cluster) -> Iterator[str]:
    for known, field, said in (
        (
            cluster.copies, "host",
            "copies between device and host: no plan has its optimizer on the host",
        ),
        (
            cluster.codes_on_host, "host_codecs",
            "codecs on the hosts: copies between device and host are planned natively",
        ),
        (
            _steps_on_host(cluster), "host_memory_gbytes_per_second",
            "the optimizer on the hosts: its steps there are planned as fast as on the devices",
        ),
    ):  # fmt: skip
        if not known:
            yield f"nothing about {said}; {_todo(cluster, field)}"
        if not cluster.copies:
            return


def _todo(cluster: Cluster, field: str) -> str:
    return f'write "{field}" into it' if cluster.by_hand else AGAIN


def _steps_on_host(cluster: Cluster) -> bool:
    """Return whether the optimizer's speed on the host is known for every rank."""
    known = {row.rank for row in cluster.kernels if (row.kind, row.dtype) == ("host_adam", "fp32")}
    return cluster.on_cpu or len(known) == cluster.world_size


def _left_out(rows: Sequence[LeftOut]) -> Iterator[str]:
    """Yield a sentence for each size of messages that was left out because it takes too long."""
    sizes: dict[tuple[int, int, str, float], list[LeftOut]] = {}
    for row in rows:
        sizes.setdefault((row.numel, row.timed, row.dtype, row.factor), []).append(row)
    for (numel, timed, dtype, factor), own in sizes.items():
        groups: dict[str, list[str]] = {}
        for row in own:
            groups.setdefault(_named(row), []).append(_group(row))
        listed = "; ".join(f"{name} ({', '.join(told)})" for name, told in groups.items())
        yield (
            f"nothing about messages of {numel} values in {dtype}, which would have taken too "
            f"long, of {listed}: long ones are planned with {factor:g} times what their coding and "
            f"their wire take apart, and with what {timed} values took beside these; give "
            "`hybridcomp measure` more --seconds"
        )


def _named(row: LeftOut) -> str:
    """Name a message without its group: ``tp all_reduce``, ``all_reduce by expcode()``."""
    codec = f" by {row.setting}" if row.setting else ""
    return f"{row.dimension} {row.operation}{codec}".strip()


def _group(row: LeftOut) -> str:
    place = "inside a node" if row.nodes == 1 else f"on {row.nodes} nodes"
    others = " beside others" if row.beside == "groups" else ""
    return f"{row.ranks} ranks {place}{others}"
