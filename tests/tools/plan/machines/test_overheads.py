"""Overhead of messages in the channels of their dimensions, and messages about unknown ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridcomp.errors import ConfigError
from hybridcomp.tools.plan.choices import Choice
from hybridcomp.tools.plan.cost.calls import EngineCall
from hybridcomp.tools.plan.cost.prices import Prices
from hybridcomp.tools.plan.machines import cluster_file
from hybridcomp.tools.plan.machines.cluster import Cluster
from hybridcomp.tools.plan.machines.missing import missing
from hybridcomp.tools.plan.machines.rows import (
    NATIVE,
    Carried,
    Copy,
    Kernel,
    Operation,
    Rank,
    TrainedSmall,
)
from tests.tools.plan.machines.test_cluster import LATENCY, PER_BYTE, SENDS, coded, figure, machine

PER_VALUE = 1e-9


def through(dimension: Any, operation: Operation, beside: Any, more: float) -> list[Carried]:
    """Return messages of two ranks through a channel with ``more`` seconds beside coding and wire.

    Seconds are computed here: an all-to-all codes and sends half of its values, and if all groups
    send, a node's 4 ranks share its link.
    """
    share = 0.5 if operation == "all_to_all" else 1.0
    per_byte = share * (4 if beside == "groups" else 1) * PER_BYTE
    found = []
    for numel in (1 << 15, 1 << 18):
        coding = 2 * (1e-5 + PER_VALUE * share * numel)  # at the sender, and at the receiver
        wire, direct = (LATENCY + per_byte * nbytes for nbytes in (numel, 2 * numel))
        for setting, seconds in (
            ("blockint(bits=8)", coding + wire + more),
            (NATIVE, direct + more / 10),
        ):
            found.append(Carried(
                operation, setting, "bf16", 2, 2, numel, numel, figure(seconds),
                dimension=dimension, direct=figure(direct), beside=beside,
            ))  # fmt: skip
    return found


CODED = Cluster(machine().ranks, SENDS, codecs=tuple(coded("blockint(bits=8)", PER_VALUE)))


SENT = tuple(through("pp", "send", "alone", 1.0))


def test_channels_have_costs_of_their_own() -> None:
    """By dimension, and by concurrent sends; other dimensions use the collectives'."""
    rows = (*through("pp", "send", "alone", 1e-3), *through("pp", "send", "groups", 2e-3),
            *through("ep", "all_to_all", "alone", 3e-3))  # fmt: skip
    cluster = replace(CODED, channels=rows)
    for dimension, operation, busy, seconds in (
        ("pp", "send", False, 1e-3), ("pp", "send", True, 2e-3), ("cp", "all_to_all", False, 3e-3),
        ("ep", "all_to_all", True, 3e-3), ("cp", "send", False, 0.0), ("dp", "send", False, 0.0),
    ):  # fmt: skip
        kind: Any = operation
        extra = cluster.overhead(kind, 4, 2, "blockint(bits=4)", dimension, busy)
        assert extra.host.value == pytest.approx(seconds, abs=1e-9)
        assert extra.factor == pytest.approx(1.0)
        native = cluster.channel_seconds(kind, 4, 2, dimension, busy)
        assert native.value == pytest.approx(seconds / 10, abs=1e-9)
    assert CODED.channel_seconds("send", 2, 2, "pp").value == 0


def test_one_short_message_says_nothing_about_long_ones() -> None:
    """It passed a shaped link faster than the link's rate: the wire of a long one stays whole."""
    rows = [
        replace(one, seconds=one.seconds.times(0.5)) for one in through("pp", "send", "alone", 0)
    ]
    for count, factor in ((2, 1.0), (4, 0.5)):  # encoded and native: of one length, and of two
        extra = replace(CODED, channels=tuple(rows[:count])).overhead(
            "send", 2, 2, "blockint(bits=8)", "pp"
        )
        assert extra.host.value == pytest.approx(0.0, abs=1e-9)
        assert extra.factor == pytest.approx(factor)


def test_prices_know_whose_message_it_is() -> None:
    """A plan's price of a message is its channel's measured time, native and encoded."""
    cluster = replace(CODED, channels=tuple(through("pp", "send", "groups", 2e-3)))
    call, eight = EngineCall("send", 1 << 18, 2, 2), Choice.of({"codec": "blockint", "bits": 8})
    for choice, more in ((eight, 2e-3), (Choice(), 2e-4)):
        bare, known = (
            Prices(cluster).of(call, choice, torch.bfloat16, dimension).seconds.value
            for dimension in (None, "pp")
        )
        assert known - bare == pytest.approx(more, rel=1e-6)


