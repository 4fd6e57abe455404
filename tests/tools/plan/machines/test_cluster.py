"""A cluster's lookups: interpolated sizes, rings for other groups, codecs, overheads, speeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridcomp.errors import HybridcompError
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.estimates import Curve, Estimate, summary
from hybridcomp.tools.plan.machines.rings import encoded_shape, ring
from hybridcomp.tools.plan.machines.rows import (
    Beside,
    Coding,
    Direction,
    Encoded,
    Kernel,
    Operation,
    Rank,
    Timing,
)

DIRECTIONS: tuple[Direction, ...] = ("encode", "decode", "decode_add")
LATENCY, PER_BYTE = 1e-4, 1e-8
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)


def figure(value: float) -> Estimate:
    return Estimate(value, 0.9 * value, 1.2 * value)


def rows(
    operation: Operation, ranks: int, nodes: int, latency: float, per_byte: float,
    beside: Beside = "alone",
) -> list[Timing]:  # fmt: skip
    return [
        Timing(operation, ranks, nodes, size, figure(latency + per_byte * size), beside)
        for size in SIZES
    ]


def machine(*links: Timing, count: int = 8, per_node: int = 4) -> Cluster:
    return Cluster(tuple(Rank(rank // per_node, "CPU") for rank in range(count)), links)


SENDS = (
    *rows("send", 2, 1, LATENCY / 10, PER_BYTE / 10),
    *rows("send", 2, 2, LATENCY, PER_BYTE),
)


@pytest.mark.parametrize("size", [1, 5000, 1 << 18, 1 << 30])
def test_a_line_is_met_everywhere_with_its_spread(size: int) -> None:
    curve = Curve.through(
        [(row.nbytes, row.seconds) for row in rows("send", 2, 2, LATENCY, PER_BYTE)]
    )
    found, expected = curve.at(size), LATENCY + PER_BYTE * size
    assert found.value == pytest.approx(expected)
    assert (found.low, found.high) == pytest.approx((0.9 * expected, 1.2 * expected))


def test_noise_never_makes_a_larger_message_free() -> None:
    curve = Curve.through([(100, figure(2.0)), (200, figure(1.0))])
    assert curve.at(400).value == curve.at(200).value == 1.0
    assert curve.at(50).value == 2.0
    assert curve.at(150).value == pytest.approx(1.5)
    assert Curve.through([(100, figure(2.0))]).at(50).value == 1.0
    flat = Curve.through([(100, figure(1.0)), (200, figure(2.0)), (300, figure(2.0))])
    assert flat.at(500).value == 3.0, "the last two are noise, all three are not"


def test_summaries_are_medians_and_quartiles() -> None:
    assert summary([5, 1, 3, 2, 4]) == Estimate(3, 2, 4)
    assert summary([7.0]) == Estimate(7, 7, 7)


def test_figures_add_up_and_keep_what_is_assumed() -> None:
    total = Estimate.exact(1.0, spread=0.5).plus(Estimate.exact(2.0, assumed=True)).times(2)
    assert total == Estimate(6.0, 5.0, 7.0, True)
    assert Estimate(3, 2, 5).minus(Estimate(5, 5, 5)).value == 0
    assert Estimate(4, 2, 8).inverse(8) == Estimate(2, 1, 4)


def test_groups_that_were_not_measured_follow_the_ring() -> None:
    cluster = machine(*SENDS)
    nbytes = 8 << 20
    step = LATENCY + PER_BYTE * nbytes / 8
    assert cluster.seconds("all_reduce", nbytes, 8, 2).value == pytest.approx(14 * step)
    assert cluster.seconds("all_gather", nbytes, 8, 2).value == pytest.approx(7 * step)
    inside = cluster.seconds("all_reduce", nbytes, 4, 1).value
    assert inside == pytest.approx(6 * (LATENCY + PER_BYTE * nbytes / 4) / 10)


def test_busy_groups_share_the_link_of_a_node() -> None:
    cluster = machine(*SENDS)
    alone = cluster.seconds("send", 1 << 24, 2, 2).value
    busy = cluster.seconds("send", 1 << 24, 2, 2, busy=True).value
    assert busy == pytest.approx(LATENCY + 4 * (alone - LATENCY))
    one = cluster.seconds("send", 1 << 24, 2, 1)
    assert cluster.seconds("send", 1 << 24, 2, 1, busy=True) == one


def test_an_all_to_all_is_as_slow_as_what_leaves_the_node() -> None:
    def send(nbytes: float) -> Estimate:
        return Estimate.exact(nbytes)

    def near(nbytes: float) -> Estimate:
        return Estimate.exact(nbytes / 100)

    # 4 ranks of a node send half of their 8 bytes through one link
    assert ring("all_to_all", 8, 8, 2, near, send).value == pytest.approx(16)
    assert ring("all_to_all", 8, 8, 1, near, None).value == pytest.approx(0.07)


def test_the_ring_is_corrected_by_the_most_similar_measured_group() -> None:
    plain = machine(*SENDS).seconds("all_reduce", 1 << 20, 8, 2).value
    twice = [
        Timing(
            "all_reduce", 4, 2, size,
            machine(*SENDS).seconds("all_reduce", size, 4, 2).times(2.0),
        )
        for size in SIZES
    ]  # fmt: skip
    found = machine(*SENDS, *twice).seconds("all_reduce", 1 << 20, 8, 2)
    assert found.value == pytest.approx(2 * plain)


def test_what_was_measured_with_others_at_work_counts_there() -> None:
    cluster = machine(
        *SENDS, *rows("send", 2, 2, 1.0, 0.0, "groups"), *rows("send", 2, 2, 2.0, 0.0, "compute")
    )
    assert cluster.seconds("send", 1 << 20, 2, 2, busy=True).value == pytest.approx(1.0)
    assert cluster.seconds("send", 1 << 20, 2, 2, computing=True).value == pytest.approx(2.0)
    assert cluster.seconds("send", 1 << 20, 2, 2).value < 0.1


def test_a_sender_goes_on_before_its_message_has_arrived() -> None:
    sends = [
        Timing("send", 2, 2, size, figure(PER_BYTE * size), returned=figure(after * size))
        for size, after in ((1 << 16, 0.1 * PER_BYTE), (1 << 24, 3 * PER_BYTE))
    ]  # fmt: skip
    cluster = machine(*sends)
    assert cluster.returned(1 << 16, 2) == pytest.approx(0.1)
    assert cluster.returned(1 << 24, 2) == 1.0  # it cannot wait for more than all of it
    assert cluster.returned(1 << 16, 1) == 1.0  # not timed
    assert machine(*SENDS).returned(1 << 16, 2) == 1.0


def test_links_that_nobody_knows_are_an_error() -> None:
    cluster = machine(*rows("send", 2, 1, LATENCY, PER_BYTE))
    with pytest.raises(HybridcompError, match="between nodes .wanted: all_reduce of 8 ranks"):
        cluster.seconds("all_reduce", 1 << 20, 8, 2)
    assert cluster.seconds("all_reduce", 1 << 20, 1, 1).value == 0


def coded(setting: str, per_value: float, fixed: bool = True) -> list[Coding]:
    return [
        Coding(setting, "bf16", way, numel, figure(1e-5 + per_value * numel), "alone", fixed)
        for way in DIRECTIONS
        for numel in (1 << 12, 1 << 20)
    ]


def test_codecs_by_setting_else_by_name() -> None:
    cluster = Cluster((), codecs=(*coded("blockint(bits=4)", 1e-9), *coded("zfp(rate=8)", 5e-9)))
    found = cluster.coding("blockint(bits=4)", "bf16", 1 << 22, "decode")
    assert found.value == pytest.approx(1e-5 + 1e-9 * (1 << 22))
    assert cluster.coding("zfp(rate=16)", "bf16", 1 << 20, "encode").value > 5e-3
    with pytest.raises(HybridcompError, match=r"no figure for mpc\(dim=1\) of bf16"):
        cluster.coding("mpc(dim=1)", "bf16", 10, "encode")


@pytest.mark.parametrize(("operation", "ranks"), [("all_reduce", 2), ("all_reduce", 4),
    ("reduce_scatter", 4), ("all_gather", 4), ("all_to_all", 4), ("send", 2)])  # fmt: skip
def test_the_overhead_of_messages_is_found_again(operation: Operation, ranks: int) -> None:
    """Two sizes that take 3 ms and 1.5 times their parts are predicted, and every other size."""
    codecs = (*coded("blockint(bits=8)", 1e-9), *coded("expcode()", 2e-9, fixed=False))
    bare = Cluster(machine().ranks, SENDS, codecs=codecs)

    def row(numel: int, host: float, setting: str) -> Encoded:
        parts = bare.encoded_parts(operation, setting, "bf16", numel, numel, ranks, 2)
        seconds = Estimate.total(parts).times(1.5).plus(Estimate.exact(host))
        return Encoded(operation, setting, "bf16", ranks, 2, numel, numel, seconds)

    timed = tuple(
        row(numel, host, setting)
        for numel in (1 << 15, 1 << 20)
        for host, setting in ((3e-3, "blockint(bits=8)"), (7e-3, "expcode()"))
    )
    cluster = Cluster(bare.ranks, bare.links, timed, codecs)
    for setting, host in (("blockint(bits=4)", 3e-3), ("expcode()", 7e-3)):
        extra = cluster.overhead(operation, ranks, 2, setting)
        assert extra.host.value == pytest.approx(host)
        assert extra.factor == pytest.approx(1.5)
    parts = cluster.encoded_parts(operation, "expcode()", "bf16", 1 << 22, 1 << 22, ranks, 2)
    found = Estimate.total(parts).times(extra.factor).plus(extra.host)
    assert found.value == pytest.approx(row(1 << 22, 7e-3, "expcode()").seconds.value)


@pytest.mark.parametrize(("device", "is_cpu"), [
    ("a CPU", True), ("AMD EPYC 7B13, 2 threads", True), ("AMD EPYC 7B13, 1 thread", True),
    ("NVIDIA H100 80GB HBM3", False),
])  # fmt: skip
def test_a_cpu_is_known_by_its_threads(device: str, is_cpu: bool) -> None:
    assert Cluster((Rank(0, device),)).on_cpu == is_cpu


def test_every_rank_codes_what_it_sends_and_gets() -> None:
    """The coding of a collective of more ranks, for others and for itself, adds up."""
    for ranks in (2, 3, 8):
        shape = encoded_shape("reduce_scatter", ranks)
        assert dict(shape.coded)["encode"] == pytest.approx((ranks - 1) / ranks)
    assert encoded_shape("all_reduce", 2).sent == (("all_to_all", 2.0),)


def test_speeds_by_blocks_else_by_flops() -> None:
    ranks = tuple(Rank(0, "CPU", 0, {"fp32": figure(rate)}) for rate in (4.0, 2.0))
    assert Cluster(ranks).speeds == (1.0, 0.5)
    blocks = tuple(
        Kernel(rank, "block_forward", "fp32", 1e9, figure(seconds))
        for rank, seconds in ((0, 0.1), (1, 0.4))
    )
    assert Cluster(ranks, kernels=blocks).speeds == (1.0, 0.25)
    assert Cluster((Rank(0, "CPU"),)).speeds == (1.0,)


def test_kernels_by_their_curve_else_by_products_else_by_flops() -> None:
    ranks = (Rank(0, "CPU", 0, {"bf16": Estimate(10.0, 5.0, 20.0)}),)
    rows = (Kernel(0, "product", "fp32", 1e6, figure(1.0)),
            Kernel(0, "product", "fp32", 2e6, figure(2.0)))  # fmt: skip
    cluster = Cluster(ranks, kernels=rows)
    assert cluster.kernel("block_backward", "fp32", 3e6).value == pytest.approx(3.0)
    assert cluster.kernel("product", "bf16", 40.0) == Estimate(4.0, 2.0, 8.0)
    with pytest.raises(HybridcompError, match="no figure for adam in fp32 on rank 0"):
        cluster.kernel("adam", "fp32", 1e6)
    with pytest.raises(HybridcompError, match="copies between device and host"):
        cluster.copy("to_host", 10)


def test_this_cluster_is_known_again() -> None:
    cluster = machine()
    assert cluster.machines == tuple((n // 4, "CPU") for n in range(8))
    claimed = replace(cluster, made={"nodes known by": "compression.hierarchy"})
    assert claimed.machines[5] == (-1, "CPU")
    assert replace(cluster, by_hand=True).machines == ()
    assert (cluster.nodes, cluster.ranks_per_node, cluster.nodes_of([0, 1, 5])) == (2, 4, 2)
