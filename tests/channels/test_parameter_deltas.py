"""Gathers of deltas on plain buffers: bit-identical replicas, exact where required."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridcomp.channels import Channels
from hybridcomp.channels.messages import delta_references, parameter_deltas
from hybridcomp.codecs import StepCode
from hybridcomp.collectives.hierarchical.discovery import Hierarchy
from hybridcomp.config import CompressionConfig
from hybridcomp.errors import CodecError
from tests.ranks import RankPool, RunRanks
from tests.selection import by_day

RANKS, SHARE = 4, 1000
STEPS = 8


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(RANKS) as ranks:
        yield ranks


class Replica:
    """A buffer as an optimizer leaves it: gathered shards, fp32 masters."""

    def __init__(
        self, zero: dict[str, Any], dtype: torch.dtype, hierarchy: Hierarchy = "none"
    ) -> None:
        block = {"zero": {"delta": True, **zero}, "min_bytes": 0, "hierarchy": hierarchy}
        self.ranks = dist.get_world_size()
        self.channels = Channels(CompressionConfig.parse(block))
        self.channels.place([tuple(range(self.ranks))])
        self.channel = self.channels["zero"]
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.master = torch.randn(SHARE, generator=self.generator)
        self.buffer = torch.zeros(self.ranks * SHARE, dtype=dtype)
        self.own = self.buffer.view(self.ranks, -1)[dist.get_rank()]

    def step(self, cuts: int = 1, async_op: bool = False) -> bool:
        """Run an optimizer step and its gather; return whether it sent deltas."""
        change = torch.randn(SHARE, generator=self.generator)
        self.master += 1e-2 * self.master.abs().clamp(min=0.1) * change
        self.own.copy_(self.master)
        codec = self.channel.codec(self.buffer.numel(), self.buffer.dtype, None)
        assert codec is not None
        if deltas := delta_references.agreed(self.channel, self.buffer, codec, None):
            for start in range(0, SHARE, SHARE // cuts):
                columns = (start, start + SHARE // cuts)
                parameter_deltas.gather(
                    self.channel, self.buffer, codec, None,
                    columns=columns, async_op=async_op,
                ).wait()  # fmt: skip
        else:
            self.exact()
            delta_references.keep(self.channel, self.buffer, None)
        self.channels.step += 1
        return deltas

    def exact(self) -> None:
        """Gather natively."""
        parts = [torch.empty_like(self.own) for _ in range(self.ranks)]
        dist.all_gather(parts, self.own.clone())
        self.buffer.copy_(torch.cat(parts))

    def target(self) -> Tensor:
        """Return all ranks' masters in fp32."""
        parts = [torch.empty_like(self.master) for _ in range(self.ranks)]
        dist.all_gather(parts, self.master)
        return torch.cat(parts)


def bits(values: Tensor) -> bytes:
    return bytes(values.view(torch.uint8).tolist())


def follow(
    zero: dict[str, Any],
    dtype: torch.dtype,
    cuts: int,
    async_op: bool,
    hierarchy: Hierarchy = "none",
) -> tuple[list[bytes], list[float], list[bool]]:
    """Return per step: the buffer, its relative error, whether deltas were sent."""
    replica = Replica(zero, dtype, hierarchy)
    held, errors, deltas = [], [], []
    for _ in range(STEPS):
        deltas.append(replica.step(cuts, async_op))
        exact = replica.target()
        held.append(bits(replica.buffer))
        errors.append(float((replica.buffer - exact).norm() / exact.norm()))
        codec = replica.channel.state.policy.codecs["zero", "forward"]
        if deltas[-1] and codec is not None and codec.lossless:
            assert torch.equal(replica.buffer, exact.to(dtype))
    return held, errors, deltas


