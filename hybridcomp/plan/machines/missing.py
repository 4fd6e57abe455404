"""What the file of a cluster does not say, mostly because an earlier hybridcomp measured it."""

from __future__ import annotations

from collections.abc import Iterator

from hybridcomp.plan.machines.cluster import Cluster

AGAIN = "run `hybridcomp measure` again"


def missing(cluster: Cluster, offload: bool = True) -> Iterator[str]:
    """What is not in the file, and what stands for it, in a sentence each.

    ``offload``: whether copies between device and host matter.
    """
    if cluster.world_size > 1 and not cluster.channels and not cluster.by_hand:
        yield (
            "no messages of tp, pp, ep and cp through their channels: those of collectives alone "
            f"stand for them; {AGAIN}"
        )
    if offload and not cluster.codes_on_host:
        todo = 'write "host_codecs" into it' if cluster.by_hand else AGAIN
        yield (
            "nothing about codecs on the hosts: copies between device and host are planned "
            f"natively; {todo}"
        )
