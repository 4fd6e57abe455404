"""What messages cost in the channels of their dimensions, and what is said where nobody knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hybridcomp.plan.choices import Choice
from hybridcomp.plan.cost.prices import Call, Prices
from hybridcomp.plan.machines.cluster import Cluster
from hybridcomp.plan.machines.figures import Figure
from hybridcomp.plan.machines.missing import missing
from hybridcomp.plan.machines.rows import NATIVE, Carried, Kernel, Operation, Rank
from tests.plan.machines.test_cluster import SENDS, coded, figure, machine


def through(dimension: Any, operation: Operation, beside: Any, more: float) -> list[Carried]:
    """Messages through a channel that takes ``more`` seconds beside coding and wire, each."""
    found = []
    for numel in (1 << 15, 1 << 18):
        parts = CODED.encoded_parts(
            operation, "blockint(bits=8)", "bf16", numel, numel, 2, 2, beside == "groups"
        )
        direct = CODED.seconds(operation, 2 * numel, 2, 2, beside == "groups")
        for setting, seconds in (
            ("blockint(bits=8)", Figure.total(parts).plus(figure(more))),
            (NATIVE, direct.plus(figure(more / 10))),
        ):
            found.append(Carried(
                operation, setting, "bf16", 2, 2, numel, numel, seconds,
                dimension=dimension, direct=direct, beside=beside,
            ))  # fmt: skip
    return found


CODED = Cluster(machine().ranks, SENDS, codecs=tuple(coded("blockint(bits=8)", 1e-9)))


SENT = tuple(through("pp", "send", "alone", 1.0))


def test_channels_have_costs_of_their_own() -> None:
    """By dimension, and by whether others send as well; other dimensions have the collectives'."""
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


def test_prices_know_whose_message_it_is() -> None:
    """What a plan pays for a message is what its channel took, natively and encoded."""
    cluster = replace(CODED, channels=tuple(through("pp", "send", "groups", 2e-3)))
    call, eight = Call("send", 1 << 18, 2, 2), Choice.of({"codec": "blockint", "bits": 8})
    for choice, more in ((eight, 2e-3), (Choice(), 2e-4)):
        bare, known = (
            Prices(cluster).of(call, choice, torch.bfloat16, dimension).seconds.value
            for dimension in (None, "pp")
        )
        assert known - bare == pytest.approx(more, rel=1e-6)


def test_a_file_from_before_says_what_it_lacks() -> None:
    (said,) = missing(CODED)
    assert said.startswith("no messages of tp, pp, ep and cp through their channels")
    assert not list(missing(replace(CODED, channels=SENT)))
    gpus = replace(CODED, ranks=(Rank(0, "a GPU"),))
    assert [line.partition(":")[0] for line in missing(gpus)] == [
        "nothing about codecs on the hosts", "nothing about the optimizer on the hosts"
    ]  # fmt: skip
    assert not list(missing(gpus, offload=False))
    known = replace(gpus, host_codecs=gpus.codecs)
    (said,) = missing(known)
    assert "optimizer on the hosts: its steps there are planned as fast as on the devices" in said
    steps = Kernel(0, "host_adam", "fp32", 1e6, figure(1e-3))
    assert not list(missing(replace(known, kernels=(steps,))))
    one_of_two = replace(known, ranks=known.ranks * 2, kernels=(steps,), channels=SENT)
    assert [line.partition(":")[0] for line in missing(one_of_two)] == [
        "nothing about the optimizer on the hosts"
    ]
