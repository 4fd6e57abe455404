"""all_gather, all_to_all, send and recv."""

from __future__ import annotations

from itertools import accumulate, pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridcomp.codecs import make_codec
from hybridcomp.codecs.base import Codec
from hybridcomp.collectives import Meter, send_recv
from hybridcomp.collectives.wire import headers
from hybridcomp.collectives.wire.headers import spec_digest
from hybridcomp.errors import CodecError
from tests.collectives.calls import all_gather, all_to_all, recv, send
from tests.collectives.common import CODECS, DAY, DTYPES, bound, digest, values_of
from tests.ranks import RunRanks
from tests.selection import by_day
from tests.stand_ins.plain_codecs import Identity, Int8


def _check(codec: Codec, found: torch.Tensor, sent: torch.Tensor) -> None:
    """Check that ``found`` is ``sent`` encoded and decoded once."""
    if codec.lossless:
        assert torch.equal(found, sent)
    elif sent.numel():
        error = float((found.float() - sent.float()).abs().max())
        assert error <= bound(codec, [sent], hops=1)


def _all_gather(codec: Codec) -> list[str]:
    me, ranks = dist.get_rank(), dist.get_world_size()
    digests = []
    for dtype in DTYPES:
        for numel in (0, 1, 33, 256):
            for inside in (False, True):
                shards = [values_of(rank, numel, dtype) for rank in range(ranks)]
                out, meter = torch.zeros(ranks * numel, dtype=dtype), Meter()
                shard = shards[me]
                if inside:
                    shard = out[me * numel : (me + 1) * numel].copy_(shard)
                all_gather(shard, out, codec, None, meter=meter)
                for rank in range(ranks):
                    part = out[rank * numel : (rank + 1) * numel]
                    _check(codec, part, values_of(rank, numel, dtype))
                if codec.fixed_size:
                    assert meter.wire_nbytes == (ranks - 1) * codec.wire_nbytes(numel, dtype)
                digests.append(digest(out))
    return digests


