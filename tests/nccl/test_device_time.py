"""The ledger's device time over NCCL, measured without blocking."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridcomp.channels import Channels
from hybridcomp.config import CompressionConfig
from tests.channels import sent

pool_module = pytest.importorskip("tests.nccl.pool", reason="ranks that share one GPU")

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUMEL = 1 << 24
EIGHT = {"codec": "blockint", "bits": 8}
#: steps 0, 4, 8 are sampled, 2, 6, 10 are timed
BLOCK = {"dp": EIGHT, "zero": EIGHT, "min_bytes": 0, "hierarchy": "none",
         "ledger": {"sample_every": 4}}  # fmt: skip


def give_it_time() -> None:
    """Keep the device busy for some milliseconds, so that the work is queued before it starts."""
    cuda: Any = torch.cuda
    cuda._sleep(20_000_000)


def messages(channels: Channels, values: torch.Tensor, out: torch.Tensor) -> None:
    """Send an all-reduce, and a gather on a side stream that is waited for later."""
    give_it_time()
    dp, zero = channels["dp"], channels["zero"]
    codec = dp.codec(values.numel(), values.dtype, None)
    assert codec is not None
    sent.all_reduce(dp, values, codec, None).wait()
    values.mul_(0.5)
    cuda: Any = torch.cuda
    side = cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gathered = sent.all_gather(zero, values, out, codec, None, async_op=True)
    gathered.wait()
    torch.cuda.current_stream().wait_stream(side)


def coding_ms(channels: Channels, values: torch.Tensor) -> float:
    """Return the milliseconds of encoding and decoding ``values`` alone."""
    codec = channels["dp"].codec(values.numel(), values.dtype, None)
    assert codec is not None
    payload = torch.empty(
        codec.wire_nbytes(values.numel(), values.dtype), dtype=torch.uint8, device=values.device
    )
    found: list[float] = []
    for _ in range(5):
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        give_it_time()
        events[0].record()
        codec.encode(values, payload)
        codec.decode(payload, values)
        events[1].record()
        torch.cuda.synchronize()
        found.append(events[0].elapsed_time(events[1]))
    return sorted(found)[2]


def trained() -> tuple[dict[str, Any], float, int]:
    """Return the rows of 12 steps, coding time alone, and the messages with pending events."""
    device = torch.device("cuda", torch.cuda.current_device())
    channels = Channels(CompressionConfig.parse(BLOCK))
    values = torch.randn(NUMEL, device=device)
    out = torch.empty(2 * NUMEL, device=device)
    for step in range(12):
        channels.step = step
        torch.cuda.synchronize()
        watched = not channels.sampling
        torch.cuda.set_sync_debug_mode("error" if watched else "default")
        try:
            messages(channels, values, out)
            channels.ledger.drain()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    channels.ledger.drain(wait=True)
    ledger = channels.ledger
    left = sum(len(clock._landed) for clock in ledger.clocks.values())
    return ledger.rows(ledger.interval), coding_ms(channels, values), left


def test_codec_is_what_coding_takes_and_wait_what_the_wire_does() -> None:
    pool = pool_module.NcclPool(2)
    try:
        ranks = pool.run(trained, timeout=120.0)
    finally:
        pool.close()
    for rows, direct_ms, left in ranks:
        assert left == 0
        for dimension in ("dp", "zero"):
            row = rows[dimension]["forward"]
            assert row["clock"] == "device" and row["messages"] == 12
            # a sum encodes a half, sums and encodes another and decodes both; a gather encodes one
            # and decodes two. Ranks share the GPU, so either may wait for the other's kernels
            assert direct_ms / 4 < row["codec_ms"] / 12 < 12 * direct_ms, (
                dimension,
                direct_ms,
                row,
            )
            # 12 messages of 16 MB and more, over sockets: a host that does not wait would see 0
            assert row["wait_ms"] / 12 > 1.0, row