LOSSY: dict[str, Any] = {"codec": "blockint", "bits": 4}
EXACT: dict[str, Any] = {"codec": "stepcode"}
CODECS: list[dict[str, Any]] = [
    LOSSY,
    {"codec": "zfp", "rate": 6.0},
    {"codec": "fp8"},
    {"codec": "mpc"},
    {"codec": "expcode"},
    EXACT,
    {"codec": "radix", "error_bound": 0.1},
    {"codec": "auto", "error_bound": 0.1},
]
LOSSLESS = ("mpc", "expcode", "stepcode")
BF16 = torch.bfloat16
DTYPES = (torch.float32, BF16, torch.float16)
CASES = [
    (zero, dtype)
    for zero in CODECS
    for dtype in DTYPES
    if zero["codec"] != "stepcode" or dtype != torch.float32
]
#: a lossy codec of fixed and one of variable size, bit patterns as integers, exact steps
DAY = [
    (zero, dtype)
    for zero, dtype in CASES
    if (zero["codec"], dtype)
    in {("blockint", BF16), ("auto", torch.float16), ("expcode", torch.float32), ("stepcode", BF16)}
]


@pytest.mark.parametrize(("zero", "dtype"), by_day(CASES, DAY), ids=lambda value: str(value))
def test_all_ranks_hold_the_same(pool: RankPool, zero: dict[str, Any], dtype: torch.dtype) -> None:
    """The error is within part of a step's change plus rounding to the buffer's dtype."""
    results = pool.run(follow, zero, dtype, 1, False)
    for other in results[1:]:
        assert other == results[0]
    _, errors, deltas = results[0]
    assert deltas == [False] + [True] * (STEPS - 1)
    rounding = torch.finfo(dtype).eps / 2
    assert max(errors) < 4e-3 + rounding
    if zero["codec"] in LOSSLESS:
        assert max(errors) <= rounding


@pytest.mark.parametrize(("cuts", "async_op"), [(4, False), (1, True)])
@pytest.mark.parametrize("codec", ["blockint", "stepcode"])
def test_cut_and_asynchronous_gathers_are_the_same(
    pool: RankPool, codec: str, cuts: int, async_op: bool
) -> None:
    zero = {"codec": "blockint", "bits": 8} if codec == "blockint" else {"codec": codec}
    whole = pool.run(follow, zero, torch.bfloat16, 1, False)
    for mine, theirs in zip(
        pool.run(follow, zero, torch.bfloat16, cuts, async_op), whole, strict=True
    ):
        if async_op or codec == "stepcode":
            assert mine == theirs
        # a split moves block boundaries, but equally on all ranks
        assert mine[2] == theirs[2] and max(mine[1]) < 3e-3


@pytest.mark.parametrize("codec", ["blockint", "mpc", "stepcode"])
def test_two_levels_hold_the_same(pool: RankPool, codec: str) -> None:
    """Nodes of two ranks: native inside, encoded between them."""
    flat, *_ = pool.run(follow, {"codec": codec}, torch.bfloat16, 1, False)
    for found in pool.run(follow, {"codec": codec}, torch.bfloat16, 1, False, 2):
        assert found == flat


@pytest.mark.parametrize("codec", ["blockint", "stepcode"])
def test_three_levels_hold_the_same(on_ranks: RunRanks, codec: str) -> None:
    """Two sites of two nodes: relays forward payloads unchanged, from the same reference."""
    flat, *_ = on_ranks(8, follow, {"codec": codec}, torch.bfloat16, 1, False)
    for found in on_ranks(8, follow, {"codec": codec}, torch.bfloat16, 1, False, [2, 2]):
        assert found == flat


def furthest(bound: float) -> float:
    """Return the largest error of any weight at any step, under an absolute bound."""
    zero = {"codec": "radix", "error_bound": bound, "error_bound_mode": "abs"}
    replica = Replica(zero, torch.float32)
    largest = 0.0
    for _ in range(STEPS):
        replica.step()
        largest = max(largest, float((replica.buffer - replica.target()).abs().max()))
    return largest


def test_an_absolute_bound_holds_for_the_weights(pool: RankPool) -> None:
    """The next gather includes the last one's error: errors do not accumulate."""
    for largest in pool.run(furthest, 1e-3):
        assert 2e-4 < largest <= 1e-3 + 2.0**-22


def exactly(zero: dict[str, Any], event: str) -> tuple[list[bool], list[bool], str, list[bytes]]:
    """Return steps by deltas, steps that end exact, the log, and the buffers."""
    replica = Replica(zero, torch.bfloat16)
    deltas, exact, held = [], [], []
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for step in range(STEPS):
            if step == 4:
                happen(event, replica)
            deltas.append(replica.step())
            exact.append(
                torch.equal(replica.buffer.nan_to_num(), replica.target().bfloat16().nan_to_num())
            )
            held.append(bits(replica.buffer))
    return deltas, exact, printed.getvalue(), held