COMPLETE = replace(
    CODED,
    ranks=tuple(replace(rank, nbytes=1 << 30) for rank in CODED.ranks),
    channels=SENT,
    copies=(Copy("to_host", 1 << 20, figure(1e-3)),),
    kernels=tuple(
        Kernel(rank, kind, "fp32", 1e6, figure(1e-3))
        for rank in range(CODED.world_size)
        for kind in ("elementwise", "adam", "host_adam")
    ),
    trainings=(
        TrainedSmall("deepspeed", 0, "fp32", 1, 1e6, 1000, 1, 8, figure(1e-3), figure(1e-3)),
    ),
)


@pytest.mark.parametrize(
    ("without", "said"),
    [
        (
            {"ranks": tuple(Rank(n, "a GPU") for n in range(CODED.world_size))},
            "nothing about the memory of some ranks: no plan is refused",
        ),
        ({"channels": ()}, "no messages of tp, pp, ep and cp through their channels"),
        ({"copies": ()}, "nothing about copies between device and host"),
        ({"host_codecs": ()}, "nothing about codecs on the hosts"),
        ({"trainings": ()}, "nothing about small trainings by deepspeed"),
        ({"kernels": COMPLETE.kernels[1:]}, ""),
        ({"kernels": COMPLETE.kernels[:-1]}, "nothing about the optimizer on the hosts"),
        (
            {"kernels": [one for one in COMPLETE.kernels if one.kind != "elementwise"]},
            "nothing about the devices' memory: what is no matrix product is planned",
        ),
        (
            {"kernels": [one for one in COMPLETE.kernels if one.kind == "host_adam"]},
            "nothing about the devices' memory: what is no matrix product, and the optimizer's",
        ),
    ],
)
def test_what_a_file_lacks_is_said(without: dict[str, Any], said: str) -> None:
    """Each in a separate sentence, with the plan's assumption."""
    on_gpus = tuple(replace(rank, device="a GPU") for rank in COMPLETE.ranks)
    gpus = replace(COMPLETE, ranks=on_gpus, host_codecs=CODED.codecs)
    assert not list(missing(gpus))
    lines = list(missing(replace(gpus, **without)))
    assert len(lines) == bool(said) and all(line.startswith(said) for line in lines)
    of_hosts = said.endswith(("hosts", "host"))
    assert len(list(missing(replace(gpus, **without), offload=False))) == bool(said) - of_hosts


def test_trainings_are_those_of_the_engine() -> None:
    (said,) = missing(COMPLETE, engine="megatron")
    assert said.startswith("nothing about small trainings by megatron")
    assert "measure" not in said  # it trains with DeepSpeed only
    (said,) = missing(replace(COMPLETE, trainings=()))
    assert said.endswith("lacked: DeepSpeed, memory or --seconds")  # the file has no reason


def test_a_cpu_is_its_own_host() -> None:
    steps = tuple(one for one in COMPLETE.kernels if one.kind != "host_adam")
    assert not list(missing(replace(COMPLETE, kernels=steps)))


def test_a_described_cluster_has_the_hosts_time_of_a_message() -> None:
    """Untimed messages cost host time each, and more in a larger group."""
    fields = {"nodes": 2, "ranks_per_node": 2, "device": "GPU", "memory_gb": 80,
              "tflops": {"bf16": 300}, "inside": {"gbytes_per_second": 300},
              "between": {"gbytes_per_second": 50}}  # fmt: skip
    whole = {"version": 1, "kind": "described", **fields}
    default = cluster_file.parse(whole)
    assert default.overhead("all_reduce", 1000, 500).host.value == pytest.approx(50e-6)
    assert default.overhead("all_reduce", 1000, 500).factor == 1.0
    told = cluster_file.parse({**whole, "message": {"us": 10, "us_per_rank": 1}, "spread": 0.5})
    host = told.overhead("all_gather", 4, 2, "blockint(bits=8)", "zero").host
    assert (host.value, host.low, host.high) == pytest.approx((14e-6, 7e-6, 21e-6))
    with pytest.raises(ConfigError, match="message.us"):
        cluster_file.parse({**whole, "message": {"us": -1}})
    assert "message" not in cluster_file.to_json(Cluster(default.ranks))
