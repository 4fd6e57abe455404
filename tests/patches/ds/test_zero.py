"""Each ZeRO seam: replaced functions, messages that stay exact, rejected settings."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import RunRanks

if find_spec("deepspeed") is None:  # importing it here would take longer than the tests
    pytest.skip("needs deepspeed", allow_module_level=True)

from tests.selection import by_day
from tests.training.trainer import (
    BUCKET,
    Job,
    Tiny,
    make_engine,
    parameters,
    run,
    train,
    train_step,
)

BLOCKINT4 = {"codec": "blockint", "bits": 4}
BLOCKINT8 = {"codec": "blockint", "bits": 8}
GATHERS = {"dp": "none", "zero": BLOCKINT4, "min_bytes": 0}
FEEDBACK = {"dp": {**BLOCKINT4, "error_feedback": True}, "min_bytes": 0}


def unattached_engine(stage: int) -> tuple[list[float], list[float]]:
    """Return losses of an engine without a block: unpatched, and with the patches applied."""
    import hybridcomp

    job = Job(stage, steps=4)
    engine = make_engine(job)
    unpatched = [train_step(engine, job, step) for step in range(4)]
    engine = make_engine(job)
    hybridcomp.install()
    return unpatched, [train_step(engine, job, step) for step in range(4)]


@pytest.mark.parametrize("stage", by_day([0, 1, 2, 3], [1, 3]))
def test_engine_without_a_block_is_left_alone(module_ranks: RunRanks, stage: int) -> None:
    for unpatched, patched in module_ranks(2, unattached_engine, stage):
        assert patched == unpatched


def residual_spans(job: Job) -> dict[str, list[tuple[int, int]]]:
    """Return the slices of every parameter with a sender residual on this rank, and ``size``s."""
    from hybridcomp.channels import channels_of

    spans: dict[str, list[tuple[int, int]]] = {}

    def look(engine: Any, step: int) -> None:
        channels = channels_of(engine)
        assert channels is not None
        sender = channels.residuals.state_dict()["sender"]
        for name, stored in sender.items():
            spans[name] = sorted((start, start + part.numel()) for start, part in stored)
        for name, parameter in engine.module.named_parameters():
            spans[f"size {name}"] = [(0, getattr(parameter, "ds_numel", parameter.numel()))]

    train(job, look)
    return spans


SPREAD = {
    "zero0": Job(0, "bf16"), "zero1": Job(1, "bf16"), "zero2": Job(2), "zero3": Job(3),
    "zero2-accumulation": Job(2, accumulation=2),
    "bf16_optimizer": Job(1, "bf16", bf16_optimizer=True),
    "round_robin": Job(1, zero={"round_robin_gradients": True}),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", by_day(SPREAD, ["zero0", "zero3", "bf16_optimizer", "round_robin"])
)
def test_residuals_cover_every_parameter_once(module_ranks: RunRanks, name: str) -> None:
    """They are keyed by parameter and offset, for any bucket layout."""
    for spans in module_ranks(2, residual_spans, replace(SPREAD[name], steps=3, block=FEEDBACK)):
        sizes = {name[5:]: found[0][1] for name, found in spans.items() if name[:5] == "size "}
        assert len(sizes) == 8
        for name, size in sizes.items():
            position = 0
            for start, stop in spans[name]:
                assert start == position
                position = stop
            assert position == size


def roundtrip(shards: list[Tensor]) -> Tensor:
    """Gather these shards; return the result."""
    from hybridcomp.codecs import make_codec

    codec = make_codec("blockint", bits=4)
    out = []
    for shard in shards:
        payload = torch.empty(codec.wire_nbytes(shard.numel(), shard.dtype), dtype=torch.uint8)
        used = codec.encode(shard, payload)
        decoded = torch.empty_like(shard)
        codec.decode(payload[:used], decoded)
        out.append(decoded)
    return torch.cat(out)


def masters_under_gathers(job: Job) -> int:
    """Check after every step that weights are decoded masters and masters are exact."""
    checked = 0

    def look(engine: Any, step: int) -> None:
        nonlocal checked
        optimizer = engine.optimizer
        if job.bf16_optimizer:
            masters, flats = optimizer.fp32_groups_flat_partition, optimizer.bf16_groups_flat
        else:
            masters, flats = optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups_flat
        for master, flat in zip(masters, flats, strict=True):
            assert master.data_ptr() != flat.data_ptr()
            shards = [torch.empty_like(master) for _ in range(2)]
            dist.all_gather(shards, master.detach())
            coded = roundtrip([shard.to(flat.dtype) for shard in shards])
            assert torch.equal(flat, coded)
            assert not torch.equal(torch.cat(shards).to(flat.dtype), coded)
            checked += 1

    train(job, look)
    return checked


SHARED = {
    "zero1-fp32": Job(1), "zero1-bf16": Job(1, "bf16"), "zero2-fp32": Job(2),
    "zero2-bf16": Job(2, "bf16"), "bf16_optimizer": Job(1, "bf16", bf16_optimizer=True),
}  # fmt: skip


@pytest.mark.parametrize("name", by_day(SHARED, ["zero1-fp32", "zero2-bf16", "bf16_optimizer"]))
def test_masters_stay_exact_at_stages_1_and_2(module_ranks: RunRanks, name: str) -> None:
    job = replace(SHARED[name], steps=3, block=GATHERS)
    assert module_ranks(2, masters_under_gathers, job) == [3, 3]


def seen_in_forward(job: Job) -> tuple[list[Tensor], list[Tensor]]:
    """Return ``middle.weight`` of stage 3 as forward saw it and as gathered exactly, by step."""
    seen: list[Tensor] = []
    exact: list[Tensor] = []
    engine = make_engine(job)
    engine.module.middle.register_forward_pre_hook(
        lambda module, inputs: seen.append(module.weight.detach().clone())
    )
    for step in range(job.steps):
        exact.append(parameters(engine)["middle.weight"])
        train_step(engine, job, step)
    return seen, exact


@pytest.mark.parametrize("dtype", by_day(["fp32", "bf16"], ["bf16"]))
def test_gathered_parameters_stay_exact_at_stage_3(module_ranks: RunRanks, dtype: str) -> None:
    job = Job(3, dtype, steps=4)
    base, _ = module_ranks(2, seen_in_forward, job)
    first, second = module_ranks(2, seen_in_forward, replace(job, block=GATHERS))
    for mine, theirs in zip([*first[0], *first[1]], [*second[0], *second[1]], strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(first[1][0], base[1][0])
    for coded, exact in zip(*first, strict=True):
        assert not torch.equal(coded, exact)
        segments = exact.float().abs().max()
        assert (coded.float() - exact.float()).abs().max() <= segments / 8


def dirty_padding(job: Job, value: float) -> list[float]:
    """Return losses when ``value`` fills the memory that upstream leaves uninitialized."""
    engine = make_engine(job)
    dirtied = 0
    for step in range(job.steps):
        for parameter in engine.module.parameters():
            start = parameter.ds_tensor.ds_numel * dist.get_rank()
            filled = max(0, parameter.ds_numel - start)
            dirtied += parameter.ds_tensor[filled:].fill_(value).numel()
        train_step(engine, job, step)
    assert (dirtied > 0) == (dist.get_rank() == 1)
    return [train_step(engine, job, step) for step in range(2)]


@pytest.mark.parametrize("value", [1e30, float("nan")])
def test_padding_of_partitions_never_reaches_a_codec(module_ranks: RunRanks, value: float) -> None:
    job = Job(3, steps=3, block={"dp": BLOCKINT8, "zero": BLOCKINT8, "min_bytes": 0})
    assert module_ranks(2, dirty_padding, job, value) == module_ranks(2, dirty_padding, job, 0.0)


def small_gathers(job: Job) -> tuple[list[float], int]:
    """Return losses and gathers with a small limit of elements per gather."""
    from hybridcomp.channels.messages import parameter_deltas
    from hybridcomp.patches.ds.zero import parameter_gathers

    with (
        mock.patch.object(parameter_gathers, "GATHER_NUMEL", 1000),
        mock.patch.object(parameter_deltas, "CHUNK_ALIGN", 32),
    ):
        outcome = train(job)
    return outcome.losses, outcome.ledger["zero"][0]


@pytest.mark.parametrize(
    "job", [Job(2), Job(1, "bf16", bf16_optimizer=True)], ids=["zero2", "bf16"]
)
def test_cut_gathers_are_the_same(module_ranks: RunRanks, job: Job) -> None:
    job = replace(job, steps=4, block=GATHERS)
    whole = module_ranks(2, run, [job])
    for (outcome,), (losses, messages) in zip(
        whole, module_ranks(2, small_gathers, job), strict=True
    ):
        assert losses == outcome.losses
        assert outcome.ledger["zero"][0] == 4 and messages == 4 * 6


@pytest.mark.parametrize(
    ("codec", "dtype"),
    by_day(
        [
            (BLOCKINT4, "bf16"),
            ({"codec": "zfp", "rate": 8}, "fp32"),
            ({"error_bound": 1e-2}, "bf16"),
        ],
        [({"codec": "zfp", "rate": 8}, "fp32")],
    ),
    ids=["blockint", "zfp", "bound"],
)
def test_prefetched_parameters_share_messages_and_nothing_else(
    module_ranks: RunRanks, codec: dict[str, Any], dtype: str
) -> None:
    """The prefetch limit decides which parameters share a message, not their decoded values."""
    # with the larger limit inner.weight and outer.weight stay native, middle.weight does not
    for least in (0, 8000 if dtype == "fp32" else 4000):
        job = Job(3, dtype, steps=2, block={"dp": "none", "zero": codec, "min_bytes": least})
        prefetched = [
            {"stage3_prefetch_bucket_size": numel, "stage3_max_reuse_distance": 0}
            for numel in (0, 2000, 100_000)
        ]
        first, second = module_ranks(2, run, [replace(job, zero=keys) for keys in prefetched])
        losses = [(a.losses, b.losses, a.digests) for a, b in zip(first, second, strict=True)]
        messages = [a.ledger["zero"][0] - a.ledger["zero"][1] for a in first]
        assert losses[0] == losses[1] == losses[2]
        # forward and backward; DeepSpeed 0.19.0 includes biases, see WAITS_FOR_ALL
        assert messages[0] == 2 * 2 if least else messages[0] >= 2 * 2 * 3
        assert messages[0] > messages[1] and messages[2] > 0
        assert messages[1] > messages[2] or least


def unknown_path(zero: dict[str, Any], policy: str) -> tuple[str, int]:
    """Train on a gradient path without a seam that the config check missed.

    Returns the error and the native messages.
    """
    from hybridcomp.errors import ConfigError
    from hybridcomp.patches.rules import ds_check as check

    job = Job(2, steps=2, zero=zero)
    rules = vars(check)["TABLES"]
    vars(check)["TABLES"] = ()
    try:
        block = {"dp": BLOCKINT8, "min_bytes": 0, "on_unsupported": policy}
        outcome = train(replace(job, block=block))
    except ConfigError as error:
        return str(error), 0
    finally:
        vars(check)["TABLES"] = rules
    messages, native, *_ = outcome.ledger.get("dp", (0, 0, 0, 0))
    assert messages == native
    return "", messages


@pytest.mark.parametrize(
    "key", ["reduce_scatter", "use_multi_rank_bucket_allreduce", "contiguous_gradients"]
)
def test_unknown_paths_of_gradients_are_refused(module_ranks: RunRanks, key: str) -> None:
    for message, messages in module_ranks(2, unknown_path, {key: False}, "native"):
        if not messages:
            pytest.skip("DeepSpeed before 0.19.8 reduces nothing on a CPU this way")
        assert message == ""
    for message, _ in module_ranks(2, unknown_path, {key: False}, "error"):
        assert message.startswith("compression.dp: ") and "without a seam" in message


@pytest.mark.parametrize("key", ["reduce_scatter", "zero_quantized_gradients"])
def test_paths_of_stage_3_that_are_said_to_be_native_are(module_ranks: RunRanks, key: str) -> None:
    """Upstream reduce-scatters even then: parameters larger than a bucket, and with qgZ on one node
    all of them.
    """
    whole = key == "reduce_scatter"
    job = Job(3, steps=2, zero={key: not whole})
    block = {"dp": BLOCKINT8, "min_bytes": 0, "on_unsupported": "native"}
    for plain, ours in module_ranks(2, run, [job, replace(job, block=block)]):
        assert ours.losses == plain.losses
        messages, native, raw, wire = ours.ledger["dp"]
        assert messages == native > 0
        # two ranks send each gradient once in an all-reduce, half of it in a reduce-scatter
        sizes = [p.numel() for p in Tiny().parameters()]
        sent = [n if whole and n < BUCKET else -(-n // 2) for n in sizes]
        assert raw == wire == job.steps * 4 * sum(sent)


def test_fetches_ask_in_one_order_on_all_ranks() -> None:
    """DeepSpeed passes parameters out of a set, and gathers those of experts apart from others.

    Ranks that began with different groups would wait for each other: lossless codecs, whose
    payloads differ in size, are gathered in one call.
    """
    from hybridcomp.channels import ATTRIBUTE, Channels
    from hybridcomp.config import CompressionConfig
    from hybridcomp.patches.ds.zero import parameter_gathers

    channels = Channels(CompressionConfig.parse({"zero": "expcode"}))
    params = [
        SimpleNamespace(
            ds_id=number, ds_persist=number in (1, 4), ds_tensor=torch.zeros(4),
            **{ATTRIBUTE: channels},
        )
        for number in (4, 2, 0, 1, 3)
    ]  # fmt: skip
    asked: list[list[int]] = []

    def original(self: Any, some: Any, forward: bool, quantize: bool) -> None:
        asked.append([p.ds_id for p in some])

    with mock.patch.object(parameter_gathers, "filled", lambda p: 4):
        parameter_gathers.make_all_gather_params(original)(None, params, True)
    assert asked == [[1, 4], [0, 2, 3]]