def happen(event: str, replica: Replica) -> None:
    rank = dist.get_rank()
    if event == "written on one rank" and rank == 1:
        replica.buffer[-1] += 1e-2
    elif event == "written on all ranks":
        replica.buffer.copy_(torch.linspace(-1, 1, replica.buffer.numel()))
    elif event == "resync on one rank" and rank == 2:
        replica.channels.resync()
    elif event == "not finite" and rank == 0:
        replica.master[7] = math.nan
    elif event == "native in between":
        replica.exact()
        delta_references.forget(replica.buffer)


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ("written on one rank", "parameters of ranks [1] of 4"),
        ("written on all ranks", "parameters of ranks [0, 1, 2, 3] of 4"),
        ("resync on one rank", ""),
        ("native in between", ""),
    ],
)
@pytest.mark.parametrize("zero", [LOSSY, EXACT], ids=str)
def test_deltas_start_anew(pool: RankPool, zero: dict[str, Any], event: str, said: str) -> None:
    results = pool.run(exactly, zero, event)
    for deltas, exact, _, held in results:
        assert deltas == exact_but(0, 4)
        assert exact == [zero is EXACT or not sent for sent in deltas]
        assert held == results[0][3]
    assert said in results[0][2] and bool(said) == ("somebody wrote" in results[0][2])


def broken(rank: int) -> tuple[list[str], bytes, list[bool]]:
    """Corrupt the third step on one rank; return the error and the buffers."""
    replica, raised, deltas = Replica(EXACT, torch.bfloat16), [], []
    for step in range(STEPS):
        with contextlib.ExitStack() as stack:
            if step == 3 and dist.get_rank() == rank:
                damaged = CodecError("damaged")
                stack.enter_context(mock.patch.object(StepCode, "decode", side_effect=damaged))
            try:
                deltas.append(replica.step())
            except CodecError as error:
                raised.append(str(error))
                replica.channels.step += 1
    assert torch.equal(replica.buffer, replica.target().bfloat16())
    return raised, bits(replica.buffer), deltas


def test_the_gather_after_a_failed_one_is_exact(pool: RankPool) -> None:
    """The failed rank holds the old values or a mix."""
    results = pool.run(broken, 2)
    for rank, (raised, held, deltas) in enumerate(results):
        assert raised == ([] if rank != 2 else ["damaged"])
        assert held == results[0][1]
        left = exact_but(0, 4)
        assert deltas == (left if rank != 2 else left[:3] + left[4:])


def exact_but(*steps: int) -> list[bool]:
    return [step not in steps for step in range(STEPS)]


@pytest.mark.parametrize(("zero", "exactly_sent"), [(LOSSY, range(4, STEPS)), (EXACT, ())])
def test_a_nan_arrives(pool: RankPool, zero: dict[str, Any], exactly_sent: Sequence[int]) -> None:
    """A lossy codec then sends exact values; steps keep its bits. It does not count as drift."""
    results = pool.run(exactly, zero, "not finite")
    for deltas, exact, printed, held in results:
        assert deltas == exact_but(0, *exactly_sent)
        assert exact == [zero is EXACT or not sent for sent in deltas]
        last = torch.frombuffer(bytearray(held[-1]), dtype=torch.bfloat16)
        assert last.isnan().nonzero().tolist() == [[7]]
        assert printed == "" and held == results[0][3]


def test_resync_every(pool: RankPool) -> None:
    for deltas, exact, printed, _ in pool.run(exactly, {**LOSSY, "resync_every": 3}, ""):
        assert deltas == exact_but(0, 3, 6)
        assert exact == [not sent for sent in deltas]
        assert printed == ""


def written_down() -> tuple[float, float, float | None]:
    replica = Replica(LOSSY, torch.bfloat16)
    replica.step()
    replica.channels.ledger.restart()
    replica.channels.step = 0  # a sampled step
    replica.step()
    entry = replica.channels.ledger.interval["zero", "forward"]
    return entry.raw_nbytes, entry.wire_nbytes, entry.error