@pytest.mark.parametrize("codec", by_day(CODECS, DAY), ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_gather(on_ranks: RunRanks, ranks: int, codec: Codec) -> None:
    results = on_ranks(ranks, _all_gather, codec)
    assert len(results[0]) == 24 and all(result == results[0] for result in results)


def _gathered_together(codec: Codec) -> None:
    """Slices of one message gather the same values as separate messages."""
    me, ranks = dist.get_rank(), dist.get_world_size()
    lengths = (33, 1, 256, 4096 + 7, 64)
    for dtype in DTYPES:
        shard = torch.cat([values_of(me, n, dtype) * 0.5**i for i, n in enumerate(lengths)])
        out, meter = torch.zeros(ranks * shard.numel(), dtype=dtype), Meter()
        cuts = list(accumulate(lengths))
        all_gather(shard, out, codec, None, meter=meter, cuts=cuts[:-1])
        together = torch.split(out, shard.numel())
        for start, stop in pairwise([0, *cuts]):
            alone = torch.zeros(ranks * (stop - start), dtype=dtype)
            all_gather(shard[start:stop], alone, codec, None)
            assert torch.equal(alone, torch.cat([part[start:stop] for part in together]))
        assert meter.messages == 1


@pytest.mark.parametrize("codec", by_day(CODECS, DAY), ids=str)
def test_cuts_of_an_all_gather(on_ranks: RunRanks, codec: Codec) -> None:
    on_ranks(3, _gathered_together, codec)


def _all_to_all(codec: Codec, lengths: list[list[int]] | None) -> None:
    """Send ``lengths[s][d]`` elements from rank s to rank d; None is an even split."""
    me, ranks = dist.get_rank(), dist.get_world_size()
    table = lengths or [[40] * ranks] * ranks
    for dtype in DTYPES:
        inputs = [values_of(rank, sum(table[rank]), dtype) for rank in range(ranks)]
        takes = [table[rank][me] for rank in range(ranks)]
        out, meter = torch.full((sum(takes),), 7.0, dtype=dtype), Meter()
        all_to_all(
            out,
            inputs[me],
            codec,
            None,
            out_splits=takes if lengths else None,
            in_splits=table[me] if lengths else None,
            meter=meter,
        )
        for rank, part in enumerate(torch.split(out, takes)):
            sent = torch.split(inputs[rank], table[rank])[me]
            _check(codec, part, sent)
            assert rank != me or torch.equal(part, sent), "what stays is not quantized"
        if codec.fixed_size:
            expected = [codec.wire_nbytes(n, dtype) for r, n in enumerate(table[me]) if r != me]
            assert meter.wire_nbytes == sum(expected)


@pytest.mark.parametrize("codec", by_day(CODECS, DAY), ids=str)
def test_all_to_all(on_ranks: RunRanks, codec: Codec) -> None:
    on_ranks(3, _all_to_all, codec, None)
    on_ranks(3, _all_to_all, codec, [[10, 0, 100], [33, 1, 0], [0, 0, 64]])
    on_ranks(3, _all_to_all, codec, [[0, 0, 0], [0, 0, 5], [0, 0, 0]])
    on_ranks(2, _all_to_all, codec, [[0, 0], [0, 0]])
    on_ranks(1, _all_to_all, codec, None)


def _send_recv(codec: Codec) -> None:
    """Send from global rank 1 to 2, in a group of both, between all dtypes."""
    group = dist.new_group([1, 2])
    me = dist.get_rank()
    for dtype in DTYPES:
        for into in DTYPES:
            for numel in (0, 5, 300):
                values, meter = values_of(1, numel, dtype), Meter()
                if me == 1:
                    send(values, 2, codec, group, meter=meter)
                    if codec.fixed_size:
                        assert meter.wire_nbytes == 32 + codec.wire_nbytes(numel, dtype)
                elif me == 2:
                    found = torch.full((numel,), 7.0, dtype=into)
                    recv(found, 1, codec, group, meter=meter)
                    exact = torch.zeros(numel, dtype=dtype)
                    used = torch.zeros(codec.wire_nbytes(numel, dtype), dtype=torch.uint8)
                    if numel:
                        codec.decode(used[: codec.encode(values, used)], exact)
                    assert torch.equal(found, exact.to(into))
                    assert meter.wire_nbytes == 0
                assert list(meter.used) == ([codec.spec] if me else [])


@pytest.mark.parametrize("codec", by_day(CODECS, DAY), ids=str)
def test_send_recv_in_a_subgroup(on_ranks: RunRanks, codec: Codec) -> None:
    on_ranks(3, _send_recv, codec)


def _mismatch() -> list[str]:
    """Return the error of recv; the connection must stay usable."""
    me, meter, said = dist.get_rank(), Meter(), []
    cases = [(100, make_codec("blockint", bits=4)), (96, Identity()), (96, Int8())]
    for numel, codec in cases:
        if me == 0:
            send(values_of(0, numel, torch.bfloat16), 1, codec, None, meter=meter)
        else:
            try:
                recv(torch.zeros(96), 0, Int8(), None, meter=meter)
                said.append("fine")
            except CodecError as error:
                said.append(str(error))
    if me == 0:
        dist.send(torch.arange(32, dtype=torch.uint8), 1)
    else:
        with pytest.raises(CodecError, match="the sender did not use hybridcomp"):
            recv(torch.zeros(96), 0, Int8(), None, meter=meter)
    return said


def test_recv_names_both_sides_of_a_mismatch(on_ranks: RunRanks) -> None:
    _, (shape, codec, fine) = on_ranks(2, _mismatch)
    theirs = spec_digest("blockint(bits=4)").hex()
    for word in ("rank 0 sent 100 torch.bfloat16", theirs, "rank 1 expects 96", "int8()"):
        assert word in shape
    assert "rank 0 sent 96" in codec and "rank 1 expects 96" in codec
    assert fine == "fine"


def _damaged_header(nbytes: int) -> str:
    """Return the receiver's error for a header with such a length."""
    codec = make_codec("expcode")
    if dist.get_rank() == 0:
        header = headers.Header(spec_digest(codec.spec), torch.float32, 96, nbytes)
        dist.send(torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8), 1)
        return ""
    with pytest.raises(CodecError) as caught:
        recv(torch.zeros(96), 0, codec, None)
    return str(caught.value)


