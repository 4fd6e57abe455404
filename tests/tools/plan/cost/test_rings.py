"""A plan's encodings and decodings of a ring equal those of real ranks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from hybridcomp.channels import Channels
from hybridcomp.codecs import make_codec
from hybridcomp.config import CompressionConfig
from hybridcomp.dimensions import Direction
from hybridcomp.nn import ring_attention
from hybridcomp.session import process
from hybridcomp.tools.plan.choices import Choices
from hybridcomp.tools.plan.cost.calls import EngineCall
from hybridcomp.tools.plan.cost.job import Item, PlannedJob
from hybridcomp.tools.plan.cost.memory import memory_of
from hybridcomp.tools.plan.cost.work import price, work_of
from hybridcomp.tools.plan.layout import Layout
from hybridcomp.tools.plan.models.model import Messages
from hybridcomp.tools.plan.request import Batch, SearchLimits
from tests.ranks import RunRanks
from tests.selection import by_day
from tests.tools.plan.clusters import cluster, small

EIGHT = {"codec": "blockint", "bits": 8}
#: tokens per rank, key heads, their width
LENGTH, HEADS, WIDTH = 128, 2, 64
#: number of a rank's keys, and of its values
KEYS = LENGTH * HEADS * WIDTH
#: calls and values, by pass and codec operation
Counts = dict[tuple[str, str], tuple[float, float]]


def done() -> Counts:
    """Return this rank's codec work in a call of ring attention with a causal mask."""
    calls: Counter[tuple[str, str]] = Counter()
    values: Counter[tuple[str, str]] = Counter()
    block = {"cp": EIGHT, "min_bytes": 0, "ledger": {"sample_every": 0}}
    process.use(Channels(CompressionConfig.parse(block)))
    kind, now = type(make_codec("blockint", bits=8)), "forward"

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(kind, name)

        def counted(self: Any, *tensors: torch.Tensor, **more: Any) -> Any:
            calls[now, name] += 1
            values[now, name] += tensors[0 if name == "encode" else 1].numel()
            return original(self, *tensors, **more)

        return counted

    q, k, v = (torch.randn(1, HEADS, LENGTH, WIDTH, requires_grad=True) for _ in range(3))
    with contextlib.ExitStack() as stack:
        for name in ("encode", "decode", "decode_add"):
            stack.enter_context(patch.object(kind, name, counting(name)))
        out = ring_attention(q, k, v)
        now = "backward"
        out.sum().backward()  # type: ignore[no-untyped-call]
    process.use(None)
    return {key: (calls[key], values[key]) for key in calls}


def kept() -> int:
    """Return the bytes of messages that a call keeps between its passes."""
    nbytes = 0
    process.use(Channels(CompressionConfig.parse({"cp": EIGHT, "min_bytes": 0})))

    def note(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal nbytes
        nbytes += tensor.nbytes if tensor.dtype == torch.uint8 else 0
        return tensor

    q, k, v = (torch.randn(1, HEADS, LENGTH, WIDTH, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        ring_attention(q, k, v)
    process.use(None)
    return nbytes


def items(ranks: int, way: Direction) -> list[Item]:
    job = PlannedJob(
        small(), cluster(ranks, 1), Batch(4, 128), SearchLimits(dtype="fp32", own=("ring",))
    )
    layout = Layout(context=ranks, context_way="ring", cuts=(6,))
    return list(job.layer_items(layout, 0, Messages(ring=(KEYS, KEYS)), way))


def planned(ranks: int) -> Counts:
    """Return a rank's average work according to the plan."""
    found: Counts = {}
    ways: tuple[Direction, ...] = ("forward", "backward")
    for way in ways:
        for item in items(ranks, way):
            assert isinstance(item.call, EngineCall) and item.call.coded is not None
            for one in item.call.coded:
                calls, values = found.get((way, one.direction), (0.0, 0.0))
                more = item.count * one.calls
                size = one.share * item.call.numel
                found[way, one.direction] = calls + more, values + more * size
    return found


@pytest.mark.parametrize("ranks", by_day([2, 4], [2]))
def test_keys_are_encoded_once_and_decoded_at_every_hop(on_ranks: RunRanks, ranks: int) -> None:
    """The owner encodes in the forward pass only; a rank uses half of the keys before its own."""
    real, plan = on_ranks(ranks, done), planned(ranks)
    assert set(plan) == {
        ("forward", "encode"), ("forward", "decode"), ("backward", "encode"),
        ("backward", "decode"), ("backward", "decode_add"),
    }  # fmt: skip
    for key, (calls, values) in plan.items():
        assert calls == pytest.approx(sum(one[key][0] for one in real) / ranks), key
        assert values == pytest.approx(sum(one[key][1] for one in real) / ranks), key
    assert all(set(one) == set(plan) for one in real)


def test_encoded_keys_are_kept_between_passes(on_ranks: RunRanks) -> None:
    """By the owner, for every layer without recomputation, for every pass in flight."""
    (nbytes, _) = on_ranks(2, kept)
    job = PlannedJob(
        small(), cluster(2, 1), Batch(8, 256), SearchLimits(dtype="fp32", own=("ring",))
    )
    layout = Layout(context=2, context_way="ring", cuts=(6,), micro_batch=1, accumulation=8)
    encoded = Choices.of_block({"cp": EIGHT})

    def planned(layout: Layout, choices: Choices, stage: int = 0) -> float:
        return memory_of(job, work_of(job, layout), stage, choices)["keys"]

    whole = planned(layout, encoded)
    # 4 blocks of 128 tokens per rank, 256 wide, against the 128 of one call
    assert nbytes == pytest.approx(whole / 4 * KEYS / (128 * 256), rel=0.01)
    assert planned(layout, Choices()) == planned(layout.replace(context=1, data=2), encoded) == 0
    assert planned(layout.replace(recompute=((1, 4),)), encoded) == pytest.approx(whole / 4)
    assert planned(layout.replace(context_way="ulysses"), encoded) == 0
    job = replace(job, cluster=cluster(4, 1))
    piped = layout.replace(stages=2, cuts=(3, 3))
    assert planned(piped, encoded) == pytest.approx(2 * whole / 2)  # two passes in flight
    assert planned(piped, encoded, 1) == pytest.approx(whole / 2)


def test_a_longer_ring_encodes_its_keys_no_more_often() -> None:
    """At 1.1e9 bytes a second (20 us a call), with no host time."""

    def coding(ranks: int, way: Direction) -> float:
        machine = cluster(ranks, 1, message={"us": 0.0, "us_per_rank": 0.0})
        job = PlannedJob(small(), machine, Batch(4, 128), SearchLimits(dtype="fp32"))
        choices = Choices.of_block({"cp": EIGHT})
        return sum(price(job, item, choices).coding.value for item in items(ranks, way))

    whole = 2 * KEYS * 4 / 1.1e9  # keys and values, once each through the codec
    for ranks in (2, 3, 8):
        hops = ranks - 1
        ahead = whole * (1 + 0.75 * hops) + 20e-6 * (4 + 3 * hops)
        behind = whole * (0.75 + 2 * 0.75) * hops + 20e-6 * (3 + 2 + 2) * hops
        assert coding(ranks, "forward") == pytest.approx(ahead)
        assert coding(ranks, "backward") == pytest.approx(behind)