def test_ledger(pool: RankPool) -> None:
    """Digests count as bytes; the error is that of the weights, not of the delta."""
    for raw, wire, error in pool.run(written_down):
        assert raw == (RANKS - 1) * SHARE * 2
        assert wire > (RANKS - 1) * (SHARE * 4.25 / 8 + 16)
        assert wire < (RANKS - 1) * (SHARE * 4.5 / 8 + 64)
        assert error is not None and 1e-4 < error < 2e-3


def chunked(limit: int) -> tuple[float, float, Tensor]:
    """Gather 10,000 values per rank, at most ``limit`` per message; return raw, wire, values."""
    block = {"zero": {"codec": "blockint", "bits": 4}, "min_bytes": 0}
    channels = Channels(CompressionConfig.parse(block))
    channels.place([tuple(range(RANKS))])
    generator = torch.Generator().manual_seed(dist.get_rank())
    shard = torch.randn(10_000, generator=generator).bfloat16()
    out = torch.zeros(RANKS * shard.numel(), dtype=shard.dtype)
    message = parameter_deltas.GatherParameters(
        numel=out.numel(), dtype=out.dtype, group=None, shard=shard, out=out, buffer=out,
        limit=limit,
    )  # fmt: skip
    channels["zero"].run(message, native=lambda: None, encoded=lambda handle: handle.wait())
    entry = channels.ledger.interval["zero", "forward"]
    return entry.raw_nbytes, entry.wire_nbytes, out


def test_a_gather_in_chunks_sends_every_value_once(pool: RankPool) -> None:
    whole, cut = pool.run(chunked, 0), pool.run(chunked, RANKS * parameter_deltas.CHUNK_ALIGN)
    for (raw, wire, values), (raw_cut, wire_cut, values_cut) in zip(whole, cut, strict=True):
        assert raw == raw_cut == (RANKS - 1) * 10_000 * 2
        assert wire <= wire_cut < 1.01 * wire, "of three chunks no more than their padding"
        assert torch.equal(values, values_cut)


def steps_written_down() -> tuple[float, float, int]:
    """Return raw and wire bytes of a stepcode gather, and this rank's expected payload."""
    replica = Replica(EXACT, torch.bfloat16)
    replica.step()
    held = replica.own.clone()
    replica.channels.ledger.restart()
    assert replica.step()
    room = torch.empty(3 * SHARE + 8192, dtype=torch.uint8)
    used = StepCode().encode(replica.own.clone(), held, room)
    entry = replica.channels.ledger.interval["zero", "forward"]
    return entry.raw_nbytes, entry.wire_nbytes, used


def test_ledger_of_steps(pool: RankPool) -> None:
    """Each rank gets the payload, its size in front, and a digest of the reference."""
    for raw, wire, used in pool.run(steps_written_down):
        assert raw == (RANKS - 1) * SHARE * 2
        assert wire == (RANKS - 1) * (used + 16 + 16)
        assert used < SHARE * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 3, 4093, 4 * 4093 * 3 + 5])
def test_digest_sees_every_bit_and_place(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel + 4).to(dtype)[4:]
    before = int(delta_references.digest(values))
    assert int(delta_references.digest(values.clone())) == before
    misaligned = torch.empty(numel + 1, dtype=dtype)[1:].copy_(values)
    assert int(delta_references.digest(misaligned)) == before
    integers = values.view({2: torch.int16, 4: torch.int32}[dtype.itemsize])
    for place in {0, numel // 2, numel - 1}:
        for bit in (0, 1, 7, 8 * dtype.itemsize - 1):
            mask = torch.tensor(1 << bit).to(integers.dtype)
            integers[place] ^= mask
            assert int(delta_references.digest(values)) != before
            integers[place] ^= mask
    if numel > 1:
        assert int(delta_references.digest(values.flip(0))) != before


def test_an_empty_buffer_has_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when all parameters of a group are frozen."""
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 3)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 2)
    block = {"zero": {"codec": "blockint", "bits": 4, "delta": True}, "min_bytes": 0}
    channel, empty = Channels(CompressionConfig.parse(block))["zero"], torch.zeros(0)
    codec = channel.state.policy.codecs["zero", "forward"]
    assert codec is not None
    for _ in range(2):  # created, then renewed
        delta_references.keep(channel, empty, None)
        reference = delta_references.reference_of(empty)
        assert reference is not None and reference.own.shape == (0,)
        assert delta_references._state(channel, empty, codec, None) == (True, 0)