def test_recv_takes_no_memory_for_a_damaged_header(on_ranks: RunRanks) -> None:
    """This includes a length that is slightly too long."""
    most = make_codec("expcode").wire_nbytes(96, torch.float32)
    for nbytes in (1 << 40, most + 16):
        _, told = on_ranks(2, _damaged_header, nbytes)
        assert f"rank 0 announces a payload of {nbytes} bytes with expcode()" in told
        assert f"at most {most}:" in told


def _wrong_arguments() -> None:
    codec, flat, meter = Identity(), torch.zeros(6), Meter()
    with pytest.raises(CodecError, match="out: expected 12 elements of torch.float32, found 6"):
        all_gather(flat, flat, codec, None, meter=meter)
    with pytest.raises(CodecError, match="out: expected torch.float32 as in values"):
        all_to_all(flat.half(), flat, codec, None, meter=meter)
    with pytest.raises(CodecError, match="5 elements cannot be cut evenly for 2 ranks"):
        all_to_all(flat, flat[:5], codec, None, meter=meter)
    for splits in ([1, 2, 3], [3, 4], [-1, 7]):
        with pytest.raises(CodecError, match="in_splits: expected 2 lengths that add up to 6"):
            all_to_all(flat, flat.clone(), codec, None, in_splits=splits, meter=meter)
    with pytest.raises(CodecError, match="to itself: sends"):
        all_to_all(
            flat, flat.clone(), codec, None, in_splits=[4, 2], out_splits=[2, 4], meter=meter
        )
    with pytest.raises(CodecError, match="1-D contiguous"):
        send(flat.view(2, 3), 1, codec, None, meter=meter)


def test_wrong_arguments_are_refused(on_ranks: RunRanks) -> None:
    on_ranks(2, _wrong_arguments)


def _later() -> list[int]:
    """Return the pending headers after each message on rank 1, and the error of a wrong one."""
    codec, sizes = make_codec("blockint", bits=8), []
    on_gpu = mock.patch.object(
        headers.Unread, "looks_later", lambda self, kind, device: kind in self.kinds
    )
    with on_gpu, mock.patch.object(send_recv, "UNREAD", headers.Unread()) as unread:
        for step, numel in enumerate((100, 100, 64, 100, 64)):
            values = values_of(step, numel)
            if dist.get_rank() == 0:
                send(values, 1, codec, None)
                continue
            found = torch.zeros(numel)
            recv(found, 0, codec, None)
            _check(codec, found, values)
            sizes.append(len(unread.waiting))
        unread.check()
        # the same length, in a dtype that was not agreed on
        if dist.get_rank() == 0:
            send(values_of(0, 100, torch.bfloat16), 1, codec, None)
        else:
            recv(torch.zeros(100), 0, codec, None)
            with pytest.raises(CodecError, match=r"rank 0 sent torch.bfloat16 .* must keep"):
                unread.check()
            unread.check()
    return sizes


def test_headers_of_fixed_sizes_are_read_once_and_compared_later(on_ranks: RunRanks) -> None:
    assert on_ranks(2, _later) == [[], [0, 1, 1, 2, 3]]


def test_headers_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "MOST", 3)
    unread, seen = headers.Unread(), list[bytes]()
    for byte in range(4):
        unread.add(torch.tensor([byte], dtype=torch.uint8), seen.append)
    assert seen == [b"\0", b"\1", b"\2"] and len(unread.waiting) == 1


def test_headers_that_are_here_are_compared_after_a_step() -> None:
    unread, seen = headers.Unread(), list[bytes]()
    for byte in range(2):
        unread.add(torch.tensor([byte], dtype=torch.uint8), seen.append)
    unread.poll()
    unread.add(torch.tensor([2], dtype=torch.uint8), seen.append)
    assert seen == []
    unread.poll()
    assert seen == [b"\0", b"\1"]
    unread.check()  # compares at once, so the next poll has nothing to do
    assert seen == [b"\0", b"\1", b"\2"]
    unread.poll()
    assert len(seen) == 3 and not unread.waiting


def test_on_a_cpu_every_header_is_read() -> None:
    kind = (0, 1, torch.float32, "x")
    unread = headers.Unread({kind})
    assert not unread.looks_later(kind, torch.device("cpu"))
    assert unread.looks_later(kind, torch.device("cuda"))
